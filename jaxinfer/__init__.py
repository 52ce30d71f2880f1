"""jaxinfer: compiled transformer inference in JAX.

>>> from jaxinfer import LLM, SamplingParams
>>> llm = LLM("examples/demo_model")  # doctest: +SKIP
>>> llm.generate("def main():", SamplingParams(temperature=0))[0].outputs[0].text  # doctest: +SKIP
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from jaxinfer import elastic, evaluation, experts, serving
    from jaxinfer.generation import (
        LLM,
        Embedder,
        EngineStats,
        FinishReason,
        PoolingParams,
        Request,
        RequestOutput,
        SamplingParams,
    )
    from jaxinfer.generation.api.async_llm import AsyncLLM, OutputStream
    from jaxinfer.generation.api.beam_search import BeamSearchOutput, BeamSearchParams
    from jaxinfer.generation.engine.config import EngineOptions
    from jaxinfer.generation.params import StructuredOutputsParams
    from jaxinfer.generation.sampling.sampler import LogitsProcessor
    from jaxinfer.sharding import MeshConfig, ShardingRules
    from jaxinfer.streaming.config import MemoryOptions

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "Embedder",
    "EngineOptions",
    "EngineStats",
    "FinishReason",
    "LogitsProcessor",
    "MemoryOptions",
    "MeshConfig",
    "OutputStream",
    "PoolingParams",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "ShardingRules",
    "StructuredOutputsParams",
    "__version__",
    "elastic",
    "evaluation",
    "experts",
    "serving",
]

_MODULES = {
    "AsyncLLM": "jaxinfer.generation.api.async_llm",
    "BeamSearchOutput": "jaxinfer.generation.api.beam_search",
    "BeamSearchParams": "jaxinfer.generation.api.beam_search",
    "EngineOptions": "jaxinfer.generation.engine.config",
    "LogitsProcessor": "jaxinfer.generation.sampling.sampler",
    "MemoryOptions": "jaxinfer.streaming.config",
    "MeshConfig": "jaxinfer.sharding",
    "OutputStream": "jaxinfer.generation.api.async_llm",
    "ShardingRules": "jaxinfer.sharding",
    "StructuredOutputsParams": "jaxinfer.generation.params",
}


def __getattr__(name: str) -> Any:
    # Imported when first used: `jaxinfer --help` should not wait for JAX.
    if name in ("elastic", "evaluation", "experts", "serving"):
        return importlib.import_module(f"jaxinfer.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'jaxinfer' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES.get(name, "jaxinfer.generation")), name)


def __dir__() -> list[str]:
    return __all__
