"""The inspection line, tiny: experts that know what they see, and no image without a verdict."""

import dataclasses

import numpy as np
import pytest
from rich.console import Console

from examples import circuit_board
from jaxinfer.progress import showing

SIZES = circuit_board.Sizes(
    types=2,
    images=80,
    drawings=192,
    steps=5,  # the detectors learn nothing, and say "none"
    max_batch=2,
    classifier=dataclasses.replace(circuit_board.CLASSIFIER, stem=16, widths=(16, 32, 64), depths=(1, 1, 1)),
    detector=dataclasses.replace(circuit_board.DETECTOR, widths=(4, 8, 8, 16, 16)),
)


@pytest.mark.slow
def test_line(tmp_path):
    console = Console(record=True, width=120)
    outcomes, scores = circuit_board.run(tmp_path, SIZES, console)
    best, samba = (outcomes[mode] for mode in circuit_board.MODES)
    assert len(best.results) == len(samba.results) == SIZES.images
    assert best.statistics.failed == samba.statistics.failed == 0
    assert best.statistics.switches <= samba.statistics.switches
    assert scores["classifiers"].verdicts == SIZES.images
    assert scores["classifiers"].accuracy > 0.8
    assert scores["classifiers"].caught > 0.7
    assert scores["classifiers"].false_alarms < 0.15
    assert 0 < scores["detectors"].verdicts < SIZES.images
    assert scores["line"].verdicts == SIZES.images
    assert "times as fast as samba" in console.export_text()

    said = []
    with showing(lambda what, done, total: said.append(what)):
        circuit_board.build(tmp_path, SIZES)
    assert set(said) == {"fitting classifiers"}  # which are all there; detectors are not trained again


@pytest.mark.parametrize("mark", circuit_board.DETECTOR.labels)
@pytest.mark.parametrize("seed", range(3))
def test_boxes_surround_marks(mark, seed):
    part, place = circuit_board._mark(mark, np.random.default_rng(seed))
    y, x = np.mgrid[: circuit_board.SIZE, : circuit_board.SIZE] - (circuit_board.SIZE - 1) / 2
    image = np.zeros((*x.shape, 3))
    part.paint(image, circuit_board._seen_from(x, y, *place))
    rows, columns = np.nonzero(image.max(-1) > 100)
    found = [columns.min(), rows.min(), columns.max(), rows.max()]
    centre, size = np.split(circuit_board._box(part, *place), 2)
    expected = np.clip([*(centre - size / 2), *(centre + size / 2)], 0, circuit_board.SIZE - 1)
    np.testing.assert_allclose(found, expected, atol=2)


def test_half_of_a_family_has_a_detector():
    line = circuit_board.components(24)
    assert len({component.name for component in line}) == 24
    assert sum(component.detector is not None for component in line) == 12
    assert len({component.detector for component in line if component.detector}) == len(circuit_board.GROUPS)


def test_drawings_are_those_of_their_seed():
    component = circuit_board.components(1)[0]
    one, same, other = (circuit_board.draw(component, np.random.default_rng(seed)).image for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()


def test_scores():
    score = circuit_board.Score.from_pairs([("ok", "ok"), ("defect", "ok"), ("scratch", "bridge"), ("none", "scratch")])
    assert score == (4, 0.25, 0.5, 0.5)
