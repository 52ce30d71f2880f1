"""On a GPU: `pytest -m gpu`. Every kernel against float64, at usual and at awkward shapes."""

import jax
import pytest

from benchmarks.gpu import cases, numerics

CHECKED = {case.title: case for case in cases.checked()}


@pytest.mark.gpu
@pytest.mark.parametrize("title", CHECKED)
def test_a_kernel_is_as_exact_as_its_dtype(title):
    assert jax.default_backend() == "gpu", "no GPU: install jaxinfer[cuda12] on a machine that has one"
    case = CHECKED[title]
    ours, _ = numerics.errors(case)
    assert ours <= case.tolerance
