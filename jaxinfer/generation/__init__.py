"""Text from a model: requests, sampling, the paged cache, the scheduler, the engine.

A request's way: `LLM` (llm.py) -> `Engine.step` (engine.py) -> `Scheduler` (what runs next) -> `Runner` (on the device)
-> `programs.py` (what is compiled) -> `sampling.py` (the next token) -> `Sequence` (request.py).
"""

from jaxinfer.generation.embedding import Embedder
from jaxinfer.generation.engine import Engine
from jaxinfer.generation.llm import LLM
from jaxinfer.generation.params import SamplingParams
from jaxinfer.generation.request import Completion, FinishReason, RequestOutput, Timings, TokenLogprob

__all__ = [
    "LLM",
    "Completion",
    "Embedder",
    "Engine",
    "FinishReason",
    "RequestOutput",
    "SamplingParams",
    "Timings",
    "TokenLogprob",
]
