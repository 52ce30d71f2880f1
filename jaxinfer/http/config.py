"""The config of a server: its address, its limits, and its models with their options; read from a TOML file."""

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Required, Self

import msgspec
from msgspec import Meta

from jaxinfer.fields import NotNegative, check_fields, shown
from jaxinfer.generation.engine.config import EngineOptions
from jaxinfer.http.limits import Limits
from jaxinfer.hub import HubName, model_in_file
from jaxinfer.sharding import MeshConfig
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
    prefetch: int
    quantize: str
    reasoning_parser: str
    tool_call_parser: str
    trust_request_chat_template: bool
    weights: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model to serve.

    Attributes:
      path: a model directory, or what stands for one, as in `AsyncLLM`.
      options: options of `AsyncLLM`.
      adapter_folders: the folders from which clients may load LoRA adapters; none: they may load none.
      tool_call_parser: how the model writes calls, one of TOOL_CALL_PARSERS; None: as its chat template has it.
      reasoning_parser: how it writes reasoning, one of REASONING_PARSERS; None: as its chat template has it.
    """

    path: Path | HubName
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    adapter_folders: tuple[Path, ...] = ()
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None

    def __post_init__(self) -> None:
        check_parsers(self.tool_call_parser, self.reasoning_parser)
        for folder in self.adapter_folders:
            if not folder.is_dir():
                raise ValueError(f"adapter folder {folder}: no such directory.")

    @property
    def load_options(self) -> dict[str, Any]:
        """All options of `AsyncLLM`, with those that a server has by default."""
        room = {"max_adapters": MAX_ADAPTERS, "max_lora_rank": 16} if self.adapter_folders else {}
        return {"path": str(self.path), "max_waiting": 0, "max_queue_time": MAX_QUEUE_TIME, **room, **self.options}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The config of a server.

    Attributes:
      models: the models, by the names by which clients ask for them.
      host: the address to listen on.
      port: the port to listen on.
      access_log: the file that gets a line of JSON for each request; "-": stderr; None: none.
      drain_timeout: seconds that running requests have to end after a signal.
      otlp_endpoint: the URL of an OpenTelemetry collector that gets traces; None: none.
      keep_billing_header: whether the system prompts of `/v1/messages` keep the line that coding agents change with
        each request. It defeats the prefix cache.
      limits: limits of clients.
      source: the file that describes it; None: the command line.
    """

    models: Mapping[str, ModelConfig]
    host: str = "127.0.0.1"
    port: Port = 8000
    access_log: str | None = None
    drain_timeout: NotNegative = 20.0
    otlp_endpoint: str | None = None
    keep_billing_header: bool = False
    limits: Limits = dataclasses.field(default_factory=Limits)
    source: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, "host", "port", "access_log", "drain_timeout", "otlp_endpoint", "keep_billing_header")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ValueError(f"otlp_endpoint must be an http URL, got {shown(self.otlp_endpoint)}.")
        if not self.models:
            raise ValueError("models: there are none; a server needs at least one.")
        check_names(
            name
            for model_name, model in self.models.items()
            for name in (model_name, *(model.options.get("adapters") or ()))
        )

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
            models = content.get("models")
            for name, table in models.items() if isinstance(models, dict) else ():
                check_table(f"models.{name}", table, ModelTable.__annotations__)
            file = msgspec.convert(content, _ServerFile)
            folder = Path(path).parent
            config = cls(
                models={name: _model(name, table, folder) for name, table in file.models.items()},
                host=file.host,
                port=file.port,
                access_log=file.access_log if file.access_log in (None, "-") else str(folder / file.access_log),
                drain_timeout=file.drain_timeout,
                otlp_endpoint=file.otlp_endpoint,
                keep_billing_header=file.keep_billing_header,
                limits=Limits(
                    api_keys=api_keys,
                    admin_keys=admin_keys,
                    cors_origins=tuple(file.cors_origins),
                    timeout=file.timeout,
                    max_body_bytes=file.max_body_bytes,
                ),
                source=str(path),
            )
        return config


class _ServerFile(msgspec.Struct, kw_only=True):
    models: dict[str, ModelTable]
    host: str = ServerConfig.host
    port: int = ServerConfig.port
    access_log: str | None = ServerConfig.access_log
    drain_timeout: float = ServerConfig.drain_timeout
    otlp_endpoint: str | None = ServerConfig.otlp_endpoint
    keep_billing_header: bool = ServerConfig.keep_billing_header
    cors_origins: list[str] = []
    timeout: float | None = Limits.timeout
    max_body_bytes: int = Limits.max_body_bytes


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
    folders = tuple(folder / place for place in options.pop("adapter_folders", ()))
    parsers = {option: options.pop(option, None) for option in ("tool_call_parser", "reasoning_parser")}
    return ModelConfig(path=path, options=options, adapter_folders=folders, **parsers)


def check_names(names: Iterable[str]) -> None:
    """Raise ValueError unless the names of models and adapters are distinct, and each can be shown."""
    seen = set[str]()
    for name in names:
        if not name or not name.isprintable():
            raise ValueError(f"the name of a model must be printable characters, at least one; got {shown(name)}.")
        if name in seen:
            raise ValueError(f"two models or adapters have the name {name!r}: give each its own.")
        seen.add(name)
