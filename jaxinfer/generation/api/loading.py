"""An engine from a model directory, with all that it is made of."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Unpack

from jaxinfer.generation.api.build import (
    ModelOptions,
    build_engine,
    check_processors,
    open_costs,
    place_model,
    split_options,
)
from jaxinfer.generation.engine.config import EncoderEngineConfig, EngineConfig, EngineOptions
from jaxinfer.generation.engine.engine import Engine
from jaxinfer.generation.execution.chain import ChainExecutor, EncoderChainExecutor
from jaxinfer.generation.execution.memory import MemoryPlan, plan_memory
from jaxinfer.generation.lora.adapter_info import AdapterInfo
from jaxinfer.generation.sampling.sampler import LogitsProcessor
from jaxinfer.generation.text import Tokenizer
from jaxinfer.models import DecoderConfig
from jaxinfer.models.description import Description, require_transformer
from jaxinfer.models.devices import AnyMesh, build_mesh, open_mesh
from jaxinfer.models.loading import LoadedModel, open_model
from jaxinfer.streaming.config import Placement
from jaxinfer.streaming.model import StreamedModel
from jaxinfer.streaming.statistics import StreamingStatistics
from sharding import ShardingRules


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedEngine:
    """An engine, and what it is made of.

    Attributes:
      engine: it.
      model: weights and config.
      tokenizer: that of the model directory, if it has one.
      memory: how memory is divided; None for an encoder, which has no cache.
    """

    engine: Engine
    model: LoadedModel
    tokenizer: Tokenizer | None
    memory: MemoryPlan | None = None

    @property
    def placement(self) -> Placement | None:
        """Where each layer is, and why; None if all are on the devices."""
        return self.model.placement if isinstance(self.model, StreamedModel) else None

    @property
    def streaming(self) -> StreamingStatistics | None:
        """What bringing layers was seen to take; None if all are on the devices."""
        executor = self.engine.executor
        streams = isinstance(executor, ChainExecutor | EncoderChainExecutor)
        return executor.prefetcher.statistics if streams else None


def load_decoder(
    path: str | Path,
    *,
    mesh: AnyMesh = None,
    dtype: str | None = None,
    quantize: str | None = None,
    rules: ShardingRules | None = None,
    max_batch: int = 8,
    context: int | None = None,
    cache_bytes: int | None = None,
    adapters: Mapping[str, str | Path] | None = None,
    logits_processors: Mapping[str, LogitsProcessor] | None = None,
    **options: Unpack[ModelOptions],
) -> LoadedEngine:
    """The engine of a decoder-only model. Arguments and errors are those of `LLM`."""
    if max_batch < 1:
        raise ValueError(f"LLM.max_batch must be >= 1, got {max_batch}.")
    logits_processors = check_processors(logits_processors)
    mesh = open_mesh(mesh)
    engine_options, memory_config = split_options(options, mesh, owner="LLM")
    mesh, rules = build_mesh(mesh, rules)
    opened = open_model(path, mesh=mesh, rules=rules, dtype=dtype, quantize=quantize)
    if not isinstance(opened.transformer, DecoderConfig):
        raise ValueError(f"{path} holds an encoder; use jaxinfer.Embedder for it.")
    context = _context(context, opened.transformer.context, owner="LLM")
    if adapters:
        engine_options = _with_room(engine_options, adapters)
    config = EngineConfig.of(engine_options, max_batch=max_batch, context=context)
    costs = open_costs(opened, config, logits_processors)
    model, config = place_model(
        opened, config, memory_config, costs=costs, cache_bytes=cache_bytes, given=options.keys()
    )
    tokenizer = Tokenizer.of(model.folder)
    memory = plan_memory(model, config, cache_bytes=cache_bytes, device_memory=memory_config.device_memory)
    engine = build_engine(
        model,
        tokenizer,
        config,
        num_pages=memory.num_pages,
        max_chunks=memory.max_chunks,
        logits_processors=logits_processors,
        costs=costs,
    )
    for name, folder in (adapters or {}).items():
        assert engine.adapters is not None
        engine.adapters.register(name, folder)
    return LoadedEngine(engine=engine, model=model, tokenizer=tokenizer, memory=memory)


def load_encoder(
    path: str | Path,
    *,
    mesh: AnyMesh = None,
    dtype: str | None = None,
    quantize: str | None = None,
    rules: ShardingRules | None = None,
    max_batch: int = 32,
    context: int | None = None,
    **options: Unpack[ModelOptions],
) -> LoadedEngine:
    """The engine of an encoder. Arguments and errors are those of `Embedder`."""
    if max_batch < 1:
        raise ValueError(f"Embedder.max_batch must be >= 1, got {max_batch}.")
    longest = require_transformer(path, Description.read(path).config).context
    context = _context(context, longest, owner="Embedder")
    mesh = open_mesh(mesh)
    engine_options, memory_config = split_options(options, mesh, owner="Embedder")
    config = EncoderEngineConfig.of(engine_options, max_batch=max_batch, context=context)
    mesh, rules = build_mesh(mesh, rules)
    opened = open_model(path, mesh=mesh, dtype=dtype, quantize=quantize, rules=rules)
    costs = open_costs(opened, config)
    model, config = place_model(opened, config, memory_config, costs=costs, given=options.keys())
    tokenizer = Tokenizer.of(model.folder)
    return LoadedEngine(engine=build_engine(model, tokenizer, config, costs=costs), model=model, tokenizer=tokenizer)


def _context(context: int | None, longest: int, *, owner: str) -> int:
    """How many tokens a sequence can have. Raises ValueError for more than the model can."""
    if context is not None and not 1 < context <= longest:
        raise ValueError(f"{owner}.context must be in [2, {longest}] for this model, got {context}.")
    return context or longest


def _with_room(options: EngineOptions, adapters: Mapping[str, str | Path]) -> EngineOptions:
    """The options with room for these adapters. Raises ValueError if they say that there is none."""
    if options.get("max_adapters") == 0:
        raise ValueError("LLM.max_adapters is 0, but there are adapters: give it at least 1, or none of them.")
    rank = max(AdapterInfo.read(folder).rank for folder in adapters.values())
    return {"max_adapters": min(len(adapters), 8), "max_lora_rank": rank, **options}
