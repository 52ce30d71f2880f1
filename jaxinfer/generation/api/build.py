"""An engine from a loaded model: which scheduler and which executor it has."""

import time
from collections.abc import Mapping

from jaxinfer.compiled import Costs
from jaxinfer.generation.engine.buckets import EncoderBuckets
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.engine.encoder_scheduler import EncoderScheduler
from jaxinfer.generation.engine.engine import Engine
from jaxinfer.generation.engine.input import InputProcessor
from jaxinfer.generation.engine.page_pool import PagePool
from jaxinfer.generation.engine.protocols import Clock
from jaxinfer.generation.engine.scheduler import DecoderScheduler
from jaxinfer.generation.execution.decoder import DecoderExecutor
from jaxinfer.generation.execution.encoder import EncoderExecutor
from jaxinfer.generation.execution.platforms import buckets_of, check_mesh
from jaxinfer.generation.lora.cache import AdapterCache
from jaxinfer.generation.sampling.sampler import LogitsProcessor
from jaxinfer.generation.text import Tokenizer
from jaxinfer.models import DecoderConfig, EncoderConfig
from jaxinfer.models.devices import device_name, devices_of
from jaxinfer.models.loading import LoadedModel

COST_OPTIONS = ("page_size", "chunk_size", "kv_dtype", "max_adapters", "max_lora_rank", "kernels")
"""The fields of `EngineConfig` that decide how long programs of the same sizes take."""


def build_engine(
    model: LoadedModel,
    tokenizer: Tokenizer | None,
    config: EngineConfig,
    *,
    num_pages: int = 0,
    logits_processors: Mapping[str, LogitsProcessor] | None = None,
    clock: Clock = time.perf_counter,
    costs: Costs | None = None,
) -> Engine:
    """An engine on a loaded model.

    Args:
      model: a decoder to generate and embed, or an encoder to embed.
      tokenizer: its tokenizer, or None for token ids only.
      config: the engine's sizes.
      num_pages: the size of a decoder's cache; `memory.plan_memory` says what fits.
      logits_processors: by the name that requests give.
      clock: the time of sequences and steps, real or virtual.
      costs: the record of how long programs take; None: the one kept on disk, or under a virtual clock a new one.

    Raises ValueError for what the model's platform or mesh cannot run.
    """
    check_mesh(model.mesh)
    processors, adapters = dict(logits_processors or {}), None
    if costs is None:
        costs = open_costs(model, config, tuple(processors)) if clock is time.perf_counter else Costs()
    if isinstance(model.config, EncoderConfig):
        shapes = EncoderBuckets.of(config)
        scheduler = EncoderScheduler(config, shapes)
        executor = EncoderExecutor(model, config, shapes, clock=clock, costs=costs)
    else:
        if config.max_adapters:
            sizes = config.max_adapters, config.max_lora_rank, config.adapter_bytes
            original = model.description.config
            assert isinstance(original, DecoderConfig)
            adapters = AdapterCache(*sizes, model.description.family, original)
        buckets = buckets_of(config, model.platform)
        scheduler = DecoderScheduler(config, buckets, PagePool(num_pages, config.page_size), adapters, costs=costs)
        executor = DecoderExecutor(
            model, config, buckets, num_pages=num_pages, logits_processors=processors, clock=clock, costs=costs
        )
    inputs = InputProcessor(
        vocab=model.config.vocab,
        eos_ids=model.eos_ids,
        context=config.context,
        tokenizer=tokenizer,
        generates=not isinstance(model.config, EncoderConfig),
        logits_processors=tuple(processors),
        adapters=adapters,
    )
    return Engine(config, inputs, scheduler, executor, clock=clock)


def open_costs(model: LoadedModel, config: EngineConfig, logits_processors: tuple[str, ...]) -> Costs:
    """The record of a model's programs that is kept on disk, under all that decides how long they take.

    What only says which programs there are, or how large arrays are of which a step reads a part (the number of pages,
    which depends on what memory is free), is left out: a restart should find what the process before it learnt.
    """
    return Costs.open(
        device=device_name(devices_of(model.mesh)[0]),
        model={
            "config": str(model.description.config),
            "weights": str(model.weights),
            "mesh": "" if model.mesh is None else f"{dict(model.mesh.shape)} {model.rules}",
            "options": ", ".join(f"{name}={getattr(config, name)}" for name in COST_OPTIONS),
            "logits_processors": ", ".join(logits_processors),
        },
    )
