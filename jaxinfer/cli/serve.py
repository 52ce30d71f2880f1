"""`jaxinfer serve`: an OpenAI-compatible server of language models."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from jaxinfer.cli.common import (
    MODEL_HELP,
    ContextOption,
    DeviceMemoryOption,
    DiskKVLimitOption,
    DiskKVOption,
    DtypeOption,
    HostKVOption,
    HostMemoryOption,
    KernelsOption,
    KVDtypeOption,
    KVOffloadOption,
    LayerFilesOption,
    MeshOption,
    PrefetchOption,
    QuantizeOption,
    SpeculationOption,
    WeightsOption,
    model_options,
    note,
    refuse_ignored,
)
from jaxinfer.extras import require_extra

if TYPE_CHECKING:
    import socket

    from jaxinfer.http.config import ServerConfig

MODEL_OPTIONS = (
    "max_batch",
    "max_requests",
    "max_waiting",
    "max_queue_time",
    "compile_ahead",
    "trust_request_chat_template",
)
"""Options of `AsyncLLM` that are those of the command, too."""

SERVED_HELP = f"{MODEL_HELP} Or one TOML file with all models and options, instead of the options here."

KEYS = "JAXINFER_API_KEY"
"""The environment variable with API keys, separated by commas."""

ADMIN_KEYS = "JAXINFER_ADMIN_KEY"
"""The environment variable with admin keys, separated by commas."""

QueueTimeOption = Annotated[
    float, typer.Option(help="Seconds that a request may wait for its turn; others get 429, most of them at once.")
]
OriginsOption = Annotated[
    list[str] | None, typer.Option(metavar="ORIGIN", help="Origin whose pages may ask; *: all; repeatable.")
]
AccessLogOption = Annotated[
    str | None, typer.Option(metavar="FILE", help="File that gets a line of JSON for each request; -: stderr.")
]
DrainOption = Annotated[
    float, typer.Option(min=0.0, help="Seconds that running requests have to end after SIGTERM or Ctrl-C.")
]
TracesOption = Annotated[
    str | None, typer.Option(metavar="URL", help="URL of an OpenTelemetry collector that gets traces.")
]
AdapterFoldersOption = Annotated[
    list[Path] | None,
    typer.Option(metavar="DIR", help="Folder from which clients may load LoRA adapters; repeatable."),
]


def serve(
    ctx: typer.Context,
    model: Annotated[list[Path] | None, typer.Argument(metavar="MODEL | FILE.toml", help=SERVED_HELP)] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="Name by which clients ask for the model (default: its directory's).")
    ] = None,
    adapter: Annotated[
        list[str] | None, typer.Option(metavar="NAME=DIR", help="LoRA adapter, a model to clients; repeatable.")
    ] = None,
    adapter_folder: AdapterFoldersOption = None,
    max_lora_rank: Annotated[
        int | None, typer.Option(help="Maximum rank of the adapters that clients load (default: 16).")
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Maximum number of completions that run at once.")] = 8,
    max_requests: Annotated[int, typer.Option(help="Maximum number of requests in flight.")] = 1024,
    max_waiting: Annotated[int, typer.Option(help="Maximum number of further requests that wait; others get 429.")] = 0,
    max_queue_time: QueueTimeOption = 30.0,
    timeout: Annotated[float, typer.Option(help="Seconds after which a request is given up, with 408.")] = 600.0,
    max_body_bytes: Annotated[int, typer.Option(help="Maximum bytes of a body; larger ones get 413.")] = 8_388_608,
    compile_ahead: Annotated[
        bool, typer.Option("--compile-ahead", help="Compile all programs before it takes requests.")
    ] = False,
    trust_request_chat_template: Annotated[
        bool, typer.Option("--trust-request-chat-template", help="Render chat templates that clients send.")
    ] = False,
    cors_origin: OriginsOption = None,
    access_log: AccessLogOption = None,
    drain_timeout: DrainOption = 20.0,
    otlp_endpoint: TracesOption = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    mesh: MeshOption = None,
    context: ContextOption = None,
    num_speculative_tokens: SpeculationOption = 0,
    kv_dtype: KVDtypeOption = None,
    kernels: KernelsOption = True,
    weights: WeightsOption = None,
    device_memory: DeviceMemoryOption = None,
    host_memory: HostMemoryOption = None,
    host_kv: HostKVOption = None,
    disk_kv: DiskKVOption = None,
    disk_kv_limit: DiskKVLimitOption = None,
    kv_offload: KVOffloadOption = None,
    prefetch: PrefetchOption = None,
    layer_files: LayerFilesOption = None,
) -> None:
    """Serve models over HTTP, as the OpenAI API does.

    Clients need one of the keys in the environment variable JAXINFER_API_KEY (separated by commas), if it is set, and
    one of those in JAXINFER_ADMIN_KEY to load or unload anything.
    """
    for package in ("uvicorn", "starlette", "prometheus_client"):
        require_extra(package, "jaxinfer serve")
    from jaxinfer.http.listening import listen

    keys = {"api_keys": _keys(KEYS), "admin_keys": _keys(ADMIN_KEYS)}
    if not (model and any(path.suffix == ".toml" for path in model)):
        with listen(host, port) as listening:  # before what takes seconds to import
            _run(_given(ctx, keys), listening)
    else:
        _refuse_others(ctx, model)
        from jaxinfer.http.config_file import read_config

        served = read_config(model[0], **keys)
        with listen(served.host, served.port) as listening:
            _run(served, listening)


def _keys(variable: str) -> tuple[str, ...]:
    """The keys in an environment variable."""
    return tuple(key for key in os.environ.get(variable, "").split(",") if key)


def _run(config: "ServerConfig", listening: "socket.socket") -> None:
    """Serve what a config describes."""
    from jaxinfer.http.process import serve as run

    if config.otlp_endpoint is not None:
        require_extra("opentelemetry", "--otlp-endpoint")
    if config.kv_events is not None:
        require_extra("zmq", "kv_events")
    for package in ("PIL", "python_multipart") if config.experts or config.elastic else ():
        require_extra(package, "serving experts and elastic tasks")
    _warn(config.host, config.limits.api_keys)
    host = f"[{config.host}]" if ":" in config.host else config.host
    served = f"Serving {', '.join(config.names)} at http://{host}:{config.port}/v1; Ctrl-C ends it."
    with _opened(config.access_log) as log:
        run(config, listening, access_log=log, ready=lambda: note(served))


@contextlib.contextmanager
def _opened(path: str | None) -> Iterator[TextIO | None]:
    """Open the file of `--access-log`. Raises ValueError."""
    if path is None or path == "-":
        yield None if path is None else sys.stderr
        return
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(path, "a"))
        except OSError as error:
            raise ValueError(f"access log {path}: {error.strerror}; name a file that can be written.") from error
        yield file


def _refuse_others(ctx: typer.Context, paths: list[Path]) -> None:
    """Refuse everything else that is given with a file. Raises ValueError."""
    if len(paths) > 1:
        raise ValueError("give models or one FILE.toml, not both: the file names the models.")
    refuse_ignored(ctx, [name for name in ctx.params if name != "model"], f"with {paths[0]}, which has all options")


def _given(ctx: typer.Context, keys: dict[str, tuple[str, ...]]) -> "ServerConfig":
    """Return the config that the command line describes. Raises ValueError."""
    from jaxinfer.http.config import ModelConfig, ServerConfig, check_names
    from jaxinfer.http.limits import Limits

    given = ctx.params
    if not (paths := given["model"]):
        raise ValueError("name a MODEL to serve, or several, or a FILE.toml that describes them.")
    adapters = _adapters(given["adapter"] or [])
    for option, value in (("--name", given["name"]), ("--adapter", adapters)):
        if value and len(paths) > 1:
            raise ValueError(f"{option} is for one model: describe several in a FILE.toml.")
    names = [given["name"]] if given["name"] else [_name(path) for path in paths]
    check_names(names)
    options = model_options(ctx) | {"adapters": adapters or None}
    options |= {name: given[name] for name in MODEL_OPTIONS}
    folders = tuple(given["adapter_folder"] or ())
    models = {
        name: ModelConfig(path=path, options=options, adapter_folders=folders)
        for name, path in zip(names, paths, strict=True)
    }
    return ServerConfig(
        models=models,
        host=given["host"],
        port=given["port"],
        access_log=given["access_log"],
        drain_timeout=given["drain_timeout"],
        otlp_endpoint=given["otlp_endpoint"],
        limits=Limits(
            api_keys=keys["api_keys"],
            admin_keys=keys["admin_keys"],
            cors_origins=tuple(given["cors_origin"] or ()),
            timeout=given["timeout"],
            max_body_bytes=given["max_body_bytes"],
        ),
    )


def _name(path: Path) -> str:
    """The name of a model: that of its folder or file, or the repository's."""
    if not path.exists():
        return str(path)
    return path.resolve().stem if path.is_file() else path.resolve().name


def _adapters(texts: list[str]) -> dict[str, str]:
    """Read `--adapter`. Raises ValueError."""
    named = [text.partition("=") for text in texts]
    if wrong := [text for text, (name, _, folder) in zip(texts, named, strict=True) if not (name and folder)]:
        raise ValueError(f"--adapter {wrong[0]}: write NAME=DIR.")
    return {name: folder for name, _, folder in named}


def _warn(host: str, keys: tuple[str, ...]) -> None:
    """Print a warning of a server that anybody can ask."""
    if not keys and host not in ("127.0.0.1", "::1", "localhost"):
        note(f"Anybody who can reach {host} may ask this server: set {KEYS} to require a key.")
