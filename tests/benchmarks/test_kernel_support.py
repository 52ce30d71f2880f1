"""The table in docs/kernels.md of which GPU runs what."""

import pytest

from benchmarks.kernel_support import markdown, support_of
from benchmarks.kernel_table import PAGE
from jaxinfer.compiled.target import Target


@pytest.mark.slow
def test_the_table_is_true():
    supports = {}
    for target in map(Target.load, Target.names()):
        same = {other.gpu.capability: other.name for other in map(Target.load, supports)}
        known = supports.get(same.get(target.gpu.capability, ""))
        supports[target.name] = support_of(target.gpu) if known is None else known
    assert f"<!-- python -m benchmarks.kernel_support --write -->\n{markdown(supports)}<!-- end -->" in PAGE.read_text()


def test_a_table_says_what_does_not_run():
    supports = {
        "a": {"add": {"small": None, "large": None}, "sub": {"one": "too old"}},
        "b": {"add": {"small": None, "large": "too big"}, "sub": {"one": "too old"}},
        "c": {"add": {"small": None, "large": None}, "sub": {"one": "too old"}},
    }
    assert markdown(supports).splitlines() == [
        "| operation | a, c | b |",
        "|---|---|---|",
        "| add | kernel | kernel; XLA in 1 of 2 cases (2) |",
        "| sub | XLA (1) | XLA (1) |",
        "",
        "1. too old",
        "2. large: too big",
    ]
