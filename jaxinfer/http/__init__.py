"""An HTTP server of language models that speaks the OpenAI API, and Anthropic's. Start at `server.py`.

>>> uvicorn.run(jaxinfer.http.app(AsyncLLM("examples/demo_model")))  # doctest: +SKIP
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from jaxinfer.extras import require_extra
from jaxinfer.http.limits import Limits

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from jaxinfer.generation.api.async_llm import AsyncLLM

__all__ = ["Limits", "app"]


def app(
    models: "AsyncLLM | Mapping[str, AsyncLLM]",
    *,
    name: str | None = None,
    limits: Limits | None = None,
    adapter_folders: "Iterable[str | os.PathLike[str]]" = (),
    access_log: "TextIO | None" = None,
) -> "Starlette":
    """Make the ASGI application of one model, or of several.

    Args:
      models: a model, or several by the names by which clients ask for them. The application closes them at its end,
        once running requests have ended.
      name: the name of the one model; None: its directory's.
      limits: limits of clients; None: the defaults.
      adapter_folders: the folders from which clients may load LoRA adapters, into models with room (`max_adapters`);
        none: they may load none.
      access_log: a file that gets a line of JSON for each request; None: none.

    Raises MissingExtraError without the packages of the extra `serve`; ValueError for two equal names.
    """
    for package in ("starlette", "prometheus_client"):
        require_extra(package, "jaxinfer.http.app")
    from jaxinfer.http import records
    from jaxinfer.http.served_models import ServedModel, ServedModels
    from jaxinfer.http.server import make_app

    if not isinstance(models, Mapping):
        models = {name or models.model.name: models}
    elif name is not None or not models:
        raise ValueError("app takes a name with one AsyncLLM; several have theirs in the mapping, at least one.")
    folders = tuple(map(Path, adapter_folders))
    served = [
        ServedModel(name, lambda asleep, llm=llm: llm, folders, adapters=_adapters(llm)) for name, llm in models.items()
    ]
    for model in served:
        model.load()
    sinks = [] if access_log is None else [records.access_log(access_log)]
    return make_app(ServedModels(served), limits or Limits(), sinks)


def _adapters(llm: "AsyncLLM") -> list[str]:
    """The names of the LoRA adapters that a model has."""
    return [] if (adapters := llm.engine.adapters) is None else adapters.names
