"""An MLP of experts in C++ against its definition, for each instruction set that this CPU has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.pallas_kernels import Weights
from jaxinfer.pallas_kernels.cpu.library import use_library
from jaxinfer.pallas_kernels.dispatch import recorded_implementations
from jaxinfer.pallas_kernels.moe import cpu, expert_mlp, top_k_gating
from jaxinfer.pallas_kernels.moe import reference as plain
from jaxinfer.pallas_kernels.target import UnsupportedError
from jaxinfer.pallas_kernels.weights import quantize
from tests.kernels.cpu_levels import LEVELS_OF_PRODUCTS, library_of

EMBED, HIDDEN = 128, 256

# One program each, not one for each operation.
gating = jax.jit(top_k_gating, static_argnums=1, static_argnames="capacity")


@pytest.fixture(params=LEVELS_OF_PRODUCTS)
def library(request):
    built = library_of(request.param)
    with use_library(built):
        yield built


def stack(fmt, experts, outputs, inputs, rng):
    values = rng.standard_normal((experts, outputs, inputs), np.float32)
    return Weights(jnp.asarray(values.astype(fmt))) if fmt in ("float32", "bfloat16") else values


def arguments(fmt, *, tokens, experts, k, gated=True, bias=False, dtype="float32", logits=None, **rule):
    rng = np.random.default_rng(tokens)
    logits = rng.normal(size=(tokens, experts)) if logits is None else logits
    rows = 2 * HIDDEN if gated else HIDDEN
    biases = [rng.normal(size=(experts, n)).astype(np.float32) if bias else None for n in (rows, EMBED)]
    return (
        rng.normal(size=(tokens, EMBED)).astype(dtype),
        gating(logits.astype(np.float32), k, **rule),
        stack(fmt, experts, rows, EMBED, rng),
        stack(fmt, experts, EMBED, HIDDEN, rng),
        *biases,
    )


def results(*calls, fmt="float32", gated=True):
    """Those of the kernel and of its definition, for each call's arguments, in one program: compiling takes longest."""

    @jax.jit
    def both(calls):
        for args in calls:
            if fmt.startswith("int"):
                args[2:4] = (quantize(values, fmt) for values in args[2:4])
        functions = cpu.expert_mlp, plain.expert_mlp
        return [[function(*args, activation="silu", gated=gated) for function in functions] for args in calls]

    return jax.device_get(both([list(args) for args in calls]))


def check(*calls, fmt="float32", gated=True, tolerance=5e-4):
    for y, exact in results(*calls, fmt=fmt, gated=gated):
        assert y.shape == exact.shape
        y, exact = (x.astype(np.float32) for x in (y, exact))
        np.testing.assert_allclose(y, exact, rtol=0, atol=tolerance * np.abs(exact).max())


FORMATS = ["int4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("float32", "bfloat16", "int8"))]


@pytest.mark.parametrize("fmt", FORMATS)
def test_experts_of_few_tokens(library, fmt):
    tolerance = 2e-2 if fmt == "int8" else 5e-4
    sizes = [(1, 8, 2), (9, 5, 3), (16, 24, 2), (30, 3, 1)]
    check(*(arguments(fmt, tokens=n, experts=e, k=k) for n, e, k in sizes), fmt=fmt, tolerance=tolerance)
    check(arguments(fmt, tokens=3, experts=4, k=2, bias=True, dtype=jnp.bfloat16), fmt=fmt, tolerance=3e-2)
    check(arguments(fmt, tokens=3, experts=4, k=2, gated=False), fmt=fmt, gated=False, tolerance=tolerance)


def test_all_tokens_to_one_expert(library):
    logits = np.zeros((32, 8))
    logits[:, 3] = 5.0
    check(arguments("float32", tokens=32, experts=8, k=1, logits=logits))


def test_choices_that_are_dropped(library):
    logits = np.zeros((12, 4))
    logits[:, 1] = 5.0
    args = arguments("float32", tokens=12, experts=4, k=1, logits=logits, capacity=2)
    ((y, exact),) = results(args)
    np.testing.assert_allclose(y, exact, rtol=0, atol=5e-4 * np.abs(exact).max())
    assert (y[2:] == 0).all()
    assert (y[:2] != 0).any()


def test_padding_is_not_computed(library):
    args = arguments("float32", tokens=4, experts=4, k=2, valid=np.array([True, False, True, False]))
    args[0][1] = np.nan
    nobody = arguments("float32", tokens=4, experts=4, k=2, valid=np.zeros(4, bool))
    (y, _), (nothing, _) = results(args, nobody)
    assert np.isfinite(y).all()
    assert (y[1] == 0).all()
    assert (y[0] != 0).any()
    assert (nothing == 0).all()


def test_operation_runs_it_for_few_rows_of_an_expert(library):
    def implementation(tokens):
        args = arguments("float32", tokens=tokens, experts=2, k=1)
        with recorded_implementations() as used:
            jax.eval_shape(lambda *args: expert_mlp(*args, activation="silu", gated=True), *args)
        return next(iter(used["expert_mlp"])).name

    assert implementation(64) == "ffi"
    assert implementation(1000) == "composed"
    with pytest.raises(UnsupportedError, match=r"more than \d+ rows of an expert, got 1000 of 2"):
        results(arguments("float32", tokens=1000, experts=2, k=1))
