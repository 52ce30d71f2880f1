"""Whole models of random weights: milliseconds per decode step against the floor, our XLA path and transformers.

Our side runs the engine's own programs: `prefill` for the prompt, `decode` for the tokens after it. The floor of a
decode step is the time to read all weights except the embedding table, and the rows' keys and values, at the measured
bandwidth. What is compared runs interleaved, on the same weights or on weights of the same size.
"""

import dataclasses
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.clock import Clock
from benchmarks.gpu.generation import Generation, Lengths, Model, Way, tiny
from benchmarks.gpu.peer import AbsentError, Peer, Prepared
from benchmarks.gpu.timing import Effort, Timing, interleave
from benchmarks.report import Report
from jaxinfer.models import DecoderConfig, WeightFormat
from jaxinfer.models.config import PositionKind
from jaxinfer.models.presets import preset

MODELS = ("llama3-8b", "gpt-j-6b", "gpt2-1.5b")
FORMATS = {
    "bfloat16": WeightFormat(dtype=np.dtype(jnp.bfloat16)),
    "int8": WeightFormat(dtype=np.dtype(jnp.bfloat16), quantized="int8"),
    "int4": WeightFormat(dtype=np.dtype(jnp.bfloat16), quantized="int4"),
}
BATCHES = (1, 8, 16, 64)
# Targets for a decode step of one row, as a fraction of the read bandwidth, for models of 6 to 8 billion weights.
LARGE_MODELS = ("llama3-8b", "gpt-j-6b")
TARGETS = {"bfloat16": 0.85, "int8": 0.75, "int4": 0.65}

OURS, XLA, PEER = "jaxinfer", "XLA", "transformers"
COMPARED = {OURS: Way(), XLA: Way(off=())}
LINEAR_OPS = ("small_batch_linear", "norm_linear", "linear_residual")
# The paper's Fig. 10a in our terms: fused attention, then fused linear layers, then one launch for everything.
BREAKDOWN = {
    "XLA": Way(off=(), graph=False),
    "+ fused attention": Way(off=LINEAR_OPS, graph=False),
    "+ small-batch GEMM": Way(graph=False),
    "+ CUDA graph": Way(),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """One measurement: a model in a weight format at a batch size, in several ways."""

    model: str
    fmt: str
    batch: int
    ways: Mapping[str, Way] = dataclasses.field(default_factory=lambda: COMPARED)

    @property
    def compared(self) -> bool:
        """Whether it is compared with the peer too."""
        return self.fmt == "bfloat16" and self.ways is COMPARED

    @property
    def whole(self) -> bool:
        """Whether a whole request (a prompt and its output) is measured too, as in the paper's Fig. 6."""
        return self.compared and self.batch == 1

    @property
    def title(self) -> str:
        """The model, its format and the batch."""
        return f"{self.model}, {self.fmt}, batch {self.batch}" + ("" if self.ways is COMPARED else ", breakdown")


def items(*, quick: bool, dry: bool) -> list[Item]:
    """List all items, the most informative first; dry: one of each kind, in fewer ways."""
    models = MODELS[:1] if quick else MODELS
    first = [Item(model=model, fmt=fmt, batch=1) for fmt in FORMATS for model in models]
    breakdown = [Item(model=MODELS[-1], fmt="bfloat16", batch=1, ways=BREAKDOWN)]
    if dry:
        return [first[0], dataclasses.replace(breakdown[0], ways=dict(list(BREAKDOWN.items())[:2]))]
    if quick:
        return first + breakdown
    others = [Item(model=m, fmt=fmt, batch=batch) for batch in BATCHES[1:] for fmt in FORMATS for m in models]
    return first + breakdown + others


def measure(report: Report, ceilings: Ceilings, clock: Clock, peer: Peer, effort: Effort, *, quick: bool) -> None:
    """Measure as many items as there is time for; report the others as absent."""
    bench = Bench(report, ceilings, peer, effort)
    planned = items(quick=quick, dry=effort.dry)
    done = 0
    for item in clock.affordable(planned):
        bench.measure(item)
        done += 1
    for item in planned[done:]:
        report.row(part="end to end", what=item.title, absent="no time left; see --minutes")


class Bench:
    """Measurement of items one after another, keeping the last one's weights."""

    def __init__(self, report: Report, ceilings: Ceilings, peer: Peer, effort: Effort):
        self.report, self.ceilings, self.peer, self.effort = report, ceilings, peer, effort
        self.lengths = Lengths(prompt=8, steps=1, output=2) if effort.dry else Lengths()
        self._loaded: tuple[tuple[str, str], Model] | None = None

    def measure(self, item: Item) -> None:
        """Measure one item, and report its times and whether all ways generate alike."""
        print(f"end to end: {item.title}", flush=True)
        model = self._model(item)
        with ThreadPoolExecutor() as pool:
            theirs = pool.submit(self._prepare_peer, item, model.config) if item.compared else None
            made = {
                name: Generation(model, item.batch, way, self.lengths, prompt=item.whole)
                for name, way in item.ways.items()
            }
            list(pool.map(Generation.compile, made.values()))
            other = theirs.result() if theirs else None
        for generation in made.values():
            generation.prepare()
        rounds = {name: generation.step_round for name, generation in made.items()}
        timings = self._interleave(rounds | ({PEER: other.round()} if other else {}))
        self._report_steps(item, model, timings)
        if item.whole:
            whole = {name: generation.whole_round for name, generation in made.items()}
            theirs = {PEER: other.round(generate=self.lengths.output)} if other else {}
            self._report_whole(item, self._interleave(whole | theirs))
        tokens = [generation.tokens() for generation in made.values()]
        same = float(np.mean([np.mean(tokens[0] == other_tokens) for other_tokens in tokens[1:]]))
        self.report.row(part="end to end", what=item.title, same_first_token=round(same, 3))

    def _interleave(self, rounds: dict[str, Any]) -> dict[str, Timing]:
        for run_round in rounds.values():  # warms up
            for _ in range(self.effort.warm_up):
                run_round()
        return interleave(rounds, self.effort.rounds)

    def _model(self, item: Item) -> Model:
        key = item.model, item.fmt
        if self._loaded is None or self._loaded[0] != key:
            if self._loaded is not None and self._loaded[0][0] != item.model:
                self.peer.forget()
            self._loaded = None  # frees the weights before the next ones are made
            config = preset(item.model)
            self._loaded = key, Model(tiny(config) if self.effort.dry else config, FORMATS[item.fmt])
        return self._loaded[1]

    def _prepare_peer(self, item: Item, config: DecoderConfig) -> Prepared | None:
        architecture, sizes = transformers_config(config)
        lengths = self.lengths
        try:
            return self.peer.prepare(
                "decode",
                architecture=architecture,
                config=sizes,
                batch=item.batch,
                prompt=lengths.prompt,
                steps=lengths.steps,
                context=lengths.prompt + lengths.steps,
            )
        except AbsentError as error:
            self.report.row(part="end to end", what=item.title, way=PEER, absent=str(error))
            return None

    def _report_steps(self, item: Item, model: Model, timings: dict[str, Timing]) -> None:
        context = self.lengths.prompt + self.lengths.steps // 2  # on average
        floor = (model.bytes + model.kv_bytes(item.batch * context)) / self.ceilings.read
        for name, timing in timings.items():
            self.report.row(
                part="end to end" if item.ways is COMPARED else "breakdown",
                model=item.model,
                format=item.fmt,
                batch=item.batch,
                way=name,
                ms_per_step=round(1e3 * timing.seconds, 4),
                floor_ms=round(1e3 * floor, 4),
                of_floor=round(floor / timing.seconds, 4),
                tokens_per_s=round(item.batch / timing.seconds, 1),
                spread=round(timing.spread, 4),
            )
        if item.ways is not COMPARED:
            return
        ours, name = timings[OURS].seconds, f"{item.model}_{item.fmt}_b{item.batch}"
        if item.batch == 1 and item.model in LARGE_MODELS:
            self.report.check(f"{name}_of_read_bandwidth", floor / ours, "", target=TARGETS[item.fmt])
        self.report.check(f"{name}_vs_xla", timings[XLA].seconds / ours, "x", target=1.0)
        if PEER in timings:
            self.report.check(f"{name}_vs_transformers", timings[PEER].seconds / ours, "x", target=1.5)

    def _report_whole(self, item: Item, timings: dict[str, Timing]) -> None:
        for name, timing in timings.items():
            self.report.row(
                part="request",
                model=item.model,
                format=item.fmt,
                way=name,
                prompt=self.lengths.prompt,
                output=self.lengths.output,
                ms=round(1e3 * timing.seconds, 3),
                spread=round(timing.spread, 4),
            )
        if PEER in timings:
            ratio = timings[PEER].seconds / timings[OURS].seconds
            self.report.check(f"{item.model}_request_vs_transformers", ratio, "x", target=1.5)


def transformers_config(config: DecoderConfig) -> tuple[str, dict[str, int]]:
    """The transformers architecture for this config, and its sizes."""
    attention, positions = config.attention, config.positions
    if config.mlp.gated:
        return "Llama", {
            "vocab_size": config.vocab,
            "hidden_size": config.embed,
            "num_hidden_layers": config.layers,
            "num_attention_heads": attention.q_heads,
            "num_key_value_heads": attention.kv_heads,
            "intermediate_size": config.mlp.hidden,
            "max_position_embeddings": config.context,
        }
    sizes = {
        "vocab_size": config.vocab,
        "n_embd": config.embed,
        "n_layer": config.layers,
        "n_head": attention.q_heads,
        "n_positions": config.context,
        "n_inner": config.mlp.hidden,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if positions.kind is PositionKind.LEARNED:
        return "GPT2", sizes
    return "GPTJ", sizes | {"rotary_dim": positions.rotary_dim}
