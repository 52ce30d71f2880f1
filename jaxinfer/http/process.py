"""The process of `jaxinfer serve`: it loads its models in a thread, and ends if one cannot be loaded."""

import functools
import re
import socket
import threading
from collections.abc import Callable

import uvicorn

from jaxinfer.generation.api.async_llm import AsyncLLM
from jaxinfer.http.config import ModelConfig, ServerConfig
from jaxinfer.http.served_models import ServedModel, ServedModels
from jaxinfer.http.server import make_app


def serve(config: ServerConfig, listening: socket.socket, *, ready: Callable[[], None]) -> None:
    """Serve models until a signal ends the process.

    Args:
      listening: the socket that listens on the config's address.
      ready: called in another thread once all models are loaded.

    Raises what `AsyncLLM` raises for a model that cannot be loaded; ValueError, naming the file, for one of a file.
    """
    models = [
        ServedModel(name, functools.partial(_load, config.source, name, model), model.adapter_folders)
        for name, model in config.models.items()
    ]
    app = make_app(ServedModels(models), config.limits)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, log_level="info" if config.access_log else "warning"))
    errors: list[BaseException] = []

    def load() -> None:
        try:
            for model in models:
                model.load()
            ready()
        except BaseException as error:
            errors.append(error)
            server.should_exit = True

    loading = threading.Thread(target=load, name="jaxinfer-loading", daemon=True)  # the process ends without it
    loading.start()
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:
        if loading.is_alive():  # the command line ends what still compiles
            raise
    if errors:
        raise errors[0]


def _load(source: str | None, name: str, model: ModelConfig) -> AsyncLLM:
    """Load a model; an error names its table in the file, and options as they are written there."""
    try:
        return AsyncLLM(**model.load_options)
    except (ValueError, OSError, MemoryError) as error:
        if source is None:
            raise
        message = re.sub(r"\b[A-Z]\w*\.(?=[a-z]\w*)", "", str(error))
        raise ValueError(f"{source}: models.{name}: {message}") from error
