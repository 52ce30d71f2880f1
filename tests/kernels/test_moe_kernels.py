"""The MoE kernels: interpreted with race detection, lowered for CUDA, compiled for an H200."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.compiled.target import Target, compile_for
from jaxinfer.pallas_kernels.moe import Routing, grouped_matmul, permute, reference, top_k_gating, unpermute
from jaxinfer.pallas_kernels.moe import mosaic as kernels
from jaxinfer.pallas_kernels.moe.mosaic import gating as gating_module
from jaxinfer.pallas_kernels.moe.mosaic.grouped_matmul import Tiles, choose_tiles
from jaxinfer.pallas_kernels.moe.routing import Rule
from jaxinfer.pallas_kernels.mosaic.tuning import Trial
from jaxinfer.pallas_kernels.target import UnsupportedError, targeting
from jaxinfer.pallas_kernels.weights import Weights
from tests.kernels.interpreting import without_races
from tests.kernels.routing import HARD_LOGITS, check_in_range, logits_of

H200 = Target.load("h200").gpu

# Models by name: experts, choices, inputs of a layer, hidden size of an expert.
MODELS = {
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "qwen1.5-moe": (60, 4, 2048, 1408),
    "qwen3-30b": (128, 8, 2048, 768),
    "deepseek-v3": (256, 8, 7168, 2048),
}
TOKENS = (1, 8, 64, 4096)


def check_gating(logits, **options):
    rule = Rule(**options)
    with without_races():
        routing = kernels.top_k_gating(logits, rule=rule)
    for name, actual, expected in zip(Routing._fields, routing, reference.top_k_gating(logits, rule=rule), strict=True):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), name
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-7, err_msg=name)
    return routing


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("tokens", "experts", "k", "capacity", "normalize", "kind"),
    [
        (1, 4, 1, None, True, "random"),
        (1, 8, 2, None, True, "random"),  # 2 choices: fewer than a TMA copy can write
        (3, 8, 8, None, False, "ties"),  # all experts are chosen
        (3, 60, 5, None, True, "one"),
        (8, 12, 2, 3, False, "random"),  # choices are dropped
        (5, 132, 4, None, False, "masked"),  # experts of probability 0; two experts per thread
    ],
)
def test_gating_interpreted(tokens, experts, k, capacity, normalize, kind):
    check_gating(logits_of(tokens, experts, kind), k=k, capacity=capacity, normalize=normalize)


@pytest.mark.interpreted
@pytest.mark.parametrize("tiles", [1, 3])
@pytest.mark.parametrize("kind", HARD_LOGITS)
def test_gating_of_any_logits_interpreted(kind, tiles, monkeypatch):
    """Every index is valid, in the last, partial tile too; the tables are the reference's."""
    if tiles > 1:
        monkeypatch.setattr(gating_module, "_TILE", 4)
        monkeypatch.setattr(gating_module, "_TILES", 2)
    logits = logits_of(4 * tiles - 1, 8, kind)
    routing = check_gating(logits, k=3, capacity=None, normalize=True)
    check_in_range(routing, logits, 3, None, normalize=True)


@pytest.mark.interpreted
@pytest.mark.parametrize(("tokens", "k", "capacity"), [(8, 2, None), (11, 1, None), (10, 2, 4)])
def test_gating_in_tiles_interpreted(tokens, k, capacity, monkeypatch):
    """Tiles of 4 tokens, whose counts are summed two tiles at a time; the last tile is partial."""
    monkeypatch.setattr(gating_module, "_TILE", 4)
    monkeypatch.setattr(gating_module, "_TILES", 2)
    check_gating(logits_of(tokens, 8), k=k, capacity=capacity, normalize=True)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "experts", "k"), [(64, 256, 8), (63, 64, 6), (200, 128, 3), (4200, 8, 1)])
def test_more_gating_interpreted(tokens, experts, k):
    check_gating(logits_of(tokens, experts), k=k, capacity=None, normalize=True)


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    ("tokens", "k", "capacity", "columns"), [(1, 1, None, 128), (3, 2, None, 384), (9, 2, 2, 2048)]
)
def test_layout_interpreted(tokens, k, capacity, columns, dtype):
    routing = reference.top_k_gating(logits_of(tokens, 4), rule=Rule(k=k, capacity=capacity))
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(tokens, columns)), dtype)
    y = jnp.asarray(rng.normal(size=(len(routing.tokens), columns)), dtype)
    with without_races():
        rows, combined = kernels.permute(x, routing), kernels.unpermute(y, routing)
    np.testing.assert_array_equal(rows, reference.permute(x, routing))
    assert combined.dtype == dtype
    tolerance = 1e-6 if dtype == jnp.float32 else 2**-8  # one rounding of the sum
    expected = np.asarray(reference.unpermute(y, routing), np.float32)
    np.testing.assert_allclose(np.asarray(combined, np.float32), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.interpreted
def test_layout_of_many_rows_interpreted(monkeypatch):
    """Eight rows per thread block, fewer in the last one; dropped rows are not read."""
    monkeypatch.setattr("jaxinfer.pallas_kernels.moe.mosaic.rows._FEW_ROWS", 4)
    routing = reference.top_k_gating(logits_of(11, 4), rule=Rule(k=2, capacity=3))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(11, 128)), jnp.float32)
    with without_races():
        rows = kernels.permute(x, routing)
        combined = kernels.unpermute(jnp.where((routing.tokens < 11)[:, None], rows, jnp.nan), routing)
    np.testing.assert_array_equal(rows, reference.permute(x, routing))
    np.testing.assert_allclose(combined, reference.unpermute(rows, routing), rtol=1e-6, atol=1e-6)


@pytest.mark.interpreted
def test_layout_of_a_broken_table_reads_nothing_else():
    """Rows of no token, before the first or after the last, are zero: no index leaves the array."""
    routing = reference.top_k_gating(logits_of(3, 4), rule=Rule(k=2, capacity=None))
    broken = jnp.array([-1, 0, 3, 2, -(2**31), 2**31 - 1], jnp.int32)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 128)), jnp.float32)
    y = jnp.concatenate([x, -x])
    tables = routing._replace(tokens=broken, rows=jnp.array([[-1, 0], [6, 5], [-(2**31), 2**31 - 1]], jnp.int32))
    with without_races():
        rows, combined = kernels.permute(x, tables), kernels.unpermute(y, tables)
    np.testing.assert_array_equal(rows, jnp.zeros_like(y).at[jnp.array([1, 3])].set(x[jnp.array([0, 2])]))
    np.testing.assert_array_equal(rows, reference.permute(x, tables))
    np.testing.assert_allclose(combined, reference.unpermute(y, tables), rtol=1e-6, atol=1e-6)
    assert not combined[2].any()


def check_products(sizes, outputs, inputs, *, offsets=None, rows=None, dtype=jnp.bfloat16, tiles=None):
    sizes = np.array(sizes, np.int32)
    offsets = np.cumsum(sizes, dtype=np.int32) - sizes if offsets is None else np.array(offsets, np.int32)
    rows = sizes.sum() if rows is None else rows
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(rows, inputs)), dtype)
    weights = jnp.asarray(rng.normal(size=(len(sizes), outputs, inputs)) / inputs**0.5, dtype)
    with without_races(), Trial("grouped_matmul", tiles).active():
        y = kernels.grouped_matmul(x, Weights(weights), jnp.asarray(offsets), jnp.asarray(sizes))
    assert (y.dtype, y.shape) == (dtype, (rows, outputs))
    x, weights, y = (np.asarray(a, np.float64) for a in (x, weights, y))
    for expert, (first, size) in enumerate(zip(offsets, sizes, strict=True)):
        rows_of = slice(first, first + size)
        np.testing.assert_allclose(y[rows_of], x[rows_of] @ weights[expert].T, rtol=2**-8, atol=2**-8)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("sizes", "outputs", "inputs", "dtype"),
    [
        ([1], 64, 64, jnp.bfloat16),
        ([0, 2, 0, 1, 0], 64, 192, jnp.float16),  # experts without rows
        ([3, 0, 7, 2], 128, 128, jnp.bfloat16),  # a TMA tile of 8 rows holds rows of two experts
        ([0, 0, 40], 64, 64, jnp.bfloat16),  # all rows belong to one expert
    ],
)
def test_products_interpreted(sizes, outputs, inputs, dtype):
    check_products(sizes, outputs, inputs, dtype=dtype)


@pytest.mark.interpreted
@pytest.mark.parametrize("rows", [8, 64])
def test_products_of_several_tiles_interpreted(rows):
    """More rows than a tile has, and stages that are refilled."""
    check_products([21, 0, 5, 38], 128, 320, tiles={"rows": rows, "outputs": 64, "stages": 2})


@pytest.mark.interpreted
def test_products_with_gaps_interpreted():
    """As with a capacity: rows between those of the experts belong to no expert."""
    check_products([2, 0, 8, 5], 64, 64, offsets=[0, 8, 16, 24], rows=32)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("rows", [32, 128])
def test_more_products_interpreted(rows, stages):
    check_products([130, 1, 0, 67, 9], 256, 256, tiles={"rows": rows, "outputs": 128, "stages": stages})


def gate(experts, **rule):
    return kernels.top_k_gating(jnp.zeros((2, experts)), rule=Rule(**rule))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gate(260, k=1), "up to 256 experts.*260"),
        (lambda: gate(6, k=1), "a multiple of 4, got 6"),
        (lambda: gate(32, k=17), "16 experts per.*got 17"),
        (lambda: gate(8, k=2, scoring="sigmoid"), "softmax scores without"),
        (lambda: gate(8, k=2, groups=4, groups_per_token=2), "without a selection bias and groups"),
        (lambda: kernels.permute(jnp.zeros((2, 100)), abstract_routing(2, 4, 1)), "multiple of 128, got 100"),
        (lambda: kernels.unpermute(jnp.zeros((34, 128)), abstract_routing(2, 32, 17)), "16 experts per.*got 17"),
        (lambda: products(jnp.float32, 64, 64), "bfloat16 or float16, got float32"),
        (lambda: products(jnp.bfloat16, 64, 72), "got K=72, N=64"),
        (lambda: products(jnp.bfloat16, 96, 64), "got K=64, N=96"),
    ],
)
def test_unsupported_names_the_constraint(call, message):
    with pytest.raises(UnsupportedError, match=message):
        call()


def products(dtype, outputs, inputs):
    counts = jnp.ones(2, jnp.int32)
    weights = Weights(jnp.zeros((2, outputs, inputs), dtype))
    return kernels.grouped_matmul(jnp.zeros((2, inputs), dtype), weights, counts, counts)


def abstract_routing(tokens, experts, k):
    """The shapes of a routing without a capacity."""
    return jax.eval_shape(functools.partial(top_k_gating, k=k), jax.ShapeDtypeStruct((tokens, experts), jnp.float32))


def calls(model, tokens):
    """Each operation of a layer and the shapes it is called with."""
    experts, k, inputs, hidden = MODELS[model]
    routing = abstract_routing(tokens, experts, k)
    half = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    rows = half((tokens * k, inputs))
    into, out = Weights(half((experts, 2 * hidden, inputs))), Weights(half((experts, inputs, hidden)))
    return {
        "moe_gate": (functools.partial(top_k_gating, k=k), (jax.ShapeDtypeStruct((tokens, experts), jnp.float32),)),
        "moe_permute": (permute, (half((tokens, inputs)), routing)),
        "moe_unpermute": (unpermute, (rows, routing)),
        "in": (grouped_matmul, (rows, into, routing.offsets, routing.sizes)),
        "out": (grouped_matmul, (half((tokens * k, hidden)), out, routing.offsets, routing.sizes)),
    }


@pytest.mark.slow
@pytest.mark.parametrize(("model", "tokens"), [("mixtral-8x7b", 4096), ("deepseek-v3", 1), ("deepseek-v3", 4096)])
def test_lowers_for_cuda(model, tokens):
    """With the heuristic's tiles: checks layouts, shared memory and sizes of TMA copies. More in `test_lowering.py`."""
    with targeting(H200):
        for name, (function, shapes) in calls(model, tokens).items():
            lowered = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",))
            kernels = 2 if name == "moe_gate" and tokens > 64 else 1
            assert str(lowered.compiler_ir()).count("@mosaic_gpu_v2") == kernels, name


def test_tiles_usually_hold_all_rows_of_an_expert():
    with targeting(H200):
        assert choose_tiles(8, 128, 1536) == Tiles(rows=8, outputs=64, stages=5)
        assert choose_tiles(512, 128, 1536).rows == 16
        assert choose_tiles(32768, 128, 1536) == Tiles(rows=128, outputs=128, stages=3)
        assert choose_tiles(32768, 8, 2880).outputs == 64  # 128 would not divide them


@pytest.mark.aot
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("model", MODELS)
def test_ahead_of_time(model, tokens):
    """No spills, at least two thread blocks per SM where there are many, and no other launches."""
    few = tokens <= 64
    features = {
        "moe_gate": {"UTMALDG"},
        "moe_permute": {"LDG.128"},
        "moe_unpermute": {"LDG.128"},
        "in": {"UTMALDG", "HGMMA", "UTMASTG"},
        "out": {"UTMALDG", "HGMMA", "UTMASTG"},
    }
    for name, (function, shapes) in calls(model, tokens).items():
        report = compile_for(Target.load("h200"), function, shapes, resources=True)
        ours = [kernel for kernel in report.kernels if kernel.kind == "mosaic"]
        assert len(ours) == (2 if name == "moe_gate" and not few else 1), name
        rows, columns = next(iter(jax.tree.leaves(shapes))).shape
        padded = rows % 8 if name in ("in", "out") else name == "moe_gate" and columns % 32 and columns > 32
        assert len(report.kernels) - len(ours) == (1 if padded else 0), [kernel.name for kernel in report.kernels]
        for kernel in ours:
            assert kernel.resources.spill_bytes == 0, kernel
        assert features[name] <= set(ours[0].resources.features), (name, ours[0].resources.features)
        if name in ("in", "out"):
            assert ours[0].resources.registers <= (64 if few else 168)
            assert ours[0].shared_bytes <= (227 << 10) // (3 if few else 2) - 1024
