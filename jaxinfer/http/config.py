"""The config of a server: its address, its limits, and what it serves with its options."""

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from jaxinfer.elastic.options import ServiceOptions
from jaxinfer.fields import AtLeast1, NotNegative, Positive, Size, check_fields, shown
from jaxinfer.http.limits import Limits
from jaxinfer.hub import HubName
from jaxinfer.sharding import MeshFile
from jaxinfer.text.parsing.families import check_parsers

MAX_ADAPTERS = 8
"""`max_adapters` of a model that loads adapters later, unless its options say another."""

MAX_QUEUE_TIME = 30.0
"""`max_queue_time` of a model, unless its options say another."""

IdleSeconds = Annotated[
    float, Meta(gt=0, le=1e9, description="a number of seconds > 0, at most 1e9")  # threads can wait so long
]
Port = Annotated[int, Meta(ge=1, le=65535, description="an integer in [1, 65535]")]


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
    ttl: IdleSeconds | None = None

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
        raise ValueError(f"{source}: {table}: {as_written(error)}") from error


def as_written(error: Exception) -> str:
    """The message of an error, with options as a file has them: without the names of our classes."""
    return re.sub(r"\b[A-Z]\w*\.(?=[a-z]\w*)", "", str(error))
