"""`jaxinfer serve`: an OpenAI-compatible server of a language model."""

import os
from typing import Annotated

import typer

from jaxinfer.cli.common import (
    ContextOption,
    DeviceMemoryOption,
    DtypeOption,
    HostMemoryOption,
    KernelsOption,
    KVDtypeOption,
    LayerFilesOption,
    MeshOption,
    ModelArgument,
    PrefetchOption,
    QuantizeOption,
    SpeculationOption,
    WeightsOption,
    model_options,
    note,
)
from jaxinfer.extras import require_extra

KEYS = "JAXINFER_API_KEY"
"""The environment variable with API keys, separated by commas."""


def serve(
    ctx: typer.Context,
    model: ModelArgument,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="Name by which clients ask for the model (default: its directory's).")
    ] = None,
    adapter: Annotated[
        list[str] | None, typer.Option(metavar="NAME=DIR", help="LoRA adapter, a model to clients; repeatable.")
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Maximum number of completions that run at once.")] = 8,
    max_requests: Annotated[int, typer.Option(help="Maximum number of requests in flight.")] = 1024,
    max_waiting: Annotated[int, typer.Option(help="Maximum number of further requests that wait; others get 429.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds after which a request is given up, with 408.")] = 600.0,
    max_body_bytes: Annotated[int, typer.Option(help="Maximum bytes of a body; larger ones get 413.")] = 8_388_608,
    compile_ahead: Annotated[
        bool, typer.Option("--compile-ahead", help="Compile all programs before it takes requests.")
    ] = False,
    access_log: Annotated[bool, typer.Option("--access-log", help="Log each request on stderr.")] = False,
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
    prefetch: PrefetchOption = None,
    layer_files: LayerFilesOption = None,
) -> None:
    """Serve a model over HTTP, as the OpenAI API does.

    Clients need one of the keys in the environment variable JAXINFER_API_KEY (separated by commas), if it is set.
    """
    require_extra("uvicorn", "jaxinfer serve")
    import uvicorn

    from jaxinfer import AsyncLLM, http

    keys = tuple(key for key in os.environ.get(KEYS, "").split(",") if key)
    limits = http.Limits(api_keys=keys, timeout=timeout, max_body_bytes=max_body_bytes)
    adapters = _adapters(adapter or [])
    _warn(host, keys)
    llm = AsyncLLM(
        **model_options(ctx),
        max_batch=max_batch,
        adapters=adapters or None,
        max_requests=max_requests,
        max_waiting=max_waiting,
        compile_ahead=compile_ahead,
    )
    app = http.app(llm, name=name, limits=limits)
    note(f"Serving {name or llm.model.name} at http://{host}:{port}/v1; Ctrl-C ends it.")
    uvicorn.run(app, host=host, port=port, log_level="info" if access_log else "warning")


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
