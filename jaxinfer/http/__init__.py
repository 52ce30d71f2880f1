"""An HTTP server of language models that speaks the OpenAI API. Start at `app.py`."""

from jaxinfer.extras import require_extra

for package in ("starlette", "prometheus_client"):
    require_extra(package, "jaxinfer.http")

from jaxinfer.http.app import app  # noqa: E402 (after the check)
from jaxinfer.http.limits import Limits  # noqa: E402

__all__ = ["Limits", "app"]
