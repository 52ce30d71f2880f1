"""Packages that only some features use: which extra has them, and one error for all that are missing."""

import importlib.util
import shlex
from collections.abc import Iterable

PACKAGES = {
    "PIL": ("pillow", "images"),
    "matplotlib": ("matplotlib", "bench"),
    "mlxtend": ("mlxtend", "elastic"),
    "skimage": ("scikit-image", "elastic"),
    "sklearn": ("scikit-learn", "elastic"),
    "opentelemetry": ("opentelemetry-exporter-otlp-proto-http", "otel"),
    "prometheus_client": ("prometheus-client", "serve"),
    "python_multipart": ("python-multipart", "serve"),
    "starlette": ("starlette", "serve"),
    "uvicorn": ("uvicorn", "serve"),
    "zmq": ("pyzmq", "kv-events"),
}
"""Modules that are imported after `require_extra` -> their package, and the extra that has it."""

CUDA_COMPILER = (
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "nvidia-cuda-nvcc==13.0.*",
    "nvidia-nvvm==13.0.*",
    "nvidia-cuda-nvdisasm>=13.2,<14",
)
"""The extra `aot`, whose tools may also be installed otherwise: they are looked for, rather than imported."""


class MissingExtraError(ImportError):
    """A package of an extra is needed and not installed."""

    def __init__(self, purpose: str, needed: str, extra: str, packages: Iterable[str]):
        # The packages themselves: an extra is installed by another name in a clone than from a wheel.
        super().__init__(f"{purpose} needs {needed}, of the extra {extra}: pip install {shlex.join(packages)}")


def require_extra(module: str, purpose: str) -> None:
    """Check, before it is imported, that a module of an extra is installed.

    Args:
      module: one of `PACKAGES`.
      purpose: what needs it, such as "--plot speed.svg": the beginning of the error's message.

    Raises MissingExtraError.
    """
    if importlib.util.find_spec(module) is None:
        package, extra = PACKAGES[module]
        raise MissingExtraError(purpose, package, extra, [package])
