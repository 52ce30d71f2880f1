"""The object detector."""

import dataclasses

import numpy as np
import pytest

from jaxinfer.models import Yolo
from jaxinfer.models.vision.images import Letterbox
from jaxinfer.models.vision.suppression import corners
from tests.models import vision


@pytest.fixture(scope="module")
def predicted():
    """Candidates and detections of two images, in one program."""
    model = vision.build(vision.DETECTOR)
    assert isinstance(model, Yolo)
    return vision.run(lambda images: (model.predictions(images), model(images)), vision.images(2, 24, 48, 3))


def test_candidates_of_all_grids(predicted):
    candidates, _ = predicted
    assert candidates.shape == (2, 3 * (8 * 8 + 4 * 4 + 2 * 2), 5 + 2)
    assert ((candidates[..., 4:] > 0) & (candidates[..., 4:] < 1)).all()
    cells = candidates[:, : 3 * 8 * 8].reshape(2, 8, 8, 3, 7)
    y, x = np.mgrid[:8, :8]
    for place, cell in ((0, x), (1, y)):  # a centre is at most 1.5 cells from its cell's corner
        offsets = cells[..., place] / 8 - cell[..., None]
        assert ((offsets > -0.5) & (offsets < 1.5)).all()
    largest = 4 * np.array(vision.DETECTOR.anchors[0])
    assert ((cells[..., 2:4] > 0) & (cells[..., 2:4] < largest)).all()


def test_boxes_are_in_the_image_s_pixels(predicted):
    """Those of a letterboxed image, moved and scaled back, and cut at the image's border."""
    candidates, detections = predicted
    box = Letterbox.fit(24, 48, 64)
    for row, count in enumerate(detections.count):
        assert 0 < count < 300
        scores = candidates[row, :, 4] * candidates[row, :, 5:].max(-1)
        best = np.asarray(corners(candidates[row, scores.argmax(), :4]))
        expected = (best - [box.left, box.top, box.left, box.top]) / box.scale
        np.testing.assert_allclose(detections.boxes[row, 0], np.clip(expected, 0, [48, 24, 48, 24]), atol=1e-3)
        assert (detections.scores[row, :count] > vision.DETECTOR.confidence).all()
        assert (np.diff(detections.scores[row, :count]) <= 0).all()
        for values in (detections.boxes, detections.scores, detections.classes):
            assert not values[row, count:].any()


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
