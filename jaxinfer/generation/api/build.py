"""Builds an engine from a loaded model: chooses its scheduler and executor."""

import contextlib
import dataclasses
import hashlib
import itertools
import secrets
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, cast

from msgspec import Meta

from jaxinfer.checkpoints.reading import GROUP_BYTES
from jaxinfer.compiled import Clock, Costs
from jaxinfer.compiled.cpu_library import cpu_library
from jaxinfer.disk_cache import keys
from jaxinfer.disk_cache.blocks import KEY_BYTES, BlockFolder
from jaxinfer.execution.costs import open_costs
from jaxinfer.fields import check, shown
from jaxinfer.generation.engine.buckets import EncoderBuckets
from jaxinfer.generation.engine.config import EncoderEngineConfig, EngineConfig, EngineOptions, SharedConfig
from jaxinfer.generation.engine.disk_pages import DiskPages
from jaxinfer.generation.engine.encoder_scheduler import EncoderScheduler
from jaxinfer.generation.engine.engine import Engine
from jaxinfer.generation.engine.host_and_disk import HostAndDisk
from jaxinfer.generation.engine.host_pages import HostPages
from jaxinfer.generation.engine.input import InputProcessor
from jaxinfer.generation.engine.lanes import LaneScheduler
from jaxinfer.generation.engine.page_pool import PagePool
from jaxinfer.generation.engine.page_tier import PageTier
from jaxinfer.generation.engine.pooler import Pooler
from jaxinfer.generation.engine.restoring import Restoring
from jaxinfer.generation.engine.scheduler import DecoderScheduler
from jaxinfer.generation.engine.snapshots import Snapshots
from jaxinfer.generation.engine.speculation import PassCosts
from jaxinfer.generation.engine.state_pages import StatePages
from jaxinfer.generation.execution.base import DevicePrograms
from jaxinfer.generation.execution.chain import ChainDecoderPasses, ChainEncoderPasses, LayerStream
from jaxinfer.generation.execution.decoder import DecoderExecutor
from jaxinfer.generation.execution.decoder_state import DecoderState
from jaxinfer.generation.execution.encoder import EncoderExecutor
from jaxinfer.generation.execution.layout import DeviceLayout
from jaxinfer.generation.execution.memory import host_tenants, weight_tenants
from jaxinfer.generation.execution.packing import Packer
from jaxinfer.generation.execution.placement import plan_placement
from jaxinfer.generation.execution.plan import Plan, Way
from jaxinfer.generation.execution.platforms import step_seconds
from jaxinfer.generation.execution.programs import chain_programs, decoder_programs, embed
from jaxinfer.generation.execution.programs.chain import encoder_specs
from jaxinfer.generation.execution.ring import RingDecoderPasses
from jaxinfer.generation.execution.whole import WholeDecoderPasses, WholeEncoderPasses
from jaxinfer.generation.foreign_options import unknown_options
from jaxinfer.generation.lora.cache import AdapterCache
from jaxinfer.generation.params import SamplingParams
from jaxinfer.generation.sampling.sampler import LogitsProcessor
from jaxinfer.models import DecoderConfig, EncoderConfig
from jaxinfer.models.devices import AnyMesh, devices_of
from jaxinfer.models.files.loading import LoadedModel, OpenedModel
from jaxinfer.serving.budget import Reservation, sizes_of
from jaxinfer.sharding import MeshFile, ShardingRules
from jaxinfer.streaming.config import USED_WITH, WEIGHTS, MemoryConfig, MemoryOptions, Placement
from jaxinfer.streaming.model import StreamedModel, stream_model
from jaxinfer.text import Tokenizer

_Processors = Annotated[dict[str, Any], Meta(description="a dict of functions by name")]


def build_engine(
    model: LoadedModel,
    tokenizer: Tokenizer | None,
    config: SharedConfig,
    plan: Plan,
    *,
    costs: Costs | None = None,
    logits_processors: Mapping[str, LogitsProcessor] | None = None,
    disk_kv: BlockFolder | None = None,
    clock: Clock = time.perf_counter,
    asleep: bool = False,
) -> Engine:
    """Build an engine on a loaded model.

    Args:
      model: a decoder to generate and embed, or an encoder to embed.
      tokenizer: its tokenizer, or None for token ids only.
      config: the engine's sizes.
      plan: what was decided before: pages, the place of layers, sizes.
      costs: what passes and fetches took so far, by which the scheduler chooses; None: nothing is known.
      logits_processors: functions by the name that requests give.
      disk_kv: keeps pages of the prefix cache, in addition to `plan.host_pages`; None: no disk does.
      clock: the time of sequences and steps, real or virtual.
      asleep: whether it takes no memory of the devices before `Engine.wake_up`.

    Raises ValueError for options that the model's platform or mesh cannot run.
    """
    processors, costs = check_processors(logits_processors), costs or Costs()
    adapters, restoring = None, ()
    if isinstance(model.config, EncoderConfig):
        assert isinstance(config, EncoderEngineConfig)
        assert isinstance(plan.buckets, EncoderBuckets)
        scheduler = EncoderScheduler(config, plan.buckets)
        executor = _encoder_executor(model, config, plan.buckets, plan, costs, clock)
    else:
        assert isinstance(config, EngineConfig)
        adapters = _adapters(model, config)
        pass_costs = plan.pass_costs(costs, config.num_speculative_tokens)
        executor = _decoder_executor(model, config, plan, pass_costs, processors, clock, asleep=asleep)
        tier = _page_tier(plan, disk_kv, executor.state.layout, costs)
        identity = None if tier is None else _page_identity(model, config, adapters)
        lanes = decoder_lanes(
            config,
            plan,
            pass_costs,
            platform=model.platform,
            lanes=model.lanes,
            adapters=adapters,
            tier=tier,
            identity=identity,
            num_snapshots=executor.state.layout.num_snapshots,
            states=_state_pages(executor.state.layout, plan),
        )
        scheduler = scheduler_of(lanes)
        restoring = restoring_of(lanes)
    encodes, transformer = isinstance(model.config, EncoderConfig), model.transformer
    inputs = InputProcessor(
        vocab=transformer.vocab,
        eos_ids=model.eos_ids,
        context=config.context,
        tokenizer=tokenizer,
        generates=not encodes and model.description.generates,
        defaults=SamplingParams.from_model(model.description),
        logits_processors=tuple(processors),
        adapters=adapters,
        sentence=model.description.sentence,
        pooler=None if encodes else Pooler(transformer.pooling, transformer.normalize),
    )
    return Engine(config, inputs, scheduler, executor, restoring=restoring, clock=clock, asleep=asleep)


def _adapters(model: LoadedModel, config: EngineConfig) -> AdapterCache | None:
    """Make the registry of a decoder's adapters; None: there is no room for any."""
    if not config.max_adapters:
        return None
    sizes, original = (config.max_adapters, config.max_lora_rank, config.adapter_bytes), model.description.config
    assert isinstance(original, DecoderConfig)
    return AdapterCache(*sizes, model.description.family, original)


def _page_tier(plan: Plan, disk_kv: BlockFolder | None, layout: DeviceLayout, costs: Costs) -> PageTier | None:
    """Make what keeps the pages that the devices forget; None: nothing does."""
    shapes = layout.host_page, plan.decoder_buckets, costs
    host = HostPages(plan.host_pages, *shapes) if plan.host_pages else None
    disk = None if disk_kv is None else DiskPages(disk_kv, *shapes)
    if host is not None and disk is not None:
        return HostAndDisk(host, disk)
    return disk if host is None else host


def _state_pages(layout: DeviceLayout, plan: Plan) -> StatePages | None:
    """Make what turns recurrent states into pages of a tier; None: the model has no states."""
    if not layout.num_snapshots:
        return None
    return StatePages(layout.host_page, layout.host_states, plan.decoder_buckets)


def decoder_lanes(
    config: EngineConfig,
    plan: Plan,
    costs: PassCosts,
    *,
    platform: str,
    lanes: int = 1,
    adapters: AdapterCache | None = None,
    tier: PageTier | None = None,
    identity: Callable[[Hashable], bytes] | None = None,
    num_snapshots: int = 0,
    states: StatePages | None = None,
) -> list[DecoderScheduler]:
    """Make the schedulers of a decoder, one for each lane of its mesh.

    Args:
      config: the engine's sizes.
      plan: its pages and buckets.
      costs: the times of passes, by which they choose.
      platform: "cpu" or "gpu".
      lanes: how many lanes its mesh has.
      adapters: the adapters on the device; None: there is no room for any.
      tier: keeps the pages that the devices forget; None: nothing does.
      identity: hashes what a page depends on in addition to tokens; None if no tier keeps pages.
      num_snapshots: snapshots of recurrent states of each lane; 0: the model has no states, or no prefix cache.
      states: turns snapshots into pages of the tier; None: there are none, or there is no tier.
    """
    arrivals, has_tier = itertools.count(), tier is not None

    def lane() -> DecoderScheduler:
        pool, size = PagePool(plan.num_pages, config.page_size, identity), config.chunk_size
        snapshots = Snapshots(num_snapshots, pool, size, has_tier=has_tier) if num_snapshots else None
        return DecoderScheduler(
            config,
            plan.decoder_buckets,
            pool,
            adapters,
            costs=costs,
            restoring=None if tier is None else Restoring(pool, tier, costs, size, snapshots, states),
            snapshots=snapshots,
            step_seconds=step_seconds(platform),
            arrivals=arrivals,
        )

    return [lane() for _ in range(lanes)]


def scheduler_of(lanes: list[DecoderScheduler]) -> DecoderScheduler | LaneScheduler:
    """The scheduler of all lanes."""
    return LaneScheduler(lanes) if len(lanes) > 1 else lanes[0]


def restoring_of(lanes: list[DecoderScheduler]) -> list[Restoring]:
    """The parts of all lanes that move pages to a tier and back; none without a tier."""
    return [lane.allocator.restoring for lane in lanes if lane.allocator.restoring is not None]


def _page_identity(
    model: LoadedModel, config: EngineConfig, adapters: AdapterCache | None
) -> Callable[[Hashable], bytes]:
    """Make a function that hashes all that pages depend on in addition to tokens; it takes a root of their tree."""
    try:
        code = keys.code_key()
    except keys.NoKeyError:  # it has changed since the process started: other processes cannot know what runs here
        code = {"process": secrets.token_hex()}
    parts = {
        "code": code,
        "files": {name: file.sha256 for name, file in model.manifest.files.items()},
        "weights": str(model.weights),
        "config": str(model.config),
        "page_size": config.page_size,
        "kv_dtype": config.kv_dtype,
        "kernels": config.kernels,
        "mesh": None if model.mesh is None else dict(model.mesh.shape),
        "rules": str(model.rules),
    }
    assert isinstance(model.config, DecoderConfig)
    if model.config.state_layers:  # states lie at the ends of chunks, and have room for speculative tokens
        parts |= {"chunk_size": config.chunk_size, "num_speculative_tokens": config.num_speculative_tokens}
    engine = keys.digest(parts).encode()

    def identity(root: Any) -> bytes:
        adapter = root[-1]
        digest = b"" if adapter is None or adapters is None else adapters.digest(adapter)
        return hashlib.blake2b(engine + digest, digest_size=KEY_BYTES).digest()

    return identity


def _decoder_executor(
    model: LoadedModel,
    config: EngineConfig,
    plan: Plan,
    costs: PassCosts,
    processors: Mapping[str, LogitsProcessor],
    clock: Clock,
    *,
    asleep: bool,
) -> DecoderExecutor:
    """Make the executor of a decoder, whose layers are on the devices or are streamed to them."""
    layout = DeviceLayout.from_model(
        model,
        config,
        num_pages=plan.num_pages,
        slice_pages=plan.slice_pages,
        processors=tuple(processors.values()),
    )
    if plan.placement is None:
        programs = DevicePrograms(model, config, decoder_programs(layout.of_programs))
        if plan.way is Way.WHOLE:
            passes = WholeDecoderPasses(programs)
        else:
            passes = RingDecoderPasses(programs, layout.num_stages, layout.lanes)
    else:
        assert isinstance(model, StreamedModel)
        layers = LayerStream(model, plan.placement, costs.all)
        programs = DevicePrograms(model, config, chain_programs(layout.of_programs, layers.ranges))
        passes = ChainDecoderPasses(layers, programs, plan.pass_buckets, layout)
    state = DecoderState(layout, programs)
    if not asleep:
        state.restart()
    return DecoderExecutor(
        state=state,
        packer=Packer(layout, plan.pass_buckets, processors),
        passes=passes,
        programs=programs,
        clock=clock,
        costs=costs,
    )


def _encoder_executor(
    model: LoadedModel,
    config: EncoderEngineConfig,
    buckets: EncoderBuckets,
    plan: Plan,
    costs: Costs,
    clock: Clock,
) -> EncoderExecutor:
    """Make the executor of an encoder, whose layers are on the devices or are streamed to them."""
    if plan.placement is None:
        programs = DevicePrograms(model, config, [embed.spec(model, config.level)])
        passes = WholeEncoderPasses(model, programs)
    else:
        assert isinstance(model, StreamedModel)
        layers = LayerStream(model, plan.placement, costs)
        programs = DevicePrograms(model, config, encoder_specs(model, layers.ranges))
        passes = ChainEncoderPasses(model, layers, programs)
    return EncoderExecutor(config=config, buckets=buckets, passes=passes, programs=programs, clock=clock, costs=costs)


def check_processors(logits_processors: object) -> dict[str, LogitsProcessor]:
    """Return a copy of logits processors by name. Raises ValueError for anything else."""
    checked = check("logits_processors", logits_processors or {}, _Processors)
    for name, processor in checked.items():
        if not callable(processor):
            raise ValueError(f"logits_processors[{name!r}] must be a function, got {shown(processor)}.")
    return checked


class ModelOptions(EngineOptions, MemoryOptions, total=False):
    """Options of `LLM` and `Embedder`."""


class LoadOptions(ModelOptions, total=False):
    """All options of `LLM`, and so of `AsyncLLM`; an encoder takes those of `Embedder`."""

    mesh: AnyMesh
    dtype: str | None
    quantize: str | None
    rules: ShardingRules | None
    max_batch: int
    context: int | None
    cache_bytes: int | None
    adapters: Mapping[str, str | Path] | None
    logits_processors: Mapping[str, LogitsProcessor] | None


def split_options(
    options: ModelOptions, mesh: AnyMesh, *, owner: str, others: Iterable[str] = ()
) -> tuple[EngineOptions, MemoryConfig]:
    """Split options into the engine's and those of weight placement, which default to the mesh file's.

    Args:
      others: the owner's other options, which an error lists too.

    Raises TypeError for unknown options, ValueError for unknown ones in the file and for bad values.
    """
    known = ModelOptions.__annotations__
    if unknown := options.keys() - known.keys():
        raise unknown_options(owner, unknown, {*known, *others})
    memory = {name: value for name, value in options.items() if name in MemoryOptions.__annotations__}
    engine = {name: value for name, value in options.items() if name not in memory}
    if isinstance(mesh, MeshFile):
        if unknown := sorted(mesh.memory.keys() - MemoryOptions.__annotations__.keys()):
            known = ", ".join(MemoryOptions.__annotations__)
            raise ValueError(f"{mesh.source}: [memory]: unknown field {unknown[0]!r}; known: {known}.")
        written = dict(mesh.memory)
        for name in ("layer_files", "disk_kv"):
            if (folder := written.get(name)) and isinstance(folder, str):
                written[name] = Path(mesh.source).parent / folder
        if "weights" in memory:  # a file's fields for another choice are not this one's
            written = {
                name: value for name, value in written.items() if memory["weights"] in USED_WITH.get(name, WEIGHTS)
            }
        memory = written | memory
    return cast(EngineOptions, engine), MemoryConfig.from_options(cast(MemoryOptions, memory))


def place_model[Config: SharedConfig](
    opened: OpenedModel,
    config: Config,
    memory: MemoryConfig,
    *,
    costs: Costs,
    reservation: Reservation,
    cache_bytes: int | None = None,
    given: Collection[str] = (),
    asleep: bool = False,
) -> tuple[LoadedModel, Config, Placement | None]:
    """Load the model onto its devices or stream it to them.

    Returns it with the engine's sizes that it can run, and the place of each layer (None: all are on the devices).

    Args:
      costs: the times of earlier fetches.
      reservation: holds the memory of the weights from before they are read.
      given: the options that the user has set.
      asleep: whether no weight is read yet.

    Raises MemoryError if it does not fit, ValueError for options that a streamed model does not have.
    """
    _check_expert_load(opened, config)
    if asleep:
        if memory.weights != "device":
            raise ValueError(f"weights={memory.weights!r} is not implemented for a model that can sleep; leave it out.")
        return opened.without_weights(), config, None
    placement = plan_placement(opened, config, memory, cache_bytes=cache_bytes, costs=costs)
    if placement is None:
        if memory.kv_offload is not None:
            raise ValueError(
                f"kv_offload={memory.kv_offload} is for streamed layers, and weights='auto' keeps all on the devices, "
                "which have room for them: leave it out, or set weights to 'host' or 'disk'."
            )
        with _reserved(reservation, opened, None):
            return opened.load(), config, None
    for name, only in (("max_decode_passes", 1), ("level", 0), ("expert_load", False)):
        if name in given and (value := getattr(config, name, only)) != only:
            raise ValueError(
                f"{name}={value} needs all weights on the devices, and weights={memory.weights!r} streams them: "
                f"set {name}={only} or weights='device'."
            )
    with _reserved(reservation, opened, placement):
        model = stream_model(opened, placement, memory.layer_files)
    if isinstance(config, EngineConfig):  # the host drives each pass through the layers: a step is one pass
        config = dataclasses.replace(config, max_decode_passes=1)
    return model, config, placement


def _check_expert_load(model: OpenedModel, config: SharedConfig) -> None:
    """Raise ValueError for an engine that is to count what a model does not have."""
    if not isinstance(config, EngineConfig) or not config.expert_load:
        return
    if model.stages is not None:
        raise ValueError(
            f"LLM.expert_load=True is not implemented for a model in stages (pipeline={model.stages.count}): each "
            "device counts the experts of its own layers; leave it out, or use pipeline = 1."
        )
    decoder = model.config
    assert isinstance(decoder, DecoderConfig)
    numbers = {moe.router.experts for layer in decoder.moe_layers if (moe := decoder.layer(layer).mlp.moe)}
    if not numbers:
        raise ValueError(f"LLM.expert_load=True is for a mixture of experts, and {model.name} is dense; leave it out.")
    if len(numbers) > 1:
        numbers_text = ", ".join(map(str, sorted(numbers)))
        raise ValueError(
            f"LLM.expert_load=True needs layers with the same number of experts, and {model.name} has layers of "
            f"{numbers_text}; leave it out."
        )


@contextlib.contextmanager
def _reserved(reservation: Reservation, opened: OpenedModel, placement: Placement | None) -> Iterator[None]:
    """Reserve the memory of weights, and of reading them meanwhile. Raises BudgetError if it does not fit."""
    devices, each = devices_of(opened.mesh), weight_tenants(opened, placement)
    host = host_tenants(opened, placement)
    reading = {"files being read": min(opened.manifest.bytes, GROUP_BYTES)} if placement is None else {}
    remedy = f"{opened.remedy}; or close another model"
    reservation.resize(sizes_of(devices, each | reading, host=host), unused=True, remedy=remedy)
    yield
    reservation.resize(sizes_of(devices, each, host=host))


def engine_costs(
    model: OpenedModel, options: Mapping[str, object], *, kernels: bool, logits_processors: Iterable[str] = ()
) -> Costs:
    """Open the record of the programs of a model's engine.

    Its key leaves out what only decides which programs there are, or the size of arrays that a step reads in part (the
    number of pages depends on free memory): a restart should find what the process before it learnt.

    options: those of the engine's sizes that decide costs.
    """
    library = cpu_library() if kernels else None
    options = {**options, "cpu_kernels": library and library.level}
    return open_costs(
        devices_of(model.mesh)[0],
        mesh=model.mesh_text,
        config=model.description.config,
        weights=f"{model.weights.quantized or ''} {model.weights.dtype}".strip(),
        options=", ".join(f"{name}={value}" for name, value in options.items()),
        logits_processors=", ".join(logits_processors),
    )
