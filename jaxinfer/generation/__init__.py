"""Text from a model: requests, sampling, the paged KV cache, the scheduler, the engine.

A request goes from `LLM` (api/) to `Engine.step` (engine/engine.py): the scheduler makes a batch, an executor runs it
on the device (execution/, whose programs choose tokens by sampling/), and `OutputProcessor` (engine/output.py) gives
the tokens to their sequences.
"""

from jaxinfer.generation.api.embedder import Embedder
from jaxinfer.generation.api.llm import LLM
from jaxinfer.generation.engine.engine import Engine
from jaxinfer.generation.engine.request import Request
from jaxinfer.generation.engine.stats import EngineStats
from jaxinfer.generation.outputs import CompletionOutput, FinishReason, RequestOutput, Timings, TokenLogprob
from jaxinfer.generation.params import PoolingParams, SamplingParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "Embedder",
    "Engine",
    "EngineStats",
    "FinishReason",
    "PoolingParams",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "Timings",
    "TokenLogprob",
]
