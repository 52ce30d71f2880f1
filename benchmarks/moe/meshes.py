"""Mixtures of experts on meshes: what each exchange sends, tokens of every family, and two lanes against one.

Bytes are read from compiled layers of virtual CPU devices, and compared with the formulas of DeepSpeed Inference,
section V-B, to the byte. Devices and threads are fixed when JAX starts, so each part has processes of its own.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from benchmarks.report import ROOT, Report
from benchmarks.workers import ONE_THREAD, QUICK, run_module
from jaxinfer import LLM, MeshConfig, SamplingParams
from jaxinfer.compiled.dumps import read_collectives
from jaxinfer.models import Decoder, DecoderConfig, WeightFormat
from jaxinfer.models import config as c
from jaxinfer.models.families import family_of
from jaxinfer.models.files.conversion import convert
from jaxinfer.models.files.loading import save_model
from jaxinfer.models.layers.moe import Moe
from jaxinfer.sharding import ShardingRules
from jaxinfer.sharding.collectives import use_rules

DEVICES = 64
"""Virtual devices, the most that layers are compiled for."""
EMBED, EXPERTS, CHOSEN = 64, 16, 2
NORM = c.NormConfig(kind=c.NormKind.RMS)
FLOAT_BYTES = 4
MESHES = tuple((p, column) for p in (2, 4, 8, 16) for column in (1, 2, 4, 8) if column <= p)
"""How many devices have experts, and how many of them have the same tokens: the paper's p and L."""
EXCHANGES = ("all_to_all", "pcc", "pcc_all_gather", "all_gather")
BATCHES = (1, 8, 64)
CAPACITY_FACTOR = 1.25
COLUMNS, MOST_DEVICES = (1, 2, 4, 8), (8, 16, 32, 64)
"""The lines of the figure and its points: L, and p."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """A layer of experts on a mesh, and what the paper says that it exchanges.

    Attributes:
      p: devices over which experts are split. column: L, those of them that have the same tokens.
      slices: parts of the hidden width of each expert.
      tokens: T, of a lane. experts: E. capacity_factor: as in `RouterConfig`.
    """

    p: int
    column: int
    slices: int = 1
    tokens: int
    experts: int = EXPERTS
    capacity_factor: float | None = None

    @property
    def lanes(self) -> int:
        """Q, devices that have the same experts' tokens to exchange: the paper's p / L."""
        return self.p // self.column

    @property
    def mesh(self) -> MeshConfig:
        return MeshConfig(data=self.lanes, expert=self.column, tensor=self.slices)

    @property
    def mlp(self) -> c.MlpConfig:
        router = c.RouterConfig(experts=self.experts, experts_per_token=CHOSEN, capacity_factor=self.capacity_factor)
        return c.MlpConfig(hidden=16, activation=c.Activation.SILU, gated=True, moe=c.MoeConfig(router=router))

    @property
    def table_bytes(self) -> int:
        """S, the bytes of a row for every token that every expert takes."""
        assert self.mlp.moe is not None
        capacity = self.mlp.moe.router.capacity(self.tokens) or self.tokens
        return self.experts * capacity * EMBED * FLOAT_BYTES

    def expected_bytes(self, exchange: str) -> float:
        """The bytes on the wire, of a device, by the formulas of the paper and of `docs/moe.md`."""
        y, table = self.tokens * EMBED * FLOAT_BYTES, self.table_bytes
        between = 2 * (self.lanes - 1) / self.lanes * table / self.column
        summed = {n: 2 * (n - 1) / n * y for n in (self.slices, self.slices * self.column)}
        match exchange:
            case "all_to_all":
                return 2 * (self.p - 1) / self.p * table + summed[self.slices]
            case "pcc":
                return between + summed[self.slices * self.column]
            case "pcc_all_gather":
                return between + (self.column - 1) / self.column * table + summed[self.slices]
            case _:
                choices = self.tokens * CHOSEN * 2 * FLOAT_BYTES  # a weight and the number of an expert
                return (self.lanes - 1) * (2 * y + choices) + summed[self.slices * self.column]

    def expected_participants(self, exchange: str) -> dict[str, set[int]]:
        """Return how many devices take part, by kind of exchange."""
        every = {
            "all_to_all": {"all-to-all": self.p, "all-reduce": self.slices},
            "pcc": {"all-to-all": self.lanes, "all-reduce": self.slices * self.column},
            "pcc_all_gather": {"all-to-all": self.lanes, "all-gather": self.column, "all-reduce": self.slices},
            "all_gather": {
                "all-gather": self.lanes,
                "reduce-scatter": self.lanes,
                "all-reduce": self.slices * self.column,
            },
        }[exchange]
        return {kind: {count} for kind, count in every.items() if count > 1}


def exchanged(layout: Layout, exchange: str) -> dict[str, Any]:
    """Compile a layer and return what it exchanges: bytes of activations and of counts, and the participants."""
    rules, mesh = ShardingRules(exchange=exchange), layout.mesh.build()
    collectives = read_collectives(_compiled(layout, rules, mesh), mesh.size)
    floats = [one for one in collectives if one.dtype == "f32"]
    participants: dict[str, set[int]] = {}
    for one in floats:
        participants.setdefault(one.kind, set()).add(one.participants)
    counts = sum(one.wire_bytes for one in collectives if one.dtype != "f32")
    wire, expected = sum(one.wire_bytes for one in floats), layout.expected_bytes(exchange)
    return {
        "p": layout.p,
        "L": layout.column,
        "tensor": layout.slices,
        "tokens": layout.tokens,
        "experts": layout.experts,
        "capacity_factor": layout.capacity_factor,
        "exchange": exchange,
        "table_bytes": layout.table_bytes,
        "wire_bytes": round(wire, 3),
        "count_bytes": round(counts, 3),
        "participants": {kind: sorted(numbers) for kind, numbers in sorted(participants.items())},
        "exact": participants == layout.expected_participants(exchange) and abs(wire - expected) < 1e-6,
    }


def _compiled(layout: Layout, rules: ShardingRules, mesh: Mesh) -> str:
    """The optimised module of a layer, of which only shapes are known."""
    weights = WeightFormat(dtype=np.dtype(jnp.float32))
    graph, state = nnx.split(nnx.eval_shape(lambda: Moe(EMBED, layout.mlp, NORM, weights, rngs=nnx.Rngs(0))))
    variables = jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    specs = [rules.spec(*variable.get_metadata("axes"), mesh=mesh) for variable in variables]
    leaves, tree = jax.tree.flatten(state)
    lanes = rules.spec("batch", mesh=mesh)

    def run(leaves: list[jax.Array], x: jax.Array) -> jax.Array:
        with use_rules(rules):
            return nnx.merge(graph, jax.tree.unflatten(tree, leaves))(x)[0]

    mapped = jax.shard_map(run, mesh=mesh, in_specs=(specs, lanes), out_specs=lanes, check_vma=False)
    x = jax.ShapeDtypeStruct((layout.tokens * layout.lanes, EMBED), jnp.float32)
    hlo = jax.jit(mapped).lower(leaves, x).compile().as_text()
    assert hlo is not None
    return hlo


def exchanges() -> Iterator[dict[str, Any]]:
    """Read what every exchange sends, on every mesh and at every batch; then more devices, with an expert each."""
    for p, column in MESHES:
        for tokens in BATCHES:
            for exchange in EXCHANGES:
                yield {"figure": "exchange", **exchanged(Layout(p=p, column=column, tokens=tokens), exchange)}
    for exchange in EXCHANGES:
        for column in (1, 2, 4):
            sliced = Layout(p=8, column=column, slices=2, tokens=8)
            yield {"figure": "exchange", **exchanged(sliced, exchange)}
            limited = Layout(p=16, column=column, tokens=64, capacity_factor=CAPACITY_FACTOR)
            yield {"figure": "exchange", **exchanged(limited, exchange)}
    for p in MOST_DEVICES:
        for column in COLUMNS:
            layout = Layout(p=p, column=column, tokens=8, experts=p)
            yield {"figure": "devices", **exchanged(layout, "pcc")}


SIZES: dict[str, Any] = {"max_batch": 2, "token_budget": 8, "chunk_size": 8, "max_decode_passes": 4, "context": 24}
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [2, 7], [1, 8, 2])
GOLDENS = ROOT / "tests" / "goldens"
DENSE = ("llama_llama3", "gpt2_tied")
FAMILY_MESHES = ({"expert": 2}, {"expert": 2, "tensor": 2}, {"data": 2, "expert": 2}, {"data": 2, "tensor": 2})


def families() -> Iterator[dict[str, Any]]:
    """Compare greedy tokens of every golden with experts, and of two dense ones, on one device and on meshes."""
    with tempfile.TemporaryDirectory() as temporary:
        for folder, config in compared().items():
            path = Path(temporary) / folder.name
            convert(folder, path)
            alone = greedy_tokens(path)
            for axes in FAMILY_MESHES:
                mesh = MeshConfig(**axes)
                split = split_of_experts(config, mesh)
                equal = greedy_tokens(path, mesh=mesh, rules=ShardingRules(experts=split)) == alone
                yield {
                    "figure": "family",
                    "family": folder.name,
                    "experts": bool(config.moe_layers),
                    "mesh": axes,
                    "split_over": split,
                    "equal": equal,
                }


def compared() -> dict[Path, DecoderConfig]:
    """The goldens with experts, and the two dense ones, with their configs."""
    configs = {}
    for folder in sorted(path.parent for path in GOLDENS.glob("*/config.json")):
        hf = json.loads((folder / "config.json").read_text())
        config = family_of(hf).config(hf)
        if isinstance(config, DecoderConfig) and (config.moe_layers or folder.name in DENSE):
            configs[folder] = config
    return configs


def split_of_experts(config: DecoderConfig, mesh: MeshConfig) -> tuple[str, ...] | None:
    """Return the axes over which a model's experts are split: both, or those over which they divide."""
    counts = {mlp.moe.router.experts for layer in range(config.layers) if (mlp := config.layer(layer).mlp).moe}
    sizes = {("data", "expert"): mesh.data * mesh.expert, ("expert",): mesh.expert, ("data",): mesh.data}
    return next((axes for axes, ways in sizes.items() if all(count % ways == 0 for count in counts)), None)


def greedy_tokens(path: Path, **options: Any) -> list[list[int]]:
    """Generate from prompts of several lengths together."""
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in (12, 5, 9)]
    with LLM(path, **SIZES, **options) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(list(PROMPTS), params)]


REQUESTS = 16
WORKLOADS = {"prompts": (448, 16), "answers": (32, 64)}
"""Tokens of each prompt, and those that follow. Computing takes most of the time of prompts; of answers, with 8 or 16
rows a pass, reading weights does, which two lanes do twice."""


@dataclasses.dataclass(frozen=True)
class Way:
    """How requests run: the environment of a process, and how many of them it has."""

    environment: Mapping[str, str]
    requests: int = REQUESTS


WAYS = {
    "one lane, one thread": Way(ONE_THREAD),
    "one lane, one thread, 8 requests": Way(ONE_THREAD, REQUESTS // 2),
    "one lane, all threads": Way({}),
    "two lanes, one thread each": Way(ONE_THREAD | {"NPROC": "2", "JAX_NUM_CPU_DEVICES": "2"}),
}
"""By name. NPROC are the threads of all devices together."""


def dense_config() -> DecoderConfig:
    """A Llama of 56 M parameters, of which computing takes longer than sending its programs."""
    return DecoderConfig(
        vocab=8192,
        embed=768,
        layers=8,
        context=512,
        pattern=(
            c.LayerConfig(
                mixer=c.AttentionConfig(
                    q_heads=12,
                    kv_heads=4,
                    head_dim=64,
                    positions=c.PositionsConfig(kind=c.PositionKind.ROTARY, rotary_dim=64),
                ),
                mlp=c.MlpConfig(hidden=2048, activation=c.Activation.SILU, gated=True),
            ),
        ),
        norm=c.NormConfig(kind=c.NormKind.RMS),
    )


def lane_rates(path: Path, requests: int) -> dict[str, float]:
    """The tokens per second, of prompts and answers, by workload; slots are divided among a lane a device."""
    lanes = jax.device_count()
    if os.environ.get("NPROC") == "1":
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    mesh = MeshConfig(data=lanes) if lanes > 1 else None
    rng, rates = np.random.default_rng(0), {}
    with LLM(path, mesh=mesh, max_batch=requests // lanes, prefix_caching=False) as llm:
        for name, (prompt, new) in WORKLOADS.items():
            params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
            llm.generate(rng.integers(3, 8000, (requests, prompt)).tolist(), params)  # compiles
            prompts = rng.integers(3, 8000, (requests, prompt)).tolist()
            start = time.perf_counter()
            outputs = llm.generate(prompts, params)
            rates[name] = round(requests * (prompt + new) / (time.perf_counter() - start), 2)
            assert all(len(output.outputs[0].token_ids) == new for output in outputs)
    return rates


PARTS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {"exchanges": exchanges, "families": families}
"""Parts that run on virtual devices, in a process each."""


def measure_exchanges(report: Report) -> None:
    """Check the bytes of all exchanges against the formulas, and those of PCC against the plain way's."""
    rows = _rows_of("exchanges")
    report.rows += rows
    for row in ratios(rows):
        report.row(**row)
    ratio = max(row["ratio"] for row in ratios(rows) if row["L"] == 2 and row["capacity_factor"] is None)
    report.check("pcc_wire_ratio", ratio, "x the plain way", target=0.55, better="lower")
    report.check("participants_exact", statistics.mean(row["exact"] for row in rows), "of the layers", target=1)


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The bytes of PCC over those of the plain way, of layers that are alike but for their exchange."""
    shape = ("p", "L", "tensor", "tokens", "experts", "capacity_factor")
    wire = {
        (row["exchange"], *(row[name] for name in shape)): row["wire_bytes"]
        for row in rows
        if row["figure"] == "exchange"
    }
    return [
        {
            "figure": "ratio",
            **dict(zip(shape, layer, strict=True)),
            "ratio": round(size / wire["all_to_all", *layer], 4),
        }
        for (exchange, *layer), size in wire.items()
        if exchange == "pcc"
    ]


def measure_families(report: Report) -> None:
    """Check that every family has one device's tokens on every mesh."""
    rows = _rows_of("families")
    report.rows += rows
    report.check("families_equal", statistics.mean(row["equal"] for row in rows), "of the runs", target=1)


def measure_lanes(report: Report, rounds: int) -> None:
    """Compare two lanes with one, in turns."""
    rates: dict[tuple[str, str], list[float]] = {(name, way): [] for name in WORKLOADS for way in WAYS}
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "model"
        save_model(path, Decoder(dense_config(), WeightFormat(), rngs=nnx.Rngs(0)), family="llama")
        for _ in range(rounds):
            for way, how in WAYS.items():
                arguments = ("lanes", str(path), str(how.requests))
                measured = run_module(__name__, *arguments, JAX_PLATFORMS="cpu", **how.environment)
                for name, rate in measured.items():
                    rates[name, way].append(rate)
    medians = {key: statistics.median(values) for key, values in rates.items()}
    for (name, way), values in rates.items():
        report.row(figure="lanes", workload=name, way=way, tokens_per_s=medians[name, way], all=values)
        print(report.rows[-1], flush=True)
    for name, check in (("answers", "lane_gain"), ("prompts", "lane_gain_prompts")):
        gain = medians[name, "two lanes, one thread each"] / medians[name, "one lane, one thread"]
        report.check(check, gain, "x", target=1.6)


def _rows_of(part: str) -> list[dict[str, Any]]:
    """Run a part on virtual devices, in a process of its own, and return its rows."""
    environment = {"JAX_PLATFORMS": "cpu", "NPROC": "32", "JAX_NUM_CPU_DEVICES": str(DEVICES)}
    if part == "families":
        environment |= {"XLA_FLAGS": QUICK, "JAX_NUM_CPU_DEVICES": "4"}
    return run_module(__name__, part, **environment)["rows"]


def run(report: Report, args: argparse.Namespace) -> None:
    """Measure all; lanes last, in as many rounds as are asked for."""
    measure_exchanges(report)
    report.save(args.json)
    measure_families(report)
    report.save(args.json)
    measure_lanes(report, args.rounds)


def main() -> None:
    """Run one part in this process, and print what it has measured."""
    part, *arguments = sys.argv[1:]
    result = {"rows": list(PARTS[part]())} if part in PARTS else lane_rates(Path(arguments[0]), int(arguments[1]))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
