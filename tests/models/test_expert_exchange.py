"""Experts on other devices: every exchange gives what one device gives, and sends the bytes that the paper says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer.compiled.dumps import read_collectives
from jaxinfer.models.abstract import variables
from jaxinfer.models.config import Activation, MlpConfig, MoeConfig, NormConfig, NormKind, RouterConfig, SharedMix
from jaxinfer.models.layers.moe import Moe
from jaxinfer.models.weight_format import WeightFormat
from jaxinfer.sharding import MeshConfig, ShardingRules
from jaxinfer.sharding.collectives import use_rules
from jaxinfer.sharding.planner.exchanges import ExchangeSizes

EMBED, EXPERTS, CHOICES = 16, 8, 3
NORM = NormConfig(kind=NormKind.RMS)
EXCHANGES = ("all_to_all", "pcc", "pcc_all_gather", "all_gather")
ALL_AXES = {"data": 2, "expert": 2, "tensor": 2}
SOME_AXES = ({"expert": 4}, {"expert": 2, "tensor": 2}, {"data": 4}, {"data": 2, "expert": 2})


def slow(*cases):
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


def config(*, shared=None, bias=True, **router):
    chosen = RouterConfig(experts=EXPERTS, experts_per_token=CHOICES, **router)
    mixed = {} if shared is None else {"shared_hidden": 8, "shared_mix": shared}
    moe = MoeConfig(router=chosen, **mixed)
    return MlpConfig(hidden=8, activation=Activation.SILU, gated=True, bias=bias, moe=moe)


@functools.cache
def module_of(cfg, dtype="float32"):
    """The layer with random weights; biases too are random."""
    moe = nnx.eval_shape(lambda: Moe(EMBED, cfg, NORM, WeightFormat(dtype=jnp.dtype(dtype)), rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    for variable in variables(moe).values():
        noise = rng.normal(size=variable.shape).astype(np.float32)
        variable.set_value(jnp.asarray(noise.astype(variable.dtype)))
    return moe


def compile_on(mesh, cfg, tokens, exchange="cheapest", dtype="float32"):
    """Return the layer, compiled for `tokens` tokens of each lane, and its weights."""
    return _compile_on(tuple(mesh.items()), cfg, tokens, exchange, dtype)


@functools.cache
def _compile_on(mesh, cfg, tokens, exchange, dtype):
    rules, mesh = ShardingRules(exchange=exchange), dict(mesh)
    devices = MeshConfig(**mesh).build()
    graph, state = nnx.split(module_of(cfg, dtype))
    leaves, tree = jax.tree.flatten(state)
    specs = [rules.spec(*variable.get_metadata("axes"), mesh=devices) for variable in variables(state).values()]
    lanes = rules.spec("batch", mesh=devices)

    def run(leaves, x, valid):
        with use_rules(rules):
            return nnx.merge(graph, jax.tree.unflatten(tree, leaves))(x, valid)[0]

    mapped = jax.shard_map(run, mesh=devices, in_specs=(specs, lanes, lanes), out_specs=lanes, check_vma=False)
    count = tokens * mesh.get("data", 1)
    shapes = jax.ShapeDtypeStruct((count, EMBED), jnp.dtype(dtype)), jax.ShapeDtypeStruct((count,), jnp.bool_)
    return jax.jit(mapped).lower(leaves, *shapes).compile(), leaves


@functools.cache
def alone(cfg, dtype="float32"):
    """The layer on one device: a function of tokens and which of them are valid."""
    module = module_of(cfg, dtype)
    return jax.jit(lambda x, valid: module(x, valid)[0])


def compute_alone(cfg, x, valid, dtype="float32"):
    return np.asarray(alone(cfg, dtype)(x, valid), np.float32)


def check(mesh, cfg, x, valid, exchange):
    expected = compute_alone(cfg, x, valid)
    program, leaves = compile_on(mesh, cfg, len(x) // mesh.get("data", 1), exchange)
    result = np.asarray(program(leaves, x, valid))
    np.testing.assert_allclose(result[valid], expected[valid], rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    assert np.isfinite(result).all()


def tokens_of(count):
    return np.random.default_rng(0).normal(size=(count, EMBED)).astype(np.float32)


@pytest.mark.parametrize("exchange", ["pcc", *slow("all_gather", "all_to_all", "pcc_all_gather")])
@pytest.mark.parametrize("mesh", [ALL_AXES, *slow(*SOME_AXES)], ids=str)
def test_gives_what_one_device_gives(mesh, exchange):
    check(mesh, config(shared=SharedMix.ADD), tokens_of(8), np.arange(8) % 3 > 0, exchange)


@pytest.mark.parametrize("exchange", ["pcc", *slow("all_gather", "all_to_all", "pcc_all_gather")])
@pytest.mark.parametrize("shared", [SharedMix.GATED, *slow(SharedMix.RESIDUAL)])
def test_every_way_of_adding_the_shared_mlp(shared, exchange):
    check(ALL_AXES, config(shared=shared), tokens_of(4), np.full(4, True), exchange)


@pytest.mark.parametrize("exchange", ["cheapest", "all_gather", *slow("pcc", "all_to_all", "pcc_all_gather")])
def test_choices_beyond_the_capacity_of_a_lane_are_dropped(exchange):
    """The cheapest way is pcc."""
    cfg, x = config(bias=False, capacity_factor=1.0), np.repeat(tokens_of(2), 16, axis=0)
    program, leaves = compile_on({"data": 2, "expert": 2}, cfg, 16, exchange)
    by_lane = [compute_alone(cfg, half, np.full(16, True)) for half in np.split(x, 2)]
    result = np.asarray(program(leaves, x, np.full(32, True)))
    np.testing.assert_allclose(result, np.concatenate(by_lane), rtol=1e-5, atol=1e-5 * np.abs(by_lane).max())
    assert np.abs(result[0] - result[15]).max() > 0.1  # the same token, which had no place


@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_in_bfloat16_as_precise_as_one_device(exchange):
    cfg, x, valid = config(shared=SharedMix.ADD), tokens_of(32).astype(jnp.bfloat16), np.full(32, True)
    with jax.default_matmul_precision("highest"):
        exact = compute_alone(cfg, x.astype(np.float32), valid)
    program, leaves = compile_on(ALL_AXES, cfg, 16, exchange, "bfloat16")
    errors = [
        np.abs(np.asarray(y, np.float32) - exact).mean()
        for y in (compute_alone(cfg, x, valid, "bfloat16"), program(leaves, x, valid))
    ]
    assert 0 < errors[1] < 1.5 * errors[0]


def check_values(mesh, cfg, tokens, exchange):
    """The program gives what one device gives.

    Of any tokens; of equal ones, so that most experts are empty, whose devices have nothing to compute, and others
    full; and where lanes have no tokens.
    """
    count = mesh["data"] * tokens
    check(mesh, cfg, tokens_of(count), np.arange(count) % 3 > 0, exchange)
    check(mesh, cfg, np.repeat(tokens_of(1), count, axis=0), np.full(count, True), exchange)
    check(mesh, cfg, tokens_of(count), np.arange(count) < 1, exchange)
    check(mesh, cfg, tokens_of(count), np.full(count, False), exchange)


def exchanged(mesh, cfg, tokens, exchange):
    """Return what the compiled layer exchanges: numbers of tokens, and counts of rows."""
    program, _ = compile_on(mesh, cfg, tokens, exchange)
    collectives = read_collectives(program.as_text(), MeshConfig(**mesh).size)
    floats = [c for c in collectives if c.dtype == "f32"]
    counts = [c for c in collectives if c.dtype == "s32"]
    assert len(floats) + len(counts) == len(collectives)
    return floats, counts


@pytest.mark.parametrize("tokens", [6, *slow(1)])
@pytest.mark.parametrize("shape", [(4, 2), *slow((8, 1), (2, 4), (1, 8), (2, 2))])
def test_bytes_are_those_of_the_paper_and_values_those_of_one_device(shape, tokens):
    """With p devices, of which L share a lane's tokens, the paper's all-to-all has p / L participants."""
    (lanes, column), table, y = shape, EXPERTS * tokens * EMBED * 4, tokens * EMBED * 4
    p = lanes * column
    plain, between = 2 * (p - 1) / p * table, 2 * (lanes - 1) / lanes * table / column
    by_exchange = {
        "all_to_all": (plain, {p}),
        "pcc": (between + 2 * (column - 1) / column * y, {lanes, column}),
        "pcc_all_gather": (between + (column - 1) / column * table, {lanes, column}),
        "all_gather": (
            (lanes - 1) * (2 * y + tokens * CHOICES * 8) + 2 * (column - 1) / column * y,
            {lanes, column},
        ),
    }
    predicted = ExchangeSizes(
        lanes=lanes,
        column=column,
        slices=1,
        tokens=tokens,
        choices=CHOICES,
        experts=EXPERTS,
        capacity=tokens,
        token_bytes=4 * EMBED,
    )
    for exchange, (size, participants) in by_exchange.items():
        mesh, cfg = {"data": lanes, "expert": column}, config(bias=False)
        check_values(mesh, cfg, tokens, exchange)
        floats, counts = exchanged(mesh, cfg, tokens, exchange)
        assert sum(c.wire_bytes for c in floats) == pytest.approx(size, rel=1e-12)
        assert {c.participants for c in floats} == participants - {1}
        peers = p if exchange == "all_to_all" else lanes
        assert {c.participants for c in floats if c.kind == "all-to-all"} <= {peers}
        rows = 0 if exchange == "all_gather" else EXPERTS * peers // p * 4 * (peers - 1) / peers
        assert sum(c.wire_bytes for c in counts) == rows
        assert predicted.wire_bytes(exchange) == pytest.approx(size + rows, rel=1e-12)


def test_the_cheapest_is_chosen_by_bytes():
    mesh = {"data": 2, "expert": 2}
    sizes = {"choices": CHOICES, "experts": EXPERTS, "token_bytes": 64, "lanes": 2, "column": 2, "slices": 1}
    assert (
        ExchangeSizes(tokens=16, capacity=16, **sizes).cheapest == "all_gather"
    )  # a table for all, since none is dropped
    assert ExchangeSizes(tokens=16, capacity=6, **sizes).cheapest == "pcc"
    for capacity_factor, kinds in (
        (None, {"all-gather", "reduce-scatter", "all-reduce"}),
        (1.0, {"all-to-all", "all-reduce"}),
    ):
        cfg = config(bias=False, capacity_factor=capacity_factor)
        floats, _ = exchanged(mesh, cfg, 16, "cheapest")
        assert {c.kind for c in floats} == kinds


def test_pcc_against_the_plain_way():
    """PCC sends at most 0.55 of the bytes where two devices share a lane's tokens, and 1 / L where L do."""
    for column in (2, 4, 8):
        sizes = ExchangeSizes(
            lanes=32, column=column, slices=1, tokens=256, choices=1, experts=128, capacity=256, token_bytes=2 * 4096
        )
        ratio = sizes.wire_bytes("pcc") / sizes.wire_bytes("all_to_all")
        assert ratio == pytest.approx(1 / column, rel=0.1)


def test_slices_of_experts_are_added_up_once():
    """A sum over the column and the slices together, in which the shared MLP takes part."""
    cfg = config(shared=SharedMix.GATED, bias=False)
    check(mesh := {"expert": 2, "tensor": 2}, cfg, tokens_of(4), np.full(4, True), "cheapest")
    floats, _ = exchanged(mesh, cfg, 4, "cheapest")
    assert [(c.kind, c.participants, c.shape) for c in floats] == [("all-reduce", 4, (4, EMBED))]
