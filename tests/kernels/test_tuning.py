from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.pallas_kernels.dispatch import Operation, without_kernels
from jaxinfer.pallas_kernels.implementation import mosaic, reference
from jaxinfer.pallas_kernels.mosaic.interpreter import interpreted
from jaxinfer.pallas_kernels.mosaic.tuning import Trial, table_name, tuned
from jaxinfer.pallas_kernels.target import UnsupportedError


def _kernel(x):
    if x.ndim > 1:
        raise UnsupportedError("vectors only")
    return x + (tuned("add", str(len(x))) or {"by": 1})["by"]


def _reference(x):
    return x - 1.0


_add = Operation("add", mosaic(_kernel), reference(_reference))


@jax.jit
def add(x):
    return _add(x)


def test_a_table_is_named_after_its_device():
    assert table_name("NVIDIA H200") == "nvidia_h200.json"


@pytest.mark.parametrize(("names", "expected"), [((), -1.0), (("add",), -1.0), (("multiply",), 1.0)])
def test_fallbacks_replace_the_named_kernels(names, expected):
    with interpreted():
        assert jax.jit(lambda x: add(x) * 1.0)(jnp.zeros(3))[0] == 1.0
        with without_kernels(*names):
            assert add(jnp.zeros(3))[0] == expected
        assert add(jnp.zeros(3))[0] == 1.0


def test_other_threads_interpret_kernels_too():
    def double(x_ref, y_ref):
        y_ref[...] = 2 * x_ref[...]

    def run():
        x = jnp.ones(128)
        return plgpu.kernel(double, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)[0]

    with interpreted(), ThreadPoolExecutor() as pool:
        assert pool.submit(run).result() == 2.0
    with pytest.raises(ValueError, match="Only interpret mode is supported on CPU"):
        run()


def test_unsupported_arguments_run_the_fallback():
    with interpreted():
        assert _add(jnp.zeros((1, 1)))[0, 0] == -1.0


def test_a_trial_sets_the_tiles_of_its_operation_only():
    with interpreted():
        for trial, expected in ((Trial("add", {"by": 5}), 5.0), (Trial("other", {"by": 5}), 1.0), (Trial(), 1.0)):
            with trial.active():
                assert add(jnp.zeros(4))[0] == expected
            assert trial.lookups == [("add", "4")]
        assert add(jnp.zeros(4))[0] == 1.0
