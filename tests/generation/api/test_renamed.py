"""Keyword options under an old name are refused with the new one."""

import pytest

import jaxinfer
from jaxinfer import LLM, AsyncLLM, BeamSearchParams, Embedder, SamplingParams, StructuredOutputsParams
from jaxinfer.generation.engine.config import EngineConfig

RENAMED = [
    (SamplingParams, "structure", "structured_outputs"),
    (SamplingParams, "stop_ids", "stop_token_ids"),
    (SamplingParams, "processors", "logits_processors"),
    (BeamSearchParams, "width", "beam_width"),
    (BeamSearchParams, "stop_ids", "stop_token_ids"),
    (LLM, "draft_tokens", "num_speculative_tokens"),
    (LLM, "processors", "logits_processors"),
    (LLM, "piece_tokens", "chunk_size"),
    (LLM, "max_decode_steps", "max_decode_passes"),
    (LLM.stream, "max_steps", "max_passes"),
    (StructuredOutputsParams, "json_schema", "json"),
    (EngineConfig, "slots", "max_batch"),
    (EngineConfig, "draft_tokens", "num_speculative_tokens"),
    (EngineConfig, "piece_tokens", "chunk_size"),
    (EngineConfig, "max_decode_steps", "max_decode_passes"),
]


@pytest.mark.parametrize(("call", "old", "new"), RENAMED, ids=[f"{c.__qualname__}.{old}" for c, old, _ in RENAMED])
def test_an_old_name_is_refused_with_the_new_one(call, old, new):
    first = ("model",) if call in (LLM, LLM.stream) else ()
    with pytest.raises(TypeError, match=rf"^{call.__qualname__}\.{old} is now {call.__qualname__}\.{new}\.$"):
        call(*first, **{old: 1})


@pytest.mark.parametrize("kind", [AsyncLLM, Embedder])
def test_an_old_name_is_refused_by_all_that_load_a_decoder(kind, model_dir):
    with pytest.raises(TypeError, match=r"^LLM\.piece_tokens is now LLM\.chunk_size\.$"):
        kind(model_dir, piece_tokens=8)


def test_a_class_of_an_old_name_is_refused_with_the_new_one():
    with pytest.raises(AttributeError, match=r"jaxinfer\.Structure is now jaxinfer\.StructuredOutputsParams"):
        jaxinfer.Structure  # noqa: B018


def test_an_option_that_never_was_is_unknown():
    with pytest.raises(TypeError, match="unexpected keyword argument 'structured'"):
        SamplingParams(structured=1)
    with pytest.raises(TypeError, match="LLM has no option structured; known: "):
        LLM("model", structured=1)
