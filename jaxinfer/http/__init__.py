"""An HTTP server of language models that speaks the OpenAI API. Start at `server.py`.

>>> uvicorn.run(jaxinfer.http.app(AsyncLLM("examples/demo_model")))  # doctest: +SKIP
"""

from typing import TYPE_CHECKING

from jaxinfer.extras import require_extra
from jaxinfer.http.limits import Limits

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from jaxinfer.generation.api.async_llm import AsyncLLM

__all__ = ["Limits", "app"]


def app(llm: "AsyncLLM", *, name: str | None = None, limits: Limits | None = None) -> "Starlette":
    """Make the ASGI application of a model.

    Args:
      llm: the model. The application closes it at its end, once running requests have ended.
      name: the name by which clients ask for it; None: its directory's.
      limits: limits of clients; None: the defaults.

    Raises MissingExtraError without the packages of the extra `serve`.
    """
    for package in ("starlette", "prometheus_client"):
        require_extra(package, "jaxinfer.http.app")
    from jaxinfer.http.server import make_app

    return make_app(llm, name or llm.model.name, limits or Limits())
