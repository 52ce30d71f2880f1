"""The object detector."""

import dataclasses

import numpy as np
import pytest

from jaxinfer.models import Yolo
from jaxinfer.models.images import Letterbox
from jaxinfer.models.suppression import corners
from tests.models import vision


@pytest.fixture(scope="module")
def model():
    model = vision.build(vision.DETECTOR)
    assert isinstance(model, Yolo)
    return model


def test_candidates_of_all_grids(model):
    found = vision.run(model.predictions, vision.images(2, 64, 64, 3))
    assert found.shape == (2, 3 * (8 * 8 + 4 * 4 + 2 * 2), 5 + 2)
    assert ((found[..., 4:] > 0) & (found[..., 4:] < 1)).all()
    cells = found[:, : 3 * 8 * 8].reshape(2, 8, 8, 3, 7)
    y, x = np.mgrid[:8, :8]
    for place, cell in ((0, x), (1, y)):  # a centre is at most 1.5 cells from its cell's corner
        offsets = cells[..., place] / 8 - cell[..., None]
        assert ((offsets > -0.5) & (offsets < 1.5)).all()
    largest = 4 * np.array(vision.DETECTOR.anchors[0])
    assert ((cells[..., 2:4] > 0) & (cells[..., 2:4] < largest)).all()


def test_boxes_are_in_the_image_s_pixels(model):
    """Those of a letterboxed image, moved and scaled back, and cut at the image's border."""
    picture = vision.images(1, 24, 48, 3)
    found = vision.run(model, picture)
    count = int(found.count[0])
    assert 0 < count < 300
    candidates = vision.run(model.predictions, picture)[0]
    box = Letterbox.of(24, 48, 64)
    scores = candidates[:, 4] * candidates[:, 5:].max(-1)
    best = candidates[scores.argmax(), :4]
    wanted = (np.asarray(corners(best)) - [box.left, box.top, box.left, box.top]) / box.scale
    np.testing.assert_allclose(found.boxes[0, 0], np.clip(wanted, 0, [48, 24, 48, 24]), atol=1e-3)
    assert (found.scores[0, :count] > vision.DETECTOR.confidence).all()
    assert (np.diff(found.scores[0, :count]) <= 0).all()
    assert not found.boxes[0, count:].any()


def test_no_detection_is_no_row():
    nothing = vision.build(dataclasses.replace(vision.DETECTOR, confidence=1.0))
    found = vision.run(nothing, vision.images(2, 24, 48, 3))
    assert found.count.tolist() == [0, 0]
    assert not found.boxes.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": []}, "YoloConfig.labels must be"),
        ({"image_size": 100}, "YoloConfig.image_size must be a multiple of 32, got 100"),
        ({"confidence": 1.5}, r"YoloConfig.confidence must be in \[0, 1\], got 1.5"),
        ({"widths": (4, 8, 8, 16)}, "needs 5 widths and 4 depths"),
        ({"widths": (4, 8, 8, 16, 15)}, "must be even"),
        ({"anchors": (((1.0, 2.0),),)}, "as many boxes for each of 3 grids"),
        ({"anchors": (((1.0, 0.0),),) * 3}, "anchors must be positive"),
    ],
)
def test_configs_that_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(vision.DETECTOR, **changes)
