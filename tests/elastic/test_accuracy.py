"""Accuracy of levels: counts, errors, and McNemar's test against values by hand."""

import numpy as np
import pytest

from jaxinfer.elastic import LevelAccuracy
from jaxinfer.elastic.accuracy import expected_accuracies


def test_counts():
    plain = np.array([1, 1, 1, 0, 0, 1], bool)
    level = np.array([1, 0, 1, 1, 0, 0], bool)
    found = LevelAccuracy.from_correct(level, plain, "a")
    assert (found.images, found.correct, found.gained, found.lost) == (6, 3, 1, 2)
    assert found.accuracy == 0.5
    assert found.difference == pytest.approx(-1 / 6)
    deviation = np.std(level.astype(float) - plain.astype(float))
    assert found.difference_error == pytest.approx(deviation / np.sqrt(6))


@pytest.mark.parametrize(
    ("gained", "lost", "expected"),
    [(0, 0, 1.0), (5, 5, 1.0), (0, 6, 2 / 2**6), (1, 9, 2 * (1 + 10) / 2**10), (8, 2, 2 * (1 + 10 + 45) / 2**10)],
)
def test_p_value_is_mcnemars(gained, lost, expected):
    found = LevelAccuracy(images=200, correct=100, gained=gained, lost=lost, adaptation="")
    assert found.p_value == pytest.approx(expected)


def test_errors_are_not_zero_where_all_is_right():
    found = LevelAccuracy.from_correct(np.ones(50, bool), np.ones(50, bool), "")
    assert 0 < found.standard_error < 0.05
    assert found.difference_error == 0
    assert found.p_value == 1


def test_a_lower_accuracy_by_chance_is_not_believed():
    def expected(*correct):
        return expected_accuracies(
            [LevelAccuracy(images=100, correct=n, gained=0, lost=0, adaptation="") for n in correct]
        )

    assert expected(60, 90, 95) == pytest.approx([0.60, 0.90, 0.95], rel=1e-4)
    assert expected(60, 90, 88) == pytest.approx([0.60, 0.90, 0.90], rel=1e-4)
    assert expected(60, 90, 80, 82) == pytest.approx([0.60, 0.90, 0.80, 0.82], rel=1e-4)  # worse indeed
    for found in (expected(90, 90, 90), expected(90, 89, 88)):
        assert found == sorted(set(found))  # more tokens are better where all is equal
