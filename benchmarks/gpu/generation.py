"""Models of random weights, and the engine's own programs that generate with them, for timing."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.compiled import compiler_options
from jaxinfer.generation import signatures
from jaxinfer.generation.config import EngineConfig
from jaxinfer.generation.programs import Decoded, DeviceState, Pieces, Rows, Slots
from jaxinfer.generation.sampling import idle_options, sampling_arrays
from jaxinfer.generation.structured import words
from jaxinfer.models import DecoderConfig, WeightFormat
from jaxinfer.models.config import PositionKind
from jaxinfer.models.loading import abstract_model
from pallas_kernels.dispatch import without_kernels


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """Numbers of tokens: prompt, timed decode steps after it, and output of a whole request (the paper's Fig. 6)."""

    prompt: int = 128
    steps: int = 32
    output: int = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """How a program is compiled. off: operations whose kernels are disabled. graph: whether it is one CUDA graph."""

    off: tuple[str, ...] | None = None
    """None: all kernels are enabled; (): all are disabled."""
    graph: bool = True

    def applied(self) -> contextlib.AbstractContextManager[None]:
        """Applies to what is traced inside."""
        return contextlib.nullcontext() if self.off is None else without_kernels(*self.off)


class Model:
    """A decoder of random weights on the device.

    Attributes:
      bytes: the weights that a decode step reads: all except tables of which it reads only single rows.
    """

    def __init__(self, config: DecoderConfig, weights: WeightFormat):
        self.config, self.weights = config, weights
        self._graphdef, state = nnx.split(abstract_model(config, weights))
        leaves = nnx.to_flat_state(state)
        scales = {path[:-1]: _SCALES[leaf.dtype.name] for path, leaf in leaves if leaf.dtype.name in _SCALES}
        tables = ("positions",) if config.tied else ("positions", "embed")
        random_leaves, self.bytes = {}, 0
        for index, (path, leaf) in enumerate(leaves):
            scale = scales.get(path[:-1], 1.0) if path[-1] == "scale" else None
            array = _random(index, leaf.shape, leaf.dtype, scale)
            random_leaves[path] = leaf.replace(array)
            self.bytes += 0 if path[0] in tables else array.nbytes
        self.leaves, self._treedef = jax.tree.flatten(nnx.from_flat_state(random_leaves))

    def bound(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """A program of the model as a function of its leaves."""

        def program(leaves: list[jax.Array], *rest: Any) -> Any:
            return body(nnx.merge(self._graphdef, jax.tree.unflatten(self._treedef, leaves)), None, *rest)

        return program

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of the keys and values of this many tokens, in all layers."""
        attention = self.config.attention
        return 2 * self.config.layers * tokens * attention.kv_heads * attention.head_dim * self.weights.dtype.itemsize


_SCALES = {"int8": 3e-4, "uint16": 5e-3}
"""Scales that give random int8 and int4 bits a standard deviation of about 0.02; all other scales belong to norms."""


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _random(seed: int, shape: tuple[int, ...], dtype: Any, scale: float | None) -> jax.Array:
    """A leaf: random bits, the scale, or normal numbers with a standard deviation of 0.02."""
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
        self._engine = EngineConfig(
            slots=batch,
            context=context,
            max_decode_steps=lengths.steps,
            piece_tokens=lengths.prompt,
            token_budget=lengths.prompt * batch,
        )
        self._pages = -(-context // self._engine.page_size)  # of a row
        self._state = signatures.device_state(
            model.config, model.weights, self._engine, pages=batch * self._pages, processors=0
        )
        self._caches: list[Any] = []
        self._programs: dict[str, Callable[..., Any]] = {}
        with way.applied():
            self._lowered = {"decode": self._lower("decode", batch=batch, drafts=0)}
            if prompt:
                self._lowered["step"] = self._lower("step", pieces=batch, batch=0)

    def _lower(self, name: str, **sizes: int) -> jax.stages.Lowered:
        model, sizes = self._model, sizes | {"pages": self._pages}
        body, inputs = signatures.program(name, sizes, self._engine, vocab=model.config.vocab)
        return jax.jit(model.bound(body), donate_argnums=1).lower(model.leaves, self._state, *inputs)

    def compile(self) -> None:
        platform = jax.default_backend()
        for name, lowered in self._lowered.items():
            rows = self._batch * (self._lengths.prompt if name == "step" else 1)
            options = dict(compiler_options(platform, rows=rows, dtype=self._model.weights.matrix_dtype))
            if platform == "gpu" and not self._way.graph:
                options["xla_gpu_enable_command_buffer"] = ""
            self._programs[name] = lowered.compile(options)

    def prepare(self) -> None:
        """Put the inputs on the device."""
        batch, pages = self._batch, self._pages
        slot, zeros = np.arange(batch, dtype=np.int32), np.zeros(batch, np.int32)
        count = np.full(batch, self._lengths.prompt, np.int32)
        table = np.arange(batch * pages, dtype=np.int32).reshape(batch, pages)
        mask = np.zeros((batch, words(self._model.config.vocab)), np.uint32)
        rows, pieces = Rows(slot, table), Pieces(slot, zeros, count, count > 0, table)  # type: ignore[arg-type]
        none = Rows(slot[:0], table[:0])  # type: ignore[arg-type]
        self._inputs = jax.device_put({"decode": (rows, mask), "step": (pieces, none, mask)})
        self._no_drafts = jax.device_put(zeros)
        self._caches = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._state.caches)

    def _start(self) -> DeviceState:
        """The state after the prompt."""
        slots, context = self._batch + 1, self._engine.context
        history = np.random.default_rng(0).integers(0, self._model.config.vocab, (slots, context), np.int32)
        length, limit, none = (np.full(slots, value, np.int32) for value in (self._lengths.prompt, context, 0))
        options = sampling_arrays([idle_options(0)] * slots)
        fresh = Slots(history, length, length > 0, limit, none, options)  # type: ignore[arg-type]
        return jax.block_until_ready(DeviceState(self._caches, jax.device_put(fresh)))

    def _decode(self, state: DeviceState, steps: int) -> Decoded:
        limit = jnp.int32(steps)
        state, out = self._programs["decode"](
            self._model.leaves, state, *self._inputs["decode"], limit, self._no_drafts
        )
        self._caches = state.caches
        return out

    def step_round(self) -> float:
        """Seconds per decode step of all rows."""
        state, steps = self._start(), self._lengths.steps
        start = time.perf_counter()
        produced = np.asarray(self._decode(state, steps).produced)
        seconds = time.perf_counter() - start
        assert (produced == steps).all(), f"rows ended early, after {produced} tokens"
        return seconds / steps

    def whole_round(self) -> float:
        """Seconds of a prompt and its output."""
        state = self._start()
        start = time.perf_counter()
        state, _ = self._programs["step"](self._model.leaves, state, *self._inputs["step"])
        np.asarray(self._decode(state, self._lengths.output - 1).tokens)
        return time.perf_counter() - start

    def tokens(self) -> np.ndarray:
        """The first token of each row after the prompt, with the current contents of the cache."""
        return np.asarray(self._decode(self._start(), 1).tokens[:, 0])


def tiny(config: DecoderConfig) -> DecoderConfig:
    """The same architecture with tiny dimensions."""
    size, heads = 64, 2
    attention = dataclasses.replace(
        config.attention,
        q_heads=heads,
        kv_heads=heads if config.attention.group == 1 else 1,
        head_dim=size,
    )
    positions = config.positions
    if positions.kind is PositionKind.ROTARY:
        positions = dataclasses.replace(positions, rotary_dim=min(positions.rotary_dim, size))
    return dataclasses.replace(
        config,
        vocab=128,
        embed=heads * size,
        layers=1,
        context=64,
        attention=attention,
        positions=positions,
        mlp=dataclasses.replace(config.mlp, hidden=128),
    )
