"""jaxinfer: compiled transformer inference in JAX.

>>> from jaxinfer import LLM, SamplingParams
>>> llm = LLM("examples/demo_model")  # doctest: +SKIP
>>> llm.generate("def main():", SamplingParams(temperature=0))[0].completions[0].text  # doctest: +SKIP
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfer.generation import LLM, Embedder, FinishReason, RequestOutput, SamplingParams
    from jaxinfer.generation.beam import BeamOutput, BeamParams
    from jaxinfer.generation.sampling import LogitsProcessor
    from jaxinfer.generation.structured import Structure
    from sharding import MeshConfig

__all__ = [
    "LLM",
    "BeamOutput",
    "BeamParams",
    "Embedder",
    "FinishReason",
    "LogitsProcessor",
    "MeshConfig",
    "RequestOutput",
    "SamplingParams",
    "Structure",
]

_MODULES = {
    "BeamOutput": "jaxinfer.generation.beam",
    "BeamParams": "jaxinfer.generation.beam",
    "LogitsProcessor": "jaxinfer.generation.sampling",
    "MeshConfig": "sharding",
    "Structure": "jaxinfer.generation.structured",
}


def __getattr__(name: str) -> Any:
    # Imported when first used: `jaxinfer --help` should not wait for JAX.
    if name not in __all__:
        raise AttributeError(f"module 'jaxinfer' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES.get(name, "jaxinfer.generation")), name)
