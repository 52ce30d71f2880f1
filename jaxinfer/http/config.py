"""The config of a server: its address, its limits, and what it serves with its options; read from a TOML file."""

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Required, Self, TypedDict

import msgspec
from msgspec import Meta

from jaxinfer.checkpoints.single_file import SINGLE_FILE
from jaxinfer.elastic.options import ServiceOptions
from jaxinfer.fields import AtLeast1, NotNegative, Positive, Size, check_fields, shown
from jaxinfer.generation.engine.config import EngineOptions
from jaxinfer.http.limits import Limits
from jaxinfer.hub import HubName, model_in_file
from jaxinfer.sharding import MeshConfig, MeshFile
from jaxinfer.streaming.config import parse_bytes
from jaxinfer.text.parsing.families import check_parsers
from jaxinfer.toml_files import check_table, reading_toml

MAX_ADAPTERS = 8
"""`max_adapters` of a model that loads adapters later, unless its options say another."""

MAX_QUEUE_TIME = 30.0
"""`max_queue_time` of a model, unless its options say another."""

Port = Annotated[int, Meta(ge=1, le=65535, description="an integer in [1, 65535]")]


class ModelTable(EngineOptions, total=False):
    """A model's table in a file: the options of `AsyncLLM`, by the same names."""

    path: Required[str]
    adapter_folders: list[str]
    adapters: dict[str, str]
    cache_bytes: int
    chat_template: str
    compile_ahead: bool
    context: int
    device_memory: int | str
    dtype: str
    host_memory: int | str
    layer_files: str
    max_batch: int
    max_queue_time: float
    max_requests: int
    max_waiting: int
    mesh: dict[str, Any]
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
    """The table of a system of experts in a file."""

    config: Required[str]
    mode: str
    image_folders: list[str]


class ElasticTable(TypedDict, total=False):
    """The table of an elastic service in a file: the options of `Service` that are no functions, by the same names."""

    path: Required[str]
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
    device_memory: int | str
    kernels: bool


_TABLES = {"models": ModelTable, "experts": ExpertsTable, "elastic": ElasticTable}
"""The tables of a file, each of many."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model to serve.

    Attributes:
      path: a model directory, or what stands for one, as in `AsyncLLM`.
      options: options of `AsyncLLM`.
      adapter_folders: the folders from which clients may load LoRA adapters; none: they may load none.
      chat_template: the text of its chat template; None: its own.
      tool_call_parser: how the model writes calls, one of TOOL_CALL_PARSERS; None: as its chat template has it.
      reasoning_parser: how it writes reasoning, one of REASONING_PARSERS; None: as its chat template has it.
      on_demand: whether the first request loads it; otherwise it is loaded at the start.
      pinned: whether it never makes room for another.
      ttl: seconds without a request after which it is unloaded; None: never.
    """

    path: Path | HubName
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    adapter_folders: tuple[Path, ...] = ()
    chat_template: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    on_demand: bool = False
    pinned: bool = False
    ttl: Positive | None = None

    def __post_init__(self) -> None:
        check_fields(self, "on_demand", "pinned", "ttl")
        if self.on_demand and (weights := self.options.get("weights", "device")) != "device":
            raise ValueError(f"on_demand is not implemented with weights={weights!r}: leave one of them out.")
        check_parsers(self.tool_call_parser, self.reasoning_parser)
        check_folders("adapter folder", self.adapter_folders)

    @property
    def streams_weights(self) -> bool:
        """Whether its weights may be streamed, by its options or those of its mesh's file. Then it cannot sleep."""
        mesh = self.options.get("mesh")
        written = mesh.memory if isinstance(mesh, MeshFile) else {}
        return self.options.get("weights", written.get("weights", "device")) != "device"

    @property
    def load_options(self) -> dict[str, Any]:
        """All options of `AsyncLLM`, with those that a server has by default."""
        room = {"max_adapters": MAX_ADAPTERS, "max_lora_rank": 16} if self.adapter_folders else {}
        return {"path": str(self.path), "max_waiting": 0, "max_queue_time": MAX_QUEUE_TIME, **room, **self.options}


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVEventsConfig:
    """How a server publishes which blocks of tokens its prefix cache has; see `jaxinfer.http.kv_events`.

    Attributes:
      endpoint: the ZeroMQ address of events. One with `*`, or of `ipc://`, is listened on; any other is connected to.
      replay_endpoint: the address at which subscribers ask for batches that they missed; None: they cannot.
      buffer_steps: how many batches it keeps for them.
      topic: the first frame of each message; None: kv@ADDRESS@MODEL, where ADDRESS is the environment variable POD_IP,
        or else the server's host, and its port.
      format: "array" writes an event as an array, which every consumer reads; "map" as a map, as vLLM does since 0.24.
    """

    endpoint: str = "tcp://*:5556"
    replay_endpoint: str | None = None
    buffer_steps: Size = 10_000
    topic: str | None = None
    format: str = "array"

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("endpoint", "replay_endpoint"):
            if (address := getattr(self, name)) is not None and not address.startswith(("tcp://", "ipc://")):
                raise ValueError(f"kv_events.{name} must begin with tcp:// or ipc://, got {shown(address)}.")
        if self.format not in ("array", "map"):
            raise ValueError(f'kv_events.format must be "array" or "map", got {shown(self.format)}.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A system of experts to serve.

    Attributes:
      config: the system's own file.
      mode: a policy that replaces the file's.
      image_folders: the folders with images that clients may name; none: they may name none.
    """

    config: Path
    mode: str | None = None
    image_folders: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        check_folders("image folder", self.image_folders)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElasticConfig:
    """An elastic service to serve.

    Attributes:
      path: a model directory of a vision transformer, or what stands for one, as in `Service.from_checkpoint`.
      repository: the folder of tasks; None: `tasks` in the folder `path`.
      image_folders: the folders with images that clients may name; none: they may name none.
      dataset_folders: the folders with data sets from which clients may register tasks; none: they may register none.
      options: options of `Service`.
    """

    path: Path | HubName
    repository: Path | None = None
    image_folders: tuple[Path, ...] = ()
    dataset_folders: tuple[Path, ...] = ()
    options: ServiceOptions = dataclasses.field(default_factory=ServiceOptions)

    def __post_init__(self) -> None:
        check_folders("image folder", self.image_folders)
        check_folders("data set folder", self.dataset_folders)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The config of a server.

    Attributes:
      models: the models, by the names by which clients ask for them.
      device_memory: bytes of each device that all models together may have; None: all that are free.
      preempt_after: seconds that a request waits for its model until running requests of another are interrupted.
      experts: the systems of experts, by their names.
      elastic: the elastic services, by their names.
      host: the address to listen on.
      port: the port to listen on.
      access_log: the file that gets a line of JSON for each request; "-": stderr; None: none.
      drain_timeout: seconds that running requests have to end after a signal.
      otlp_endpoint: the URL of an OpenTelemetry collector that gets traces; None: none.
      keep_billing_header: whether the system prompts of `/v1/messages` keep the line that coding agents change with
        each request. It defeats the prefix cache.
      kv_events: how it publishes what its prefix cache has; None: it does not.
      limits: limits of clients.
      source: the file that describes it; None: the command line.
    """

    models: Mapping[str, ModelConfig]
    device_memory: AtLeast1 | None = None
    preempt_after: Positive = 10.0
    experts: Mapping[str, ExpertsConfig] = dataclasses.field(default_factory=dict)
    elastic: Mapping[str, ElasticConfig] = dataclasses.field(default_factory=dict)
    host: str = "127.0.0.1"
    port: Port = 8000
    access_log: str | None = None
    drain_timeout: NotNegative = 20.0
    otlp_endpoint: str | None = None
    keep_billing_header: bool = False
    kv_events: KVEventsConfig | None = None
    limits: Limits = dataclasses.field(default_factory=Limits)
    source: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, "device_memory", "preempt_after", "host", "port", "access_log", "drain_timeout")
        check_fields(self, "otlp_endpoint", "keep_billing_header")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ValueError(f"otlp_endpoint must be an http URL, got {shown(self.otlp_endpoint)}.")
        if not self.names:
            raise ValueError("models: there are none; a server needs at least one, or a table in experts or elastic.")
        if self.kv_events is not None and len(self.models) != 1:  # a subscriber knows servers, and clears them as one
            raise ValueError(f"kv_events is for a server of one model, and there are {len(self.models)}: leave it out.")
        adapters = [name for model in self.models.values() for name in model.options.get("adapters") or ()]
        check_names([*self.names, *adapters])

    @property
    def names(self) -> list[str]:
        """The names of all that it serves."""
        return [*self.models, *self.experts, *self.elastic]

    @classmethod
    def read(
        cls, path: str | os.PathLike[str], *, api_keys: tuple[str, ...] = (), admin_keys: tuple[str, ...] = ()
    ) -> Self:
        """Read a TOML file; its paths are relative to its folder.

        Args:
          api_keys: as in `Limits`; a file has none.
          admin_keys: as in `Limits`; a file has none.

        Raises ValueError, naming the file.
        """
        with reading_toml(path, "a server") as content:
            check_table("the file", content, _ServerFile.__struct_fields__)
            for what, kind in _TABLES.items():
                tables = content.get(what)
                for name, table in tables.items() if isinstance(tables, dict) else ():
                    check_table(f"{what}.{name}", table, kind.__annotations__)
            if "kv_events" in content:
                fields = [field.name for field in dataclasses.fields(KVEventsConfig)]
                check_table("kv_events", content["kv_events"], fields)
            file = msgspec.convert(content, _ServerFile)
            folder = Path(path).parent
            in_folder = {} if file.model_folder is None else _models_in(folder / file.model_folder)
            named = {name: _model(name, table, folder) for name, table in file.models.items()}
            config = cls(
                models=in_folder | named,
                device_memory=_bytes("device_memory", file.device_memory),
                preempt_after=file.preempt_after,
                experts={name: _experts(table, folder) for name, table in file.experts.items()},
                elastic={name: _elastic(name, table, folder) for name, table in file.elastic.items()},
                host=file.host,
                port=file.port,
                access_log=file.access_log if file.access_log in (None, "-") else str(folder / file.access_log),
                drain_timeout=file.drain_timeout,
                otlp_endpoint=file.otlp_endpoint,
                keep_billing_header=file.keep_billing_header,
                kv_events=file.kv_events,
                limits=Limits(
                    api_keys=api_keys,
                    admin_keys=admin_keys,
                    cors_origins=tuple(file.cors_origins),
                    timeout=file.timeout,
                    max_body_bytes=file.max_body_bytes,
                    max_inputs=file.max_inputs,
                    max_image_pixels=file.max_image_pixels,
                ),
                source=str(path),
            )
        return config


class _ServerFile(msgspec.Struct, kw_only=True):
    models: dict[str, ModelTable] = {}
    model_folder: str | None = None
    device_memory: int | str | None = None
    preempt_after: float = ServerConfig.preempt_after
    experts: dict[str, ExpertsTable] = {}
    elastic: dict[str, ElasticTable] = {}
    host: str = ServerConfig.host
    port: int = ServerConfig.port
    access_log: str | None = ServerConfig.access_log
    drain_timeout: float = ServerConfig.drain_timeout
    otlp_endpoint: str | None = ServerConfig.otlp_endpoint
    keep_billing_header: bool = ServerConfig.keep_billing_header
    kv_events: KVEventsConfig | None = ServerConfig.kv_events
    cors_origins: list[str] = []
    timeout: float | None = Limits.timeout
    max_body_bytes: int = Limits.max_body_bytes
    max_inputs: int = Limits.max_inputs
    max_image_pixels: int = Limits.max_image_pixels


def _model(name: str, table: ModelTable, folder: Path) -> ModelConfig:
    """Make a model's config of its table, with its paths from the file's folder."""
    options: dict[str, Any] = dict(table)
    path = model_in_file(f"models.{name}.path", options.pop("path"), folder)
    if "adapters" in options:
        options["adapters"] = {adapter: folder / place for adapter, place in options["adapters"].items()}
    if "layer_files" in options:
        options["layer_files"] = folder / options["layer_files"]
    if "mesh" in options:
        options["mesh"] = MeshConfig.from_mapping(options["mesh"], source=f"models.{name}.mesh")
    folders = _folders(options.pop("adapter_folders", ()), folder)
    others = ("tool_call_parser", "reasoning_parser", "on_demand", "pinned", "ttl")
    given = {option: options.pop(option) for option in others if option in options}
    if "chat_template" in options:
        given["chat_template"] = _text(folder / options.pop("chat_template"))
    return ModelConfig(path=path, options=options, adapter_folders=folders, **given)


def _text(file: Path) -> str:
    """The text of a chat template's file. Raises ValueError."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"chat_template {file}: {error.strerror}; name a Jinja file.") from error


def _bytes(name: str, value: int | str | None) -> int | None:
    return None if value is None else parse_bytes(name, value)


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
        if path.is_dir() and not any((path / name).is_file() for name in ("config.json", SINGLE_FILE)):
            raise ValueError(f"model_folder {folder}: {path.name} is no model directory; move it elsewhere.")
        models[path.stem if path.is_file() else path.name] = ModelConfig(path=path, on_demand=True)
    return models


def _experts(table: ExpertsTable, folder: Path) -> ExpertsConfig:
    """Make a system's config of its table, with its paths from the file's folder."""
    images = _folders(table.get("image_folders", []), folder)
    return ExpertsConfig(config=folder / table["config"], mode=table.get("mode"), image_folders=images)


def _elastic(name: str, table: ElasticTable, folder: Path) -> ElasticConfig:
    """Make a service's config of its table, with its paths from the file's folder."""
    options: dict[str, Any] = dict(table)
    repository = options.pop("repository", None)
    return ElasticConfig(
        path=model_in_file(f"elastic.{name}.path", options.pop("path"), folder),
        repository=None if repository is None else folder / repository,
        image_folders=_folders(options.pop("image_folders", []), folder),
        dataset_folders=_folders(options.pop("dataset_folders", []), folder),
        options=ServiceOptions(**options),
    )


def _folders(places: Iterable[str], folder: Path) -> tuple[Path, ...]:
    """The folders that a table names."""
    return tuple(folder / place for place in places)


def check_folders(what: str, folders: Iterable[Path]) -> None:
    """Raise ValueError for a folder that does not exist."""
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{what} {folder}: no such directory.")


def check_names(names: Iterable[str]) -> None:
    """Raise ValueError unless the names of models and adapters are distinct, and each can be shown."""
    seen = set[str]()
    for name in names:
        if not name or not name.isprintable():
            raise ValueError(f"the name of a model must be printable characters, at least one; got {shown(name)}.")
        if name in seen:
            raise ValueError(f"two models or adapters have the name {name!r}: give each its own.")
        seen.add(name)


@contextlib.contextmanager
def naming_table(source: str | None, table: str) -> Iterator[None]:
    """Let errors name the file and its table, and options as they are written there; source None: no file."""
    try:
        yield
    except (ValueError, OSError, MemoryError) as error:
        if source is None:
            raise
        message = re.sub(r"\b[A-Z]\w*\.(?=[a-z]\w*)", "", str(error))
        raise ValueError(f"{source}: {table}: {message}") from error
