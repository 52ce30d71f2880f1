"""jaxinfer: compiled transformer inference in JAX.

>>> from jaxinfer import LLM, SamplingParams
>>> llm = LLM("examples/demo_model")  # doctest: +SKIP
>>> llm.generate("def main():", SamplingParams(temperature=0))[0].completions[0].text  # doctest: +SKIP
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfer.generation import LLM, Embedder, RequestOutput, SamplingParams
    from sharding import MeshConfig

__all__ = ["LLM", "Embedder", "MeshConfig", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    # Imported when first used: `jaxinfer --help` should not wait for JAX.
    if name == "MeshConfig":
        from sharding import MeshConfig

        return MeshConfig
    if name in __all__:
        from jaxinfer import generation

        return getattr(generation, name)
    raise AttributeError(f"module 'jaxinfer' has no attribute {name!r}")
