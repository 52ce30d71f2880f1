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

    from jaxinfer.elastic import Service
    from jaxinfer.experts import System
    from jaxinfer.generation.api.async_llm import AsyncLLM

__all__ = ["Limits", "app"]


def app(
    models: "AsyncLLM | Mapping[str, AsyncLLM]",
    *,
    experts: "Mapping[str, System] | None" = None,
    elastic: "Mapping[str, Service] | None" = None,
    name: str | None = None,
    limits: Limits | None = None,
    adapter_folders: "Iterable[str | os.PathLike[str]]" = (),
    image_folders: "Iterable[str | os.PathLike[str]]" = (),
    dataset_folders: "Iterable[str | os.PathLike[str]]" = (),
    access_log: "TextIO | None" = None,
) -> "Starlette":
    """Make the ASGI application of one model, or of several.

    Args:
      models: a model, or several by the names by which clients ask for them; with `experts` or `elastic` perhaps none.
        The application closes all at its end, once running requests have ended.
      experts: systems of experts by name.
      elastic: elastic services by name; they are started, which compiles all of their programs.
      name: the name of the one model; None: its directory's.
      limits: limits of clients; None: the defaults.
      adapter_folders: the folders from which clients may load LoRA adapters, into models with room (`max_adapters`);
        none: they may load none.
      image_folders: the folders with images that requests for experts and elastic services may name.
      dataset_folders: the folders with data sets from which clients may register tasks.
      access_log: a file that gets a line of JSON for each request; None: none.

    Raises MissingExtraError without the packages of the extra `serve`; ValueError for two equal names.
    """
    of_images = ("PIL", "python_multipart") if experts or elastic else ()
    for package in ("starlette", "prometheus_client", *of_images):
        require_extra(package, "jaxinfer.http.app")
    from jaxinfer.http import records
    from jaxinfer.http.config import check_names
    from jaxinfer.http.served_model import ServedModel
    from jaxinfer.http.served_models import ServedModels
    from jaxinfer.http.server import make_app
    from jaxinfer.http.vision.served import ServedService, ServedSystem

    if not isinstance(models, Mapping):
        models = {name or models.model.name: models}
    elif name is not None or not (models or experts or elastic):
        raise ValueError("app takes a name with one AsyncLLM; several have theirs in the mapping, at least one.")
    check_names([*models, *(experts or ()), *(elastic or ())])
    folders = tuple(map(Path, adapter_folders))
    served = [
        ServedModel(name, lambda asleep, llm=llm: llm, folders, adapters=_adapters(llm)) for name, llm in models.items()
    ]
    images, datasets = tuple(map(Path, image_folders)), tuple(map(Path, dataset_folders))
    systems = [ServedSystem(name, lambda system=system: system, images) for name, system in (experts or {}).items()]
    services = [
        ServedService(name, lambda service=service: service, images, datasets)
        for name, service in (elastic or {}).items()
    ]
    for each in (*served, *systems, *services):
        each.load()
    sinks = [] if access_log is None else [records.access_log(access_log)]
    return make_app(ServedModels(served), limits or Limits(), sinks, systems=systems, services=services)


def _adapters(llm: "AsyncLLM") -> list[str]:
    """Return the names of the LoRA adapters that a model has."""
    return [] if (adapters := llm.engine.adapters) is None else adapters.names
