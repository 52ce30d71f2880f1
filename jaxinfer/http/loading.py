"""The models that a config describes, and how they are loaded when a server starts."""

import functools
import logging
from typing import TYPE_CHECKING

import jax
from rich.filesize import decimal

from jaxinfer.checkpoints.layouts import is_complete
from jaxinfer.generation.api.async_llm import AsyncLLM
from jaxinfer.http.config import ModelConfig, ServerConfig, naming_table
from jaxinfer.http.served_model import ServedModel
from jaxinfer.http.served_models import ServedModels
from jaxinfer.hub import HubName
from jaxinfer.models.files.loading import OpenedModel, open_model
from jaxinfer.serving import NotLoadedError
from jaxinfer.serving.budget import budget_of
from jaxinfer.streaming.layer_folders import layer_folder

if TYPE_CHECKING:
    from jaxinfer.http.kv_events import KVEvents

log = logging.getLogger(__name__)


def served_models(config: ServerConfig, events: "KVEvents | None" = None) -> ServedModels:
    """The models of a config, none of which is loaded yet.

    events: gets what their prefix caches have; None: nobody does.
    """
    served = [_served(config, name, model, events) for name, model in config.models.items()]
    return ServedModels(served, preempt_after=config.preempt_after)


def _served(config: ServerConfig, name: str, model: ModelConfig, events: "KVEvents | None") -> ServedModel:
    return ServedModel(
        name,
        functools.partial(_load, config.source, name, model, events),
        model.adapter_folders,
        adapters=model.options.get("adapters") or (),
        tool_call_parser=model.tool_call_parser,
        reasoning_parser=model.reasoning_parser,
        on_demand=model.on_demand,
        pinned=model.pinned,
        ttl=model.ttl,
    )


def load_models(config: ServerConfig, models: ServedModels) -> None:
    """Check all models, and load those that are not loaded on demand.

    One that cannot be loaded harms no other. Raises its error if there is no other; ValueError for a model that is
    larger than `device_memory`, and for two with the same files and other options.
    """
    if config.device_memory is not None:
        for device in jax.local_devices():
            budget_of(device).limit(config.device_memory)
    _check_files(config, models)
    errors = []
    for model in models.distinct:
        if model.on_demand:
            continue
        try:
            model.load()
        except (ValueError, OSError, MemoryError, NotLoadedError) as error:
            errors.append(error)
            if len(errors) == len(models.distinct):
                raise
            log.error("%s is not served: %s", model.name, error)
        else:
            models.residency.watch(model)


def _check_files(config: ServerConfig, models: ServedModels) -> None:
    """Have models with the same files share one, and refuse those that are too large. Raises ValueError."""
    known: dict[str, str] = {}
    for model in models:
        given = config.models[model.name]
        where = f"{config.source}: models.{model.name}" if config.source else model.name
        if (opened := _opened(given)) is None:
            continue
        size = opened.bytes_per_device()
        if config.device_memory is not None and size > config.device_memory:
            raise ValueError(
                f"{where}: its weights take {decimal(size)} of each device, and device_memory is "
                f"{decimal(config.device_memory)}: raise it, use quantize='int4', or remove the model."
            )
        other = known.setdefault(layer_folder(opened, parts=1).name, model.name)
        if other != model.name:
            if config.models[other].options != given.options:
                raise ValueError(
                    f"{where}: has the files of {other!r}, which would be loaded twice: give both the same options, or "
                    "remove one."
                )
            models.share(model, other)


def _opened(model: ModelConfig) -> OpenedModel | None:
    """Open a model's files; None for those that are converted first, and those whose error loading them raises."""
    if isinstance(model.path, HubName) or not is_complete(model.path):
        return None
    options = {key: model.options[key] for key in ("mesh", "dtype", "quantize") if key in model.options}
    try:
        return open_model(model.path, **options)
    except (ValueError, OSError):
        return None


def _load(source: str | None, name: str, model: ModelConfig, events: "KVEvents | None", asleep: bool) -> AsyncLLM:
    """Load a model; an error names its table in the file, and options as they are written there."""
    with naming_table(source, f"models.{name}"):
        llm = AsyncLLM(**model.load_options, asleep=asleep and not model.streams_weights)
    if model.chat_template is not None and llm.tokenizer is not None:
        llm.tokenizer.chat_templates.use(model.chat_template)
    if events is not None:
        events.watch(llm)
    return llm
