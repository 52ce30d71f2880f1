"""An engine from a loaded model: which scheduler and which executor it has."""

import time
from collections.abc import Mapping

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
from jaxinfer.models import EncoderConfig
from jaxinfer.models.loading import LoadedModel


def build_engine(
    model: LoadedModel,
    tokenizer: Tokenizer | None,
    config: EngineConfig,
    *,
    num_pages: int = 0,
    logits_processors: Mapping[str, LogitsProcessor] | None = None,
    clock: Clock = time.perf_counter,
) -> Engine:
    """An engine on a loaded model.

    Args:
      model: a decoder to generate and embed, or an encoder to embed.
      tokenizer: its tokenizer, or None for token ids only.
      config: the engine's sizes.
      num_pages: the size of a decoder's cache; `memory.plan_memory` says what fits.
      logits_processors: by the name that requests give.
      clock: the time of sequences and steps, real or virtual.

    Raises ValueError for what the model's platform or mesh cannot run.
    """
    check_mesh(model)
    processors, adapters = dict(logits_processors or {}), None
    if isinstance(model.config, EncoderConfig):
        shapes = EncoderBuckets.of(config)
        scheduler = EncoderScheduler(config, shapes)
        executor = EncoderExecutor(model, config, shapes, clock=clock)
    else:
        if config.max_adapters:
            sizes = config.max_adapters, config.max_lora_rank, config.adapter_bytes
            adapters = AdapterCache(*sizes, model.description.family, model.config)
        buckets = buckets_of(config, model.platform)
        scheduler = DecoderScheduler(config, buckets, PagePool(num_pages, config.page_size), adapters)
        executor = DecoderExecutor(
            model, config, buckets, num_pages=num_pages, logits_processors=processors, clock=clock
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
