"""Reads the TOML file of a server. Its tables have the options of what is served, by the same names."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, TypedDict, get_type_hints

from msgspec import Meta

from jaxinfer.checkpoints.paths import gguf_name, part_names
from jaxinfer.checkpoints.single_file import SINGLE_FILE
from jaxinfer.elastic.options import ServiceOptions
from jaxinfer.fields import check
from jaxinfer.generation.engine.config import EngineOptions
from jaxinfer.http.config import (
    ElasticConfig,
    ExpertsConfig,
    KVEventsConfig,
    ModelConfig,
    ServerConfig,
    as_written,
)
from jaxinfer.http.limits import Limits
from jaxinfer.hub import model_in_file
from jaxinfer.sharding import MeshConfig
from jaxinfer.streaming.config import parse_bytes
from jaxinfer.toml_files import check_table, reading_toml

_Memory = Annotated[int | str, Meta(description='bytes, or a size such as "12GiB"')]
_Table = Annotated[dict[str, Any], Meta(description="a table")]


class ServerFile(TypedDict, total=False):
    """The file. Its fields are those of `ServerConfig` and `Limits`, but for the keys, which no file has."""

    models: _Table
    model_folder: str
    device_memory: _Memory
    preempt_after: float
    experts: _Table
    elastic: _Table
    host: str
    port: int
    access_log: str
    drain_timeout: float
    otlp_endpoint: str
    keep_billing_header: bool
    kv_events: _Table
    cors_origins: list[str]
    timeout: float
    max_body_bytes: int
    max_inputs: int
    max_image_pixels: int


class ModelTable(EngineOptions, total=False):
    """A model's table: the options of `AsyncLLM`, by the same names."""

    path: str
    adapter_folders: list[str]
    adapters: Annotated[dict[str, str], Meta(description="a table of folders by the adapters' names")]
    cache_bytes: int
    chat_template: str
    compile_ahead: bool
    context: int
    device_memory: _Memory
    disk_kv: str
    disk_kv_limit: _Memory
    dtype: str
    host_kv: _Memory
    host_memory: _Memory
    kv_offload: _Memory
    layer_files: str
    max_batch: int
    max_queue_time: float
    max_requests: int
    max_waiting: int
    mesh: _Table
    on_demand: bool
    pinned: bool
    prefetch: int
    quantize: str
    reasoning_parser: str
    tool_call_parser: str
    trust_request_chat_template: bool
    ttl: float
    weights: str


class ExpertsTable(TypedDict, total=False):
    """The table of a system of experts."""

    config: str
    mode: str
    image_folders: list[str]


class ElasticTable(TypedDict, total=False):
    """The table of an elastic service: the options of `Service` that are no functions, by the same names."""

    path: str
    repository: str
    image_folders: list[str]
    dataset_folders: list[str]
    merge_levels: list[int]
    prompt_mode: str
    schedule: str
    max_batch: int
    max_tasks: int
    max_classes: int
    max_waiting: int
    device_memory: _Memory
    kernels: bool


def read_config(
    path: str | os.PathLike[str], *, api_keys: tuple[str, ...] = (), admin_keys: tuple[str, ...] = ()
) -> ServerConfig:
    """Read a server's file; its paths are relative to its folder.

    Args:
      path: the TOML file.
      api_keys: as in `Limits`; a file has none.
      admin_keys: as in `Limits`; a file has none.

    Raises ValueError, naming the file and the field.
    """
    with reading_toml(path, "a server") as content:
        try:
            return _config(content, Path(path), api_keys, admin_keys)
        except ValueError as error:
            raise ValueError(as_written(error)) from error


def _config(content: Any, path: Path, api_keys: tuple[str, ...], admin_keys: tuple[str, ...]) -> ServerConfig:
    check_table("the file", content, ServerFile.__annotations__)
    given, folder = _checked("", content, ServerFile), path.parent
    models = _models_in(folder / given.pop("model_folder")) if "model_folder" in given else {}
    models |= {name: _model(f"models.{name}", table, folder) for name, table in given.pop("models", {}).items()}
    experts = {name: _experts(f"experts.{name}", table, folder) for name, table in given.pop("experts", {}).items()}
    elastic = {name: _elastic(f"elastic.{name}", table, folder) for name, table in given.pop("elastic", {}).items()}
    if "device_memory" in given:
        given["device_memory"] = parse_bytes("device_memory", given["device_memory"])
    if given.get("access_log", "-") != "-":
        given["access_log"] = str(folder / given["access_log"])
    if "kv_events" in given:
        given["kv_events"] = KVEventsConfig(**_table("kv_events", given["kv_events"], KVEventsConfig))
    of_clients = {name: given.pop(name) for name in Limits.__annotations__ if name in given}
    limits = Limits(api_keys=api_keys, admin_keys=admin_keys, **of_clients)
    return ServerConfig(models=models, experts=experts, elastic=elastic, limits=limits, source=str(path), **given)


def _table(where: str, table: object, kind: type, *, required: str | None = None) -> dict[str, Any]:
    """Check a table: its fields, and their types. Raises ValueError, naming both.

    Args:
      where: the table's name.
      kind: the class with the types of its fields.
      required: the field that it must have.
    """
    fields = check(where, table, _Table)
    check_table(where, fields, get_type_hints(kind))
    if required is not None and required not in fields:
        raise ValueError(f"{where}: {required} is missing.")
    return _checked(f"{where}.", fields, kind)


def _checked(prefix: str, fields: dict[str, Any], kind: type) -> dict[str, Any]:
    types = get_type_hints(kind, include_extras=True)
    return {name: check(prefix + name, value, types[name]) for name, value in fields.items()}


def _model(where: str, table: object, folder: Path) -> ModelConfig:
    """Make a model's config of its table, with its paths from the file's folder."""
    options = _table(where, table, ModelTable, required="path")
    path = model_in_file(f"{where}.path", options.pop("path"), folder)
    if "adapters" in options:
        options["adapters"] = {adapter: folder / place for adapter, place in options["adapters"].items()}
    for option in {"layer_files", "disk_kv"} & options.keys():
        options[option] = folder / options[option]
    if "mesh" in options:
        options["mesh"] = MeshConfig.from_mapping(options["mesh"], source=f"{where}.mesh")
    folders = _folders(options.pop("adapter_folders", ()), folder)
    others = ("tool_call_parser", "reasoning_parser", "on_demand", "pinned", "ttl")
    given = {option: options.pop(option) for option in others if option in options}
    if "chat_template" in options:
        given["chat_template"] = _text(f"{where}.chat_template", folder / options.pop("chat_template"))
    try:
        return ModelConfig(path=path, options=options, adapter_folders=folders, **given)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _text(where: str, file: Path) -> str:
    """The text of a file. Raises ValueError."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ValueError(f"{where} {file}: {why}; name a Jinja file.") from error


def _models_in(folder: Path) -> dict[str, ModelConfig]:
    """The models in a folder, by the names of their directories and GGUF files; they are loaded on demand.

    Raises ValueError for a directory that is no model.
    """
    if not folder.is_dir():
        raise ValueError(f"model_folder {folder}: no such directory.")
    models = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or (path.is_file() and path.suffix != ".gguf"):
            continue
        if path.is_file() and part_names(path.name)[0] != path.name:
            continue  # the first part stands for all
        if path.is_dir() and not any((path / name).is_file() for name in ("config.json", SINGLE_FILE)):
            raise ValueError(f"model_folder {folder}: {path.name} is no model directory; move it elsewhere.")
        models[gguf_name(path.name) if path.is_file() else path.name] = ModelConfig(path=path, on_demand=True)
    return models


def _experts(where: str, table: object, folder: Path) -> ExpertsConfig:
    """Make a system's config of its table, with its paths from the file's folder."""
    given = _table(where, table, ExpertsTable, required="config")
    images = _folders(given.get("image_folders", ()), folder)
    return ExpertsConfig(config=folder / given["config"], mode=given.get("mode"), image_folders=images)


def _elastic(where: str, table: object, folder: Path) -> ElasticConfig:
    """Make a service's config of its table, with its paths from the file's folder."""
    options = _table(where, table, ElasticTable, required="path")
    repository = options.pop("repository", None)
    return ElasticConfig(
        path=model_in_file(f"{where}.path", options.pop("path"), folder),
        repository=None if repository is None else folder / repository,
        image_folders=_folders(options.pop("image_folders", ()), folder),
        dataset_folders=_folders(options.pop("dataset_folders", ()), folder),
        options=ServiceOptions(**options),
    )


def _folders(places: Iterable[str], folder: Path) -> tuple[Path, ...]:
    """The folders that a table names."""
    return tuple(folder / place for place in places)
