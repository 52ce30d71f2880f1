"""Non-maximum suppression against brute force in numpy."""

import numpy as np
import pytest

from jaxinfer.models.vision import suppression
from jaxinfer.models.vision.suppression import CANDIDATES, DETECTIONS
from tests.models import vision

CONFIDENCE, IOU = 0.25, 0.45


def suppress(predictions):
    return vision.run(lambda p: suppression.suppress(p, confidence=CONFIDENCE, iou=IOU), predictions)


def overlap(a, b) -> float:
    """Intersection over union of two boxes."""
    width, height = (min(a[i + 2], b[i + 2]) - max(a[i], b[i]) for i in (0, 1))
    shared = max(width, 0) * max(height, 0)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared
    return shared / union if union > 0 else 0.0


def brute_force(predictions: np.ndarray) -> list[tuple[np.ndarray, float, int]]:
    """(box, score, class) of what is left of one image's candidates [N, 5 + classes]."""
    detections = []
    for x, y, w, h, is_object, *of_class in predictions:
        score = is_object * max(of_class)
        if is_object > CONFIDENCE and score > CONFIDENCE:
            detections.append((np.array([x - w / 2, y - h / 2, x + w / 2, y + h / 2]), score, int(np.argmax(of_class))))
    detections.sort(key=lambda detection: -detection[1])
    left = []
    for box, score, kind in detections[:CANDIDATES]:
        if not any(kind == k and overlap(box, b) > IOU for b, _, k in left):
            left.append((box, score, kind))
    return left[:DETECTIONS]


def random_predictions(candidates: int, classes: int, seed: int, side: float = 100) -> np.ndarray:
    rng = np.random.default_rng(seed)
    boxes = np.concatenate((rng.uniform(0, side, (candidates, 2)), rng.uniform(1, 40, (candidates, 2))), axis=-1)
    return np.concatenate((boxes, rng.uniform(0, 1, (candidates, 1 + classes))), axis=-1).astype(np.float32)


def check(detections, row: int, expected) -> None:
    count = len(expected)
    assert detections.count[row] == count
    for i, (box, score, kind) in enumerate(expected):
        np.testing.assert_allclose(detections.boxes[row, i], box, atol=1e-4)
        np.testing.assert_allclose(detections.scores[row, i], score, rtol=1e-6)
        assert detections.classes[row, i] == kind
    for rows in (detections.boxes, detections.scores, detections.classes):
        assert not rows[row, count:].any()


@pytest.mark.parametrize(("candidates", "classes"), [(60, 3), (7, 2)])
def test_as_brute_force(candidates, classes):
    batch = np.stack([random_predictions(candidates, classes, seed) for seed in range(3)])
    detections = suppress(batch)
    for row, predictions in enumerate(batch):
        check(detections, row, brute_force(predictions))


def test_of_one_class():
    """Many, a chain of boxes, no detection, and boxes without an area; in one program."""
    many = [random_predictions(250, 1, seed) for seed in range(3)]
    # Each box overlaps its neighbour alone: the first drops the second, so that the third is left.
    chain = [[10 + 3 * i, 10, 10, 10, 0.9 - 0.01 * i, 1.0] for i in range(41)]
    nothing = random_predictions(250, 1, seed=0)
    nothing[:, 4] = CONFIDENCE  # at most: not above
    without_area = [[5, 5, 0, 0, 0.9, 0.9], [5, 5, 0, 0, 0.8, 0.9], [5, 5, 0, 7, 0.7, 0.9]]
    batch = np.stack([*many, *(filled(rows, 250) for rows in (chain, nothing, without_area))])
    detections, expected = suppress(batch), [brute_force(predictions) for predictions in batch]
    assert [len(rows) for rows in expected[3:]] == [21, 0, 3]
    for row, of_row in enumerate(expected):
        check(detections, row, of_row)


def filled(rows, candidates: int) -> np.ndarray:
    """The rows, and candidates that are no objects behind them."""
    rows = np.array(rows, np.float32)
    return np.pad(rows, [(0, candidates - len(rows)), (0, 0)])


def test_more_than_fit():
    predictions = random_predictions(1500, 2, seed=5, side=10_000)
    predictions[:, 4:] = 0.5 + predictions[:, 4:] / 2  # all are detections
    expected = brute_force(predictions)
    assert len(expected) == DETECTIONS
    check(suppress(predictions[None]), 0, expected)
