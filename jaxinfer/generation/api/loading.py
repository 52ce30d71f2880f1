"""Loads an engine, with all its parts, from a model directory."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Unpack

from jaxinfer.compiled.choices import warn_of_unmeasured_kernels
from jaxinfer.compiled.cpu_library import begin_library
from jaxinfer.disk_cache.blocks import BlockFolder
from jaxinfer.fields import Bytes, Size, check
from jaxinfer.generation.api.build import (
    LoadOptions,
    ModelOptions,
    build_engine,
    check_processors,
    engine_costs,
    place_model,
    split_options,
)
from jaxinfer.generation.api.lender import EngineLender
from jaxinfer.generation.engine.config import EncoderEngineConfig, EngineConfig, EngineOptions, SharedConfig
from jaxinfer.generation.engine.engine import Engine
from jaxinfer.generation.execution.images import ImageEngine
from jaxinfer.generation.execution.memory import (
    MemoryPlan,
    buffer_bytes,
    device_tenants,
    host_tenants,
    plan_memory,
    read_adapter_bytes,
    weight_tenants,
)
from jaxinfer.generation.execution.plan import Plan
from jaxinfer.generation.execution.whole_weights import WholeWeights
from jaxinfer.generation.lora.adapter_info import AdapterInfo
from jaxinfer.generation.sampling.sampler import LogitsProcessor
from jaxinfer.hub import resolve
from jaxinfer.models import DecoderConfig, ViTConfig
from jaxinfer.models.config import Pooling
from jaxinfer.models.devices import AnyMesh, build_mesh, devices_of, open_mesh
from jaxinfer.models.files.description import Description, require_transformer
from jaxinfer.models.files.loading import LoadedModel, OpenedModel, open_model
from jaxinfer.serving.budget import Reservation, Sizes, host_budget, sizes_of
from jaxinfer.sharding import MeshFile, ShardingRules
from jaxinfer.streaming.config import MemoryConfig, Placement
from jaxinfer.streaming.statistics import StreamingStatistics
from jaxinfer.text import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedEngine:
    """An engine and its parts.

    Attributes:
      engine: the engine; a model of images has a simpler one.
      model: weights and config.
      tokenizer: the tokenizer of the model directory, if it has one.
      reservation: the memory of the devices and the host that all parts hold.
      plan: what was decided before the engine was built; None for a model of images.
      lender: gives its memory back while it sleeps; None: it cannot sleep.
      memory: how memory is divided; None for an encoder, which has no cache.
    """

    engine: Engine | ImageEngine
    model: LoadedModel
    tokenizer: Tokenizer | None
    reservation: Reservation
    plan: Plan | None = None
    memory: MemoryPlan | None = None
    lender: EngineLender | None = None

    @property
    def placement(self) -> Placement | None:
        """Where each layer is, and why; None if all are on the devices."""
        return None if self.plan is None else self.plan.placement

    @property
    def streaming(self) -> StreamingStatistics | None:
        """Measurements of bringing layers to the devices; None if all are on the devices."""
        return None if isinstance(self.engine, ImageEngine) else self.engine.executor.report().streaming


def load_engine(path: str | Path, *, owner: str, asleep: bool = False, **options: Unpack[LoadOptions]) -> LoadedEngine:
    """Load the engine of a decoder or an encoder, whichever the model is; options are those of the one.

    owner: who holds the memory. asleep: whether it takes no memory of the devices before `LoadedEngine.wake_up`.
    """
    folder = resolve(path)
    load: Callable[..., LoadedEngine] = load_decoder if Description.read(folder).kind == "decoder" else load_encoder
    return load(folder, owner=owner, asleep=asleep, **options)


def _begin_kernels(options: Mapping[str, Any]) -> None:
    """Have CPU kernels compiled while a model is read, and warn if a GPU's kernels were not measured."""
    if "kernels" not in options:
        warn_of_unmeasured_kernels()
    if options.get("kernels", True):
        begin_library()


def load_decoder(
    path: str | Path,
    *,
    owner: str = "LLM",
    asleep: bool = False,
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
    """Load the engine of a decoder-only model. Arguments and errors are those of `LLM` and `load_engine`."""
    max_batch = check("LLM.max_batch", max_batch, Size)
    cache_bytes = check("LLM.cache_bytes", cache_bytes, Bytes | None)
    logits_processors = check_processors(logits_processors)
    mesh = open_mesh(mesh)
    engine_options, memory_config = split_options(options, mesh, owner="LLM", others=_names(load_decoder))
    disk_kv = _open_disk_kv(memory_config)
    mesh, rules = build_mesh(mesh, rules)
    _begin_kernels(engine_options)
    opened = _open_decoder(path, mesh=mesh, rules=rules, dtype=dtype, quantize=quantize)
    context = _context(context, opened.transformer.context, owner="LLM")
    opened = opened.for_context(context)
    engine_options = _adapter_options(engine_options, adapters)
    config = EngineConfig.from_options(engine_options, max_batch=max_batch, context=context)
    costs = engine_costs(opened, config.deciding_costs, kernels=config.kernels, logits_processors=logits_processors)
    reservation = Reservation(f"{owner} {opened.name}")
    model, config, placement = place_model(
        opened,
        config,
        memory_config,
        costs=costs,
        reservation=reservation,
        cache_bytes=cache_bytes,
        given=options.keys(),
        asleep=asleep,
    )
    tokenizer = Tokenizer.from_folder(model.folder)
    memory = plan_memory(
        model, config, limits=memory_config, placement=placement, cache_bytes=cache_bytes, asleep=asleep
    )
    plan, host = _plan(model, config, memory, placement, disk_kv=disk_kv is not None), memory.host_tenants
    sizes = _reserve(reservation, model, config, memory.tenants, placement, host=host, asleep=asleep)
    engine = build_engine(
        model, tokenizer, config, plan, costs=costs, logits_processors=logits_processors, disk_kv=disk_kv, asleep=asleep
    )
    for name, folder in (adapters or {}).items():
        assert engine.adapters is not None
        engine.adapters.register(name, folder)
    return LoadedEngine(
        engine=engine,
        model=model,
        tokenizer=tokenizer,
        reservation=reservation,
        plan=plan,
        memory=memory,
        lender=_lender(opened, engine, model, memory_config, plan, reservation, sizes, memory, asleep=asleep),
    )


def load_encoder(
    path: str | Path,
    *,
    owner: str = "Embedder",
    asleep: bool = False,
    mesh: AnyMesh = None,
    dtype: str | None = None,
    quantize: str | None = None,
    rules: ShardingRules | None = None,
    max_batch: int = 32,
    context: int | None = None,
    **options: Unpack[ModelOptions],
) -> LoadedEngine:
    """Load the engine of an encoder. Arguments and errors are those of `Embedder` and `load_engine`."""
    max_batch = check("Embedder.max_batch", max_batch, Size)
    folder = resolve(path)
    longest = require_transformer(path, Description.read(folder).config).context
    context = _context(context, longest, owner="Embedder")
    mesh = open_mesh(mesh)
    engine_options, memory_config = split_options(options, mesh, owner="Embedder", others=_names(load_encoder))
    for name in ("host_kv", "disk_kv", "kv_offload"):
        if (value := getattr(memory_config, name)) is not None:
            raise ValueError(f"Embedder.{name}={value} is for decoders, which cache pages: leave it out.")
    config = EncoderEngineConfig.from_options(engine_options, max_batch=max_batch, context=context)
    mesh, rules = build_mesh(mesh, rules)
    _begin_kernels(engine_options)
    opened = open_model(folder, mesh=mesh, dtype=dtype, quantize=quantize, rules=rules)
    if config.level and opened.transformer.pooling is Pooling.LAST:
        raise ValueError(
            f"Embedder.level={config.level} is not supported for a model that takes the last token's vector, which may "
            "be merged into another; leave it out."
        )
    costs = engine_costs(opened, config.deciding_costs, kernels=config.kernels)
    reservation = Reservation(f"{owner} {opened.name}")
    model, config, placement = place_model(
        opened, config, memory_config, costs=costs, reservation=reservation, given=options.keys(), asleep=asleep
    )
    tokenizer, plan = Tokenizer.from_folder(model.folder), Plan.of_model(model, config, placement=placement)
    tenants = weight_tenants(model, placement) | device_tenants(buffers=buffer_bytes(placement))
    sizes = _reserve(reservation, model, config, tenants, placement, asleep=asleep)
    engine = build_engine(model, tokenizer, config, plan, costs=costs, asleep=asleep)
    return LoadedEngine(
        engine=engine,
        model=model,
        tokenizer=tokenizer,
        reservation=reservation,
        plan=plan,
        lender=_lender(opened, engine, model, memory_config, plan, reservation, sizes, None, asleep=asleep),
    )


def load_image_embedder(
    path: str | Path,
    *,
    owner: str = "Embedder",
    mesh: AnyMesh = None,
    dtype: str | None = None,
    quantize: str | None = None,
    rules: ShardingRules | None = None,
    max_batch: int = 32,
    context: int | None = None,
    **options: Unpack[ModelOptions],
) -> LoadedEngine:
    """Load a vision transformer. Arguments and errors are those of `Embedder`; owner: who holds the memory."""
    max_batch = check(f"{owner}.max_batch", max_batch, Size)
    mesh = open_mesh(mesh)
    split_options(options, mesh, owner=owner, others=_names(load_image_embedder))
    given = {"context": context} | options
    if isinstance(mesh, MeshFile):
        given |= mesh.memory
    mesh, rules = build_mesh(mesh, rules)
    refused = sorted(name for name, value in given.items() if name not in ("level", "kernels") and value is not None)
    if refused:
        raise ValueError(
            f"{owner}.{refused[0]}={given[refused[0]]!r} is not supported for an image model; leave it out."
        )
    level, kernels = check("level", options.get("level", 0), int), check("kernels", options.get("kernels", True), bool)
    _begin_kernels(options)
    opened = open_model(resolve(path), mesh=mesh, rules=rules, dtype=dtype, quantize=quantize)
    config = opened.config
    assert isinstance(config, ViTConfig)
    if not -(config.patches // 2) <= level <= 0:
        raise ValueError(
            f"{owner}.level={level} must be in [{-(config.patches // 2)}, 0] for {config.patches} patches."
        )
    reservation = Reservation(f"{owner} {opened.name}")
    tenants = weight_tenants(opened, None)
    remedy = "use quantize='int4' or a smaller dtype, or close another model"
    reservation.resize(sizes_of(devices_of(mesh), tenants), remedy=remedy)
    model = opened.load()
    costs = engine_costs(model, {"level": level, "kernels": kernels}, kernels=kernels)
    engine = ImageEngine(model, max_batch=max_batch, level=level, kernels=kernels, costs=costs)
    return LoadedEngine(engine=engine, model=model, tokenizer=None, reservation=reservation)


def _names(load: Callable[..., LoadedEngine]) -> set[str]:
    """The options that a user gives one of these functions by name."""
    parameters = inspect.signature(load).parameters.values()
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - {"owner", "asleep"}


def _lender(
    opened: OpenedModel,
    engine: Engine,
    model: LoadedModel,
    config: MemoryConfig,
    plan: Plan,
    reservation: Reservation,
    sizes: Sizes,
    memory: MemoryPlan | None,
    *,
    asleep: bool,
) -> EngineLender | None:
    """Return how an engine sleeps; None: its weights are streamed, and it cannot."""
    if plan.placement is not None:
        return None
    return EngineLender(
        engine=engine,
        model=model,
        weights=WholeWeights(opened, config.layer_files, None if asleep else list(model.leaves.values())),
        reservation=reservation,
        sizes=sizes,
        memory=memory,
        asleep=asleep,
    )


def _open_disk_kv(memory: MemoryConfig) -> BlockFolder | None:
    """Open the folder for pages of the KV cache. Raises ValueError if it cannot be used."""
    if memory.disk_kv is None:
        return None
    assert memory.disk_kv_limit is not None
    try:
        return BlockFolder.open(memory.disk_kv, max_bytes=memory.disk_kv_limit)
    except OSError as error:
        why = f"it cannot be written ({error.strerror or error}): name another folder"
    except ValueError as error:
        why = str(error)
    raise ValueError(f"disk_kv={str(memory.disk_kv)!r}: {why}.")


def _plan(
    model: LoadedModel, config: EngineConfig, memory: MemoryPlan, placement: Placement | None, *, disk_kv: bool
) -> Plan:
    """Return the plan of a decoder's engine whose memory is divided so."""
    return Plan.of_model(
        model,
        config,
        num_pages=memory.num_pages,
        host_pages=memory.host_pages,
        disk_kv=disk_kv,
        slice_pages=memory.slice_pages,
        max_chunks=memory.max_chunks,
        placement=placement,
    )


def _reserve(
    reservation: Reservation,
    model: LoadedModel,
    config: SharedConfig,
    tenants: Mapping[str, int],
    placement: Placement | None,
    *,
    host: Mapping[str, int] | None = None,
    asleep: bool,
) -> Sizes:
    """Reserve all memory that a model takes, unless it is asleep; return the sizes. Raises BudgetError.

    tenants: the bytes it takes of each device, by tenant. host: likewise of the host, for its KV cache.
    """
    host = {**host_tenants(model, placement), "adapters": read_adapter_bytes(config), **(host or {})}
    sizes = sizes_of(devices_of(model.mesh), tenants, host=host)
    if not asleep:
        lower = "cache_bytes, host_kv, kv_offload, max_batch, token_budget or adapter_bytes"
        reservation.resize(sizes, remedy=f"lower {lower}, or close another model")
    return sizes


def _context(context: int | None, longest: int, *, owner: str) -> int:
    """Return how many tokens a sequence can have. Raises ValueError for more than the model can."""
    context = check(f"{owner}.context", context, Size | None)
    if context is not None and not 1 < context <= longest:
        raise ValueError(f"{owner}.context must be in [2, {longest}] for this model, got {context}.")
    return context or longest


def _open_decoder(path: str | Path, **options: Any) -> OpenedModel:
    """Open a decoder, with options of `open_model`. Raises ValueError for an encoder."""
    opened = open_model(resolve(path), **options)
    if not isinstance(opened.transformer, DecoderConfig):
        raise ValueError(f"{path} is an encoder; use jaxinfer.Embedder for it.")
    return opened


def _adapter_options(options: EngineOptions, adapters: Mapping[str, str | Path] | None) -> EngineOptions:
    """Complete the options with room for adapters. Raises ValueError for options without effect."""
    if adapters:
        options = _with_room(options, adapters)
    elif not options.get("max_adapters"):
        for name in ("max_lora_rank", "adapter_bytes"):
            if name in options:
                raise ValueError(f"LLM.{name} has no effect without adapters or max_adapters: leave it out.")
    if (free := host_budget().free) is not None:  # with little memory, few adapters that were read are kept
        options = {"adapter_bytes": min(EngineConfig.adapter_bytes, free // 4), **options}
    return options


def _with_room(options: EngineOptions, adapters: Mapping[str, str | Path]) -> EngineOptions:
    """Add room for these adapters to the options. Raises ValueError if the options rule it out."""
    if options.get("max_adapters") == 0:
        raise ValueError("LLM.max_adapters=0, but adapters are passed: set it to at least 1, or pass no adapters.")
    rank = max(AdapterInfo.read(folder).rank for folder in adapters.values())
    return {"max_adapters": min(len(adapters), 8), "max_lora_rank": rank, **options}
