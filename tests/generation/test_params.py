"""Whatever a caller gives for an option becomes what its type says, or is refused by name."""

import dataclasses
import inspect
import json
import re
import types
import typing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer import LLM, AsyncLLM, Embedder
from jaxinfer.elastic.scheduling.query import Query
from jaxinfer.generation.api.beam_search import BeamSearchParams
from jaxinfer.generation.api.build import ModelOptions
from jaxinfer.generation.foreign_options import BEAM_SEARCH, MODEL, SAMPLING
from jaxinfer.generation.params import PoolingParams, SamplingParams, StructuredOutputsParams
from jaxinfer.generation.sampling.arrays import RowOptions, sampling_arrays
from tests.generation.wrong import JSON

OURS = ("id", "payload")  # fields of a Query that no caller gives
OTHERS = {Query: {"id": 0, "task": "a", "arrival": 0.0, "latency": 1.0, "utility": 1.0}}


def is_a(value, kind):
    """Whether a value is of a type to its depths: a bool is no int, an int no float, an np.int64 neither."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return is_a(value, arguments[0])
    if origin in (types.UnionType, typing.Union):
        return any(is_a(value, part) for part in arguments)
    if origin is tuple:
        return type(value) is tuple and all(is_a(item, arguments[0]) for item in value)
    if origin is dict:
        return type(value) is dict and all(is_a(k, arguments[0]) and is_a(v, arguments[1]) for k, v in value.items())
    return kind is typing.Any or type(value) is kind


def others(params, field, value):
    """What else must be given for one field to be looked at."""
    if params is StructuredOutputsParams:
        if field == "whitespace_pattern":
            return {"json": {}}
        if field in ("reasoning_tags", "thinking_token_budget"):
            return {"regex": "a"} | ({} if field == "reasoning_tags" else {"reasoning_tags": ("", "a")})
        return {} if value is not None else {"regex": "a"} if field == "choice" else {"choice": ("a",)}
    return OTHERS.get(params, {})


@pytest.mark.parametrize("params", [SamplingParams, PoolingParams, StructuredOutputsParams, BeamSearchParams, Query])
@settings(max_examples=150)
@given(data=st.data())
def test_any_value_is_made_plain_or_refused_by_name(params, data):
    annotations = typing.get_type_hints(params, include_extras=True)
    hints = {field.name: annotations[field.name] for field in dataclasses.fields(params) if field.name not in OURS}
    field = data.draw(st.sampled_from(sorted(hints)))
    value = data.draw(JSON)
    try:
        made = params(**others(params, field, value) | {field: value})
    except ValueError as error:
        assert f"{params.__name__}.{field}" in str(error)  # noqa: PT017
        return
    assert {name for name, hint in hints.items() if not is_a(getattr(made, name), hint)} == set()
    assert dataclasses.replace(made) == made
    assert hash(dataclasses.replace(made)) == hash(made)
    json.dumps(dataclasses.asdict(made))
    if params is SamplingParams:
        limit = 50 if made.max_tokens is None else min(50, 20 + made.max_tokens)
        sampling_arrays([RowOptions(made, made.seed or 0, 20, limit, made.stop_token_ids)])


WRONG = [
    (SamplingParams, {"max_tokens": 5.5}, "max_tokens must be an integer >= 1, below .* or None, got 5.5"),
    (SamplingParams, {"max_tokens": True}, "max_tokens must be an integer >= 1, below .* or None, got True"),
    (SamplingParams, {"min_tokens": 2**31, "max_tokens": None}, r"min_tokens must be an integer in \[0, 2\*\*30\]"),
    (SamplingParams, {"min_tokens": 9, "max_tokens": 8}, "min_tokens must be <= max_tokens=8, got 9"),
    (SamplingParams, {"logprobs": 2.5}, r"logprobs must be an integer in \[0, 20\] or None, got 2.5"),
    (SamplingParams, {"stop": [5]}, r"stop must be at most 64 strings of 1 to 1024 characters, got \[5\]"),
    (SamplingParams, {"stop": ["a" * 1025]}, r"stop must be .* got \['aaaa.*\.\.\.\.$"),
    (SamplingParams, {"stop": {"b", "a"}}, "stop must be at most 64 strings"),
    (SamplingParams, {"n": 10**7}, r"n must be an integer in \[1, 1024\], got 10000000"),
    (SamplingParams, {"n": 10**5000}, "n must be .* got a value of type int that cannot be shown"),
    (SamplingParams, {"temperature": float("nan")}, "temperature must be finite and >= 0"),
    (SamplingParams, {"temperature": 1e39}, "temperature must be finite and >= 0"),
    (SamplingParams, {"repetition_penalty": 1e-60}, "repetition_penalty must be a finite number > 0, got 1e-60"),
    (SamplingParams, {"logit_bias": {"5": 1.0}}, "logit_bias must be a dict of at most 300 token ids"),
    (SamplingParams, {"logit_bias": dict.fromkeys(range(301), 1.0)}, "logit_bias must be a dict of at most 300"),
    (SamplingParams, {"allowed_token_ids": []}, r"allowed_token_ids must be one or more token ids or None, got \[\]"),
    (
        SamplingParams,
        {"bad_words": "abc"},
        "bad_words must be at most 10000 strings of 1 to 1024 characters, got 'abc'",
    ),
    (SamplingParams, {"structured_outputs": {"regex": "a"}}, "structured_outputs must be StructuredOutputsParams or"),
    (SamplingParams, {"logits_processors": "even"}, "logits_processors must be at most 64 names, got 'even'"),
    (SamplingParams, {"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
    (PoolingParams, {"priority": "high"}, r"priority must be an integer in \[-1000, 1000\], got 'high'"),
    (BeamSearchParams, {"stop_token_ids": {1: 2}}, "stop_token_ids must be at most 16 token ids, got {1: 2}"),
    (StructuredOutputsParams, {"thinking_token_budget": 4}, "thinking_token_budget must be given with reasoning_tags"),
    (StructuredOutputsParams, {"json": {"const": {1}}}, "json must be a dict or the text of a JSON object"),
    (StructuredOutputsParams, {"json": "[" * 100_000}, "json is not JSON"),
]


@pytest.mark.parametrize(("params", "options", "message"), WRONG)
def test_the_error_says_which_option_and_what_it_takes(params, options, message):
    with pytest.raises(ValueError, match=f"^{params.__name__}.{message}"):
        params(**options)


OTHER_NAMES = [
    (SamplingParams, "max_new_tokens", "use max_tokens"),
    (SamplingParams, "num_return_sequences", "use n"),
    (BeamSearchParams, "num_beams", "use beam_width"),
    (LLM, "max_model_len", "use context"),
    (LLM, "model", "use path, the first argument"),
    (AsyncLLM, "tensor_parallel_size", r"use mesh=MeshConfig\(tensor=...\)"),
    (Embedder, "quantization", "use quantize='int8', 'int4' or 'fp8'"),
]


@pytest.mark.parametrize(("owner", "name", "advice"), OTHER_NAMES)
def test_a_name_of_another_library_is_answered_by_ours(owner, name, advice):
    with pytest.raises(TypeError, match=f"^{owner.__name__} has no option {name}: {advice}[^\n]*$"):
        owner(**{name: 1})


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (SAMPLING, {field.name for field in dataclasses.fields(SamplingParams)}),
        (BEAM_SEARCH, {field.name for field in dataclasses.fields(BeamSearchParams)}),
        (MODEL, {*inspect.signature(LLM).parameters, *ModelOptions.__annotations__}),
    ],
)
def test_advice_is_for_options_that_exist(names, options):
    assert not options & set(names)
    advised = {word for advice in names.values() for word in re.findall(r"^use (\w+)", advice)}
    assert advised - options <= {"LLM", "Embedder", "SamplingParams", "the"}


def test_an_unknown_option_is_answered_by_those_there_are(model_dir):
    with pytest.raises(TypeError, match=r"SamplingParams has no option tempratur; known: adapter,.* temperature,"):
        SamplingParams(tempratur=1)
    with pytest.raises(TypeError, match="BeamSearchParams has no option bad_words; known: adapter, beam_width, "):
        BeamSearchParams(bad_words=("a",))
    with pytest.raises(TypeError, match=r"LLM has no option heads; known: adapter_bytes, adapters, .*mesh, .*rules, "):
        LLM(model_dir, heads=1)


def test_numbers_of_numpy_are_numbers():
    made = SamplingParams(
        max_tokens=np.int64(3), temperature=np.float32(0.5), top_p=1, ignore_eos=np.bool_(True), logprobs=np.uint8(2),
        stop_token_ids=np.array([1, 2]), stop=[np.str_("a")], logit_bias={np.int32(4): np.float64(-np.inf)},
    )  # fmt: skip
    plain = SamplingParams(
        max_tokens=3, temperature=0.5, ignore_eos=True, logprobs=2, stop_token_ids=(1, 2), stop=("a",),
        logit_bias={4: -np.inf},
    )  # fmt: skip
    assert repr(made) == repr(plain)
    assert json.loads(json.dumps(dataclasses.asdict(made)))["max_tokens"] == 3


def test_what_a_caller_changes_later_changes_nothing():
    bias, stop, schema, choice = {4: 1.0}, ["a"], {"type": "object", "required": ["a"]}, ["yes", "no"]
    structured = StructuredOutputsParams(json=schema)
    chosen = StructuredOutputsParams(choice=choice)
    params = SamplingParams(logit_bias=bias, stop=stop, structured_outputs=structured)
    before = repr((params, chosen))
    bias[5], schema["required"][0] = 2.0, "b"
    stop.append("b")
    choice.clear()
    assert repr((params, chosen)) == before


def test_a_list_that_holds_itself():
    stop: list = []
    stop.append(stop)
    with pytest.raises(ValueError, match=r"SamplingParams.stop must be .* got \[\[\.\.\.\]\]"):
        SamplingParams(stop=stop)


def test_none_leaves_out_a_list_or_a_mapping():
    names = ("bad_words", "logit_bias", "logits_processors", "stop", "stop_token_ids")
    assert SamplingParams(**dict.fromkeys(names)) == SamplingParams()
