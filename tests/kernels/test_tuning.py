import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.dispatch import UnsupportedError, dispatch, interpreted, without_kernels
from pallas_kernels.tuning import Trial, table_name, tuned


def _kernel(x):
    if x.ndim > 1:
        raise UnsupportedError("vectors only")
    return x + (tuned("add", str(len(x))) or {"by": 1})["by"]


def _definition(x):
    return x - 1.0


@jax.jit
def add(x):
    return dispatch("add", _kernel, _definition, x)


def test_a_table_is_named_after_its_device():
    assert table_name("NVIDIA H200") == "nvidia_h200.json"


@pytest.mark.parametrize(("names", "expected"), [((), -1.0), (("add",), -1.0), (("multiply",), 1.0)])
def test_definitions_replace_the_kernels_that_are_named(names, expected):
    with interpreted():
        assert jax.jit(lambda x: add(x) * 1.0)(jnp.zeros(3))[0] == 1.0
        with without_kernels(*names):
            assert add(jnp.zeros(3))[0] == expected
        assert add(jnp.zeros(3))[0] == 1.0


def test_what_a_kernel_does_not_take_runs_its_definition():
    with interpreted():
        assert dispatch("add", _kernel, _definition, jnp.zeros((1, 1)))[0, 0] == -1.0


def test_a_trial_decides_the_tiles_of_its_operation_alone():
    with interpreted():
        for trial, expected in ((Trial("add", {"by": 5}), 5.0), (Trial("other", {"by": 5}), 1.0), (Trial(), 1.0)):
            with trial.running():
                assert add(jnp.zeros(4))[0] == expected
            assert trial.asked == [("add", "4")]
        assert add(jnp.zeros(4))[0] == 1.0
