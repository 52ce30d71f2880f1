"""Which programs an engine has, for which sizes, and how each is compiled."""

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxinfer.compiled import Bucket, Program, compile_program, compiler_options, powers, round_up
from jaxinfer.generation import signatures
from jaxinfer.generation.config import EngineConfig
from jaxinfer.generation.programs import DeviceState, place_adapter
from jaxinfer.generation.request import Sequence
from jaxinfer.generation.sampling import LogitsProcessor
from jaxinfer.models import DecoderConfig, LayerAdapters, LowRankStack
from jaxinfer.models.adapters import Adapter, adapter_shapes
from jaxinfer.models.loading import LoadedModel

SMALLEST_TABLE = 8
ADAPTER_AXES = {"qkv": ("heads", None), "out": (None, "heads"), "gate_up": ("mlp", None), "down": (None, "mlp")}
"""The logical axes of outputs and inputs of the linears in `LayerAdapters`."""

Wanted = tuple[str, dict[str, int]]


class ProgramBuilder:
    """Knows the shapes of everything on the device, and compiles for them; holds no array but the weights.

    Args:
      model: weights and config. config: the engine's sizes. num_pages: the size of the cache.
      processors: logits processors, compiled into the programs that choose tokens.

    Attributes:
      state: the shapes of `DeviceState`, with where each array lives. adapters: those of the adapters, or None.
      tables: widths of page tables that programs are compiled for. admissions: numbers of requests, likewise.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        *,
        num_pages: int,
        processors: Mapping[str, LogitsProcessor],
    ):
        assert isinstance(model.config, DecoderConfig)
        self.model, self.config, self.num_pages = model, config, num_pages
        self.decoder = model.config
        self._processors = tuple(processors.values())
        self.leaves, self._treedef = jax.tree.flatten(model.state)
        self.platform = next(iter(self.leaves[0].devices())).platform
        config.check_for(self.platform)
        most = -(-config.context // config.page_size)
        # Attention on a CPU reads as many pages as there are, elsewhere as many as the table has.
        self.tables = (most,) if self.platform == "cpu" else powers(2, min(SMALLEST_TABLE, most), most)
        self.admissions = powers(8, 1, config.slots)
        self.state = self._state()
        self.adapters = self._adapters() if config.max_adapters else None

    # Shapes

    def place(self, x: Any, *axes: str | None) -> jax.ShapeDtypeStruct:
        """The shape with where an array whose dimensions carry these names lives; no names: whole on every device."""
        sharding = self.model.sharding(*(axes or [None] * len(x.shape)), shape=x.shape)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def _state(self) -> DeviceState:
        def page(x: Any) -> Any:
            names = ("pages", "page", "kv_heads", "head_dim") if len(x.shape) == 4 else ("pages", "kv_heads")
            return self.place(x, *names)

        state = signatures.device_state(
            self.decoder, self.model.weights, self.config, pages=self.num_pages, processors=len(self._processors)
        )
        return DeviceState(jax.tree.map(page, state.caches), jax.tree.map(self.place, state.slots))

    def _adapters(self) -> list[LayerAdapters]:
        shapes = adapter_shapes(self.model.description.family, self.decoder, self.config.max_lora_rank)
        stacks = signatures.adapters(shapes, self.config, self.decoder.layers, self.model.weights.dtype)

        def stack(field: str, x: LowRankStack) -> LowRankStack:
            outputs, inputs = ADAPTER_AXES[field]
            a, b = self.place(x.a, None, None, inputs), self.place(x.b, outputs, None, None)
            return LowRankStack(a, b)  # type: ignore[arg-type]  # shapes for arrays

        return [LayerAdapters(**{f: stack(f, x) for f, x in layer._asdict().items()}) for layer in stacks]

    def layers_of(self, adapter: Adapter | None) -> list[LayerAdapters]:
        """One adapter's matrices, as numpy arrays; zeros where it leaves a linear alone."""
        assert self.adapters is not None

        def pair(layer: int, field: str, stack: LowRankStack) -> LowRankStack:
            found = adapter and adapter.layers.get(f"layers.{layer}.{signatures.LINEARS[field]}")
            if found:
                return LowRankStack(found.a, found.b)  # type: ignore[arg-type]  # numpy until it is sent
            (_, rank, inputs), (outputs, _, _) = stack.a.shape, stack.b.shape
            zeros = np.zeros((rank, inputs), np.float32), np.zeros((outputs, rank), np.float32)
            return LowRankStack(*zeros)  # type: ignore[arg-type]

        return [
            LayerAdapters(**{field: pair(i, field, stack) for field, stack in layer._asdict().items()})
            for i, layer in enumerate(self.adapters)
        ]

    # Programs

    def build(self, name: str, bucket: Bucket) -> Program:
        """Compile the program of this name for a bucket."""
        if name == "place_adapter":
            return self._build_placing(bucket)
        sizes = dict(bucket)
        body, inputs = signatures.program(
            name, sizes, self.config, vocab=self.decoder.vocab, processors=self._processors
        )
        build = functools.partial(compile_program, name, bucket, mesh=self.model.mesh, kernels=self.config.kernels)
        shardings = None
        if self.model.mesh is not None:
            # The compiler may place what is not placed: inputs go to all devices, the state comes back where it was.
            inputs = jax.tree.map(self.place, inputs)
            shardings = jax.tree.map(lambda x: x.sharding, self.state)
        if name not in signatures.OF_MODEL:
            return build(body, (self.state, *inputs), donate=(0,), out_shardings=shardings)
        graphdef, treedef = self.model.graphdef, self._treedef

        def function(leaves: list[jax.Array], *rest: Any) -> Any:
            return body(nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves)), *rest)

        return build(
            function,
            (self.leaves, self.adapters, self.state, *inputs),
            donate=(2,),
            out_shardings=(shardings, None) if self.model.mesh else None,
            compiler_options=compiler_options(
                self.platform,
                rows=sizes["batch"] * (1 + sizes.get("drafts", 0)) + sizes.get("pieces", 0) * self.config.piece_tokens,
                dtype=self.model.weights.matrix_dtype,
                weight_bytes=sum(leaf.nbytes for leaf in self.leaves),
            ),
        )

    def _build_placing(self, bucket: Bucket) -> Program:
        args = (self.adapters, jax.ShapeDtypeStruct((), np.int32), self.layers_of(None))
        places = jax.tree.map(lambda x: x.sharding, self.adapters) if self.model.mesh else None
        # Not donated: a step that fails here leaves the adapters that are there.
        return compile_program("place_adapter", bucket, place_adapter, args, out_shardings=places)

    def wanted(self, sequences: Iterable[Sequence] | None = None) -> Iterator[Wanted]:
        """Every (name, sizes) that can be needed while these sequences come and go; None: while any do."""
        config, count, longest = self.config, self.config.slots, self.config.context
        tables, generates = self.tables, True
        if sequences is not None:
            sequences = list(sequences)
            count, longest = min(count, len(sequences)), max(s.limit for s in sequences) - 1
            tables = self._tables_between(min(s.prompt_length for s in sequences), longest)
            generates = any(s.limit > s.prompt_length + 1 for s in sequences)  # the first token comes of the prompt
            if count * -(-longest // config.page_size) <= self.num_pages:  # none is preempted and computed again
                longest = max(s.prompt_length for s in sequences)
        for size in _up_to(count, self.admissions):
            yield "admit", {"count": size}
            if config.prefix_caching:
                yield "copy", {"count": size}
        if self.adapters is not None:
            yield "place_adapter", {}
        for table in tables:
            yield from self._steps(count, longest, table, generates=generates)
            for batch in _up_to(count, config.batches) if generates else ():
                for drafts in sorted({0, config.draft_tokens}):
                    yield "decode", {"batch": batch, "drafts": drafts, "pages": table}

    def _steps(self, count: int, longest: int, table: int, *, generates: bool) -> Iterator[Wanted]:
        """The steps with pieces of prompts of up to `longest` tokens, for `count` sequences at once."""
        width, counts = self.config.piece_tokens, self.config.piece_counts
        batches = _up_to(count - 1, self.config.mixed_batches) if generates else (0,)
        for pieces in _up_to(count * -(-longest // width), counts):
            for batch in batches:
                yield "step", {"pieces": pieces, "batch": batch, "pages": table}

    def largest(self) -> list[Wanted]:
        """The programs that need the most workspace."""
        config, table = self.config, self.tables[-1]
        step = {"pieces": config.piece_counts[-1], "batch": config.mixed_batches[-1], "pages": table}
        decode = {"batch": config.batches[-1], "drafts": config.draft_tokens, "pages": table}
        return [("step", step), ("decode", decode)]

    def _tables_between(self, least_tokens: int, most_tokens: int) -> tuple[int, ...]:
        first, last = (
            round_up(-(-tokens // self.config.page_size), self.tables) for tokens in (least_tokens, most_tokens)
        )
        return tuple(table for table in self.tables if first <= table <= last)


def _up_to(most: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The ascending sizes up to the one that holds `most`; all if none does."""
    return sizes[: next((i for i, size in enumerate(sizes) if size >= most), len(sizes)) + 1]
