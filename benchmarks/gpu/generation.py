"""Models of random weights, and the engine's own programs that generate with them, for timing."""

import contextlib
import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.compiled import ProgramSpec, Sizes
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.execution.layout import DeviceLayout
from jaxinfer.generation.execution.programs import decode, prefill
from jaxinfer.generation.execution.programs.prefill import Chunks
from jaxinfer.generation.execution.programs.verification import DecodeOutput
from jaxinfer.generation.execution.state import DeviceState, Rows, Slots
from jaxinfer.generation.sampling.arrays import idle_options, sampling_arrays
from jaxinfer.models import DecoderConfig, WeightFormat
from jaxinfer.models.abstract import abstract_model
from jaxinfer.models.config import PositionKind
from jaxinfer.pallas_kernels.dispatch import without_kernels


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """Numbers of tokens: prompt, timed decode steps after it, and output of a whole request (the paper's Fig. 6)."""

    prompt: int = 128
    steps: int = 32
    output: int = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """A way of compiling a program. off: operations whose kernels are disabled. graph: whether it is one CUDA graph."""

    off: tuple[str, ...] | None = None
    """None: all kernels are enabled; (): all are disabled."""
    graph: bool = True

    def applied(self) -> contextlib.AbstractContextManager[None]:
        """Apply it to everything traced inside the context."""
        return contextlib.nullcontext() if self.off is None else without_kernels(*self.off)


class Model:
    """A decoder of random weights on the device.

    Attributes:
      bytes: the weights that a decode step reads: all except tables of which it reads only single rows.
    """

    def __init__(self, config: DecoderConfig, weights: WeightFormat):
        self.config, self.weights = config, weights
        leaves = nnx.to_flat_state(nnx.state(abstract_model(config, weights)))
        scales = {path[:-1]: _SCALES[leaf.dtype.name] for path, leaf in leaves if leaf.dtype.name in _SCALES}
        tables = ("positions",) if config.tied else ("positions", "embed")
        random_leaves, self.bytes = {}, 0
        for index, (path, leaf) in enumerate(leaves):
            scale = scales.get(path[:-1], 1.0) if path[-1] == "scale" else None
            array = _random(index, leaf.shape, leaf.dtype, scale)
            random_leaves[path] = leaf.replace(array)
            self.bytes += 0 if path[0] in tables else array.nbytes
        self.leaves = jax.tree.leaves(nnx.from_flat_state(random_leaves))

    def kv_bytes(self, tokens: int) -> int:
        """Count the bytes of the keys and values of this many tokens, in all layers."""
        values = sum(self.config.layer(layer).attention.kv_values for layer in range(self.config.layers))
        return tokens * values * self.weights.dtype.itemsize


_SCALES = {"int8": 3e-4, "uint16": 5e-3}
"""Scales that give random int8 and int4 bits a standard deviation of about 0.02; all other scales belong to norms."""


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _random(seed: int, shape: tuple[int, ...], dtype: Any, scale: float | None) -> jax.Array:
    """Make a leaf: random bits, the scale, or normal numbers with a standard deviation of 0.02."""
    key = jax.random.key(seed)
    if jnp.issubdtype(dtype, jnp.integer):
        bits = jax.random.bits(key, shape, f"uint{8 * jnp.dtype(dtype).itemsize}")
        return jax.lax.bitcast_convert_type(bits, dtype)
    if scale is not None:
        return jnp.full(shape, scale, dtype)
    return (0.02 * jax.random.normal(key, shape, jnp.bfloat16)).astype(dtype)


class Generation:
    """The programs of a batch, compiled one way. The constructor traces; `compile` may run in parallel with others.

    Args:
      prompt: whether the program for the prompt is needed too.
    """

    def __init__(self, model: Model, batch: int, way: Way, lengths: Lengths, *, prompt: bool):
        self._model, self._batch, self._way, self._lengths = model, batch, way, lengths
        context = lengths.prompt + lengths.steps
        engine = EngineConfig(
            max_batch=batch,
            context=context,
            max_decode_passes=lengths.steps,
            chunk_size=lengths.prompt,
            token_budget=lengths.prompt * batch,
        )
        self._pages = -(-context // engine.page_size)  # per row
        self._layout = DeviceLayout(
            model.config, model.weights, engine, num_pages=batch * self._pages, platform=jax.default_backend()
        )
        self._caches: list[Any] = []
        self._programs: dict[str, jax.stages.Compiled] = {}
        self._lowered: dict[str, jax.stages.Lowered] = {}
        self._options: dict[str, dict[str, Any]] = {}
        self._lower(decode.spec(self._layout), decode.Decode(batch=batch, speculative=0, pages=self._pages))
        if prompt:
            self._lower(prefill.spec(self._layout), prefill.Prefill(chunks=batch, batch=0, pages=self._pages))

    def _lower[S: Sizes](self, spec: ProgramSpec[S, Buckets], sizes: S) -> None:
        with self._way.applied():
            self._lowered[spec.name] = spec.lower(sizes)
        self._options[spec.name] = spec.options(sizes)
        if self._layout.platform == "gpu" and not self._way.graph:
            self._options[spec.name]["xla_gpu_enable_command_buffer"] = ""

    @property
    def has_kernels(self) -> bool:
        """Whether the decoding program contains kernels. Always True in a dry run."""
        return self._layout.platform != "gpu" or "mosaic_gpu" in self._lowered["decode"].as_text()

    def compile(self) -> None:
        """Compile the programs."""
        for name, lowered in self._lowered.items():
            self._programs[name] = lowered.compile(self._options[name])

    def prepare(self) -> None:
        """Put the inputs on the device."""
        batch, pages = self._batch, self._pages
        slot, zeros = np.arange(batch, dtype=np.int32), np.zeros(batch, np.int32)
        count = np.full(batch, self._lengths.prompt, np.int32)
        table = np.arange(batch * pages, dtype=np.int32).reshape(batch, pages)
        shape = self._layout.bitmask(batch)
        bitmask = np.zeros(shape.shape, shape.dtype)  # no row reads it: none is constrained
        rows, none = Rows(slot, table), Rows(slot[:0], table[:0])  # type: ignore[arg-type]
        chunks = Chunks(slot, zeros, count, count > 0, count < 0, table)  # type: ignore[arg-type]
        self._inputs = jax.device_put({"decode": (rows, bitmask), "prefill": (chunks, none, bitmask)})
        self._no_speculation = jax.device_put(zeros)
        self._caches = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._layout.state.caches)

    def _start(self) -> DeviceState:
        """Make the state in which every row has its prompt, and nothing more."""
        slots, context = self._batch + 1, self._layout.engine.context
        history = np.random.default_rng(0).integers(0, self._model.config.vocab, (slots, context), np.int32)
        length, none = np.full(slots, self._lengths.prompt, np.int32), np.zeros(slots, np.int32)
        options = sampling_arrays([idle_options(0)._replace(limit=context)] * slots)
        fresh = Slots(history, length, none, options)  # type: ignore[arg-type]
        return jax.block_until_ready(DeviceState(self._caches, jax.device_put(fresh)))

    def _run(self, name: str, state: DeviceState, *inputs: Any) -> tuple[DeviceState, Any]:
        return self._programs[name](self._model.leaves, None, state, *self._inputs[name], *inputs)

    def _decode(self, state: DeviceState, passes: int) -> DecodeOutput:
        state, out = self._run("decode", state, jnp.int32(passes), self._no_speculation)
        self._caches = state.caches
        return out

    def step_round(self) -> float:
        """Time a decode step of all rows, in seconds."""
        state, steps = self._start(), self._lengths.steps
        start = time.perf_counter()
        produced = np.asarray(self._decode(state, steps).produced)
        seconds = time.perf_counter() - start
        assert (produced == steps).all(), f"rows ended early, after {produced} tokens"
        return seconds / steps

    def whole_round(self) -> float:
        """Time a prompt and its output, in seconds."""
        state = self._start()
        start = time.perf_counter()
        state, _ = self._run("prefill", state)
        np.asarray(self._decode(state, self._lengths.output - 1).tokens)
        return time.perf_counter() - start

    def tokens(self) -> np.ndarray:
        """The first token of each row after the prompt, with the current contents of the cache."""
        return np.asarray(self._decode(self._start(), 1).tokens[:, 0])


def tiny(config: DecoderConfig) -> DecoderConfig:
    """Shrink the architecture to tiny dimensions."""
    size, heads = 64, 2
    attention = config.layer(0).attention
    positions = attention.positions
    if positions.kind is PositionKind.ROTARY:
        positions = dataclasses.replace(positions, rotary_dim=min(positions.rotary_dim, size))
    small = config.with_mlp(hidden=128).with_attention(
        q_heads=heads, kv_heads=heads if attention.group == 1 else 1, head_dim=size, positions=positions
    )
    return dataclasses.replace(small, vocab=128, embed=heads * size, layers=1, context=64)
