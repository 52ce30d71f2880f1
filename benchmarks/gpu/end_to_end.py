"""Whole models of random weights: milliseconds per decode step against the floor and our XLA path.

Our side runs the engine's own programs: `prefill` for the prompt, `decode` for the tokens after it. The floor of a
decode step is the time to read all weights except the embedding table, and the rows' keys and values, at the measured
bandwidth. What is compared runs interleaved, on the same weights or on weights of the same size. `peers.py` measures
the same next to transformers.
"""

import dataclasses
import functools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.generation import Generation, Lengths, Model, Way, tiny
from benchmarks.gpu.items import Context, Item
from benchmarks.gpu.peer import AbsentError, Peer, Prepared
from benchmarks.gpu.rows import Rows
from benchmarks.gpu.timing import Effort, Timing, interleave
from jaxinfer.models import DecoderConfig, WeightFormat
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
class Setup:
    """A model in a weight format at a batch size, in several ways.

    Attributes:
      peer: whether transformers decodes too; with one row, a prompt and its output is measured as well, as in the
        paper's Fig. 6.
    """

    model: str
    fmt: str
    batch: int
    ways: Mapping[str, Way] = dataclasses.field(default_factory=lambda: COMPARED)
    peer: bool = False

    @property
    def part(self) -> str:
        """The part of the report that its times are in."""
        if self.peer:
            return "generation of peers"
        return "end to end" if self.ways is COMPARED else "breakdown"

    @property
    def whole(self) -> bool:
        """Whether a prompt and its output is measured too."""
        return self.peer and self.batch == 1

    @property
    def title(self) -> str:
        """The model, its format and the batch."""
        with_peer = f", with {PEER}" if self.peer else ""
        return f"{self.model}, {self.fmt}, batch {self.batch}{', breakdown' if self.part == 'breakdown' else with_peer}"


def setups(*, dry: bool) -> list[Setup]:
    """List what is measured without peers, the most informative first; dry: one of each kind, in fewer ways."""
    first, *others = MODELS
    llama = [Setup(model=first, fmt=fmt, batch=batch) for fmt in FORMATS for batch in (1, 16)]
    breakdown = Setup(model=MODELS[-1], fmt="bfloat16", batch=1, ways=BREAKDOWN)
    if dry:
        return [llama[0], dataclasses.replace(breakdown, ways=dict(list(BREAKDOWN.items())[:2]))]
    singles = [Setup(model=model, fmt=fmt, batch=1) for fmt in FORMATS for model in others]
    more = [Setup(model=model, fmt=fmt, batch=batch) for batch in BATCHES[1:] for fmt in FORMATS for model in MODELS]
    return [*llama, breakdown, *singles, *(setup for setup in more if setup not in llama)]


def items(context: Context) -> list[Item]:
    """List the setups; each keeps its weights for the next."""
    bench = Bench(context.rows, context.effort)
    return [Item(setup.title, functools.partial(bench.measure, setup)) for setup in setups(dry=context.dry)]


class Bench:
    """Measurement of setups one after another, keeping the last one's weights."""

    def __init__(self, rows: Rows, effort: Effort):
        self._rows, self._effort = rows, effort
        self._lengths = Lengths(prompt=8, steps=1, output=2) if effort.dry else Lengths()
        self._loaded: tuple[tuple[str, str], Model] | None = None

    def measure(self, setup: Setup, peer: Peer | None = None) -> None:
        """Measure one setup, and report its times and whether all ways generate alike."""
        ceilings = Ceilings.from_rows(self._rows.read())
        model = self._model(setup)
        with ThreadPoolExecutor() as pool:
            theirs = pool.submit(self._prepare_peer, setup, model.config, peer) if peer else None
            made = {
                name: Generation(model, setup.batch, way, self._lengths, prompt=setup.whole)
                for name, way in setup.ways.items()
            }
            list(pool.map(Generation.compile, made.values()))
            other = theirs.result() if theirs else None
        for generation in made.values():
            generation.prepare()
        rounds = {name: generation.step_round for name, generation in made.items()}
        timings = self._interleave(rounds | ({PEER: other.round()} if other else {}))
        self._report_steps(setup, model, ceilings, timings, ran_kernels=OURS in made and made[OURS].has_kernels)
        if setup.whole:
            whole = {name: generation.whole_round for name, generation in made.items()}
            theirs_whole = {PEER: other.round(generate=self._lengths.output)} if other else {}
            self._report_whole(setup, self._interleave(whole | theirs_whole))
        tokens = [generation.tokens() for generation in made.values()]
        same = float(np.mean([np.mean(tokens[0] == other_tokens) for other_tokens in tokens[1:]]))
        self._rows.row(part="end to end", what=setup.title, same_first_token=round(same, 3))

    def _interleave(self, rounds: dict[str, Any]) -> dict[str, Timing]:
        for run_round in rounds.values():  # warms up
            for _ in range(self._effort.warm_up):
                run_round()
        return interleave(rounds, self._effort.rounds)

    def _model(self, setup: Setup) -> Model:
        key = setup.model, setup.fmt
        if self._loaded is None or self._loaded[0] != key:
            self._loaded = None  # frees the weights before the next ones are made
            config = preset(setup.model)
            self._loaded = key, Model(tiny(config) if self._effort.dry else config, FORMATS[setup.fmt])
        return self._loaded[1]

    def _prepare_peer(self, setup: Setup, config: DecoderConfig, peer: Peer) -> Prepared | None:
        architecture, sizes = transformers_config(config)
        lengths = self._lengths
        try:
            peer.forget()
            return peer.prepare(
                "decode",
                architecture=architecture,
                config=sizes,
                batch=setup.batch,
                prompt=lengths.prompt,
                steps=lengths.steps,
                context=lengths.prompt + lengths.steps,
            )
        except AbsentError as error:
            self._rows.row(part=setup.part, what=setup.title, way=PEER, absent=str(error))
            return None

    def _report_steps(
        self, setup: Setup, model: Model, ceilings: Ceilings, timings: dict[str, Timing], *, ran_kernels: bool
    ) -> None:
        context = self._lengths.prompt + self._lengths.steps // 2  # on average
        floor = (model.bytes + model.kv_bytes(setup.batch * context)) / ceilings.read
        for name, timing in timings.items():
            self._rows.row(
                part=setup.part,
                model=setup.model,
                format=setup.fmt,
                batch=setup.batch,
                way=name,
                ms_per_step=round(1e3 * timing.seconds, 4),
                floor_ms=round(1e3 * floor, 4),
                of_floor=round(floor / timing.seconds, 4),
                tokens_per_s=round(setup.batch / timing.seconds, 1),
                spread=round(timing.spread, 4),
            )
        if setup.ways is not COMPARED:
            return
        ours, name = timings[OURS].seconds, f"{setup.model}_{setup.fmt}_b{setup.batch}"
        invalid = "" if ran_kernels else "no kernel ran"
        if setup.peer:
            if PEER in timings:
                ratio = timings[PEER].seconds / ours
                self._rows.check(f"{name}_vs_transformers", ratio, "x", target=1.5, invalid=invalid)
            return
        if setup.batch == 1 and setup.model in LARGE_MODELS:
            target = TARGETS[setup.fmt]
            self._rows.check(f"{name}_of_read_bandwidth", floor / ours, "", target=target, invalid=invalid)
        self._rows.check(f"{name}_vs_xla", timings[XLA].seconds / ours, "x", target=1.0, invalid=invalid)

    def _report_whole(self, setup: Setup, timings: dict[str, Timing]) -> None:
        for name, timing in timings.items():
            self._rows.row(
                part="request",
                model=setup.model,
                format=setup.fmt,
                way=name,
                prompt=self._lengths.prompt,
                output=self._lengths.output,
                ms=round(1e3 * timing.seconds, 3),
                spread=round(timing.spread, 4),
            )
        if PEER in timings:
            ratio = timings[PEER].seconds / timings[OURS].seconds
            self._rows.check(f"{setup.model}_request_vs_transformers", ratio, "x", target=1.5)


def transformers_config(config: DecoderConfig) -> tuple[str, dict[str, int]]:
    """The transformers architecture for this config, and its sizes."""
    attention = config.layer(0).attention
    if config.layer(0).mlp.gated:
        return "Llama", {
            "vocab_size": config.vocab,
            "hidden_size": config.embed,
            "num_hidden_layers": config.layers,
            "num_attention_heads": attention.q_heads,
            "num_key_value_heads": attention.kv_heads,
            "intermediate_size": config.layer(0).mlp.hidden,
            "max_position_embeddings": config.context,
        }
    sizes = {
        "vocab_size": config.vocab,
        "n_embd": config.embed,
        "n_layer": config.layers,
        "n_head": attention.q_heads,
        "n_positions": config.context,
        "n_inner": config.layer(0).mlp.hidden,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if config.learned_positions is not None:
        return "GPT2", sizes
    return "GPTJ", sizes | {"rotary_dim": attention.positions.rotary_dim}
