"""Structured outputs and logits processors through the engine: what comes out has the form that was asked for."""

import json
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from jaxinfer.generation import LLM, FinishReason, SamplingParams
from jaxinfer.generation.params import StructuredOutputsParams
from tests.schemas import random_schema

pytestmark = pytest.mark.xdist_group("ways")

DEMO = Path(__file__).parents[3] / "examples/demo_model"


def test_grammars_of_every_kind_share_a_batch_with_free_text(llm):
    grammars = [
        StructuredOutputsParams(choice=("yes", "no")),
        StructuredOutputsParams(regex="[a-f]{3,6}-[0-9]{2}"),
        StructuredOutputsParams(json={"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}),
        None,
        StructuredOutputsParams(grammar='start: "<" /[xyz]{1,4}/ ">"'),
    ]
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=60, structured_outputs=s) for i, s in enumerate(grammars)
    ]
    prompt = [10, 20, 30]
    outputs = [output.outputs[0] for output in llm.generate([prompt] * len(params), params)]
    assert outputs[0].text in ("yes", "no")
    assert re.fullmatch("[a-f]{3,6}-[0-9]{2}", outputs[1].text)
    assert all(isinstance(item, bool) for item in json.loads(outputs[2].text))
    assert re.fullmatch("<[xyz]{1,4}>", outputs[4].text)
    assert all(c.finish_reason is FinishReason.STOP for i, c in enumerate(outputs) if i != 3)
    (alone,) = llm.generate([prompt], params[3])
    assert outputs[3].token_ids == alone.outputs[0].token_ids


def test_completions_of_one_grammar_are_independent(llm):
    params = SamplingParams(n=4, seed=1, max_tokens=20, structured_outputs=StructuredOutputsParams(regex="[a-z]{6}"))
    (output,) = llm.generate([[1, 2, 3]], params)
    texts = [completion.text for completion in output.outputs]
    assert all(re.fullmatch("[a-z]{6}", text) for text in texts)
    assert len(set(texts)) == 4


def test_structured_text_streams(llm):
    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=40, structured_outputs=StructuredOutputsParams(regex="[a-z]{8}")
    )
    texts = [output.outputs[0].text for output in llm.stream([[1, 2]], params)]
    assert re.fullmatch("[a-z]{8}", texts[-1])
    assert all(texts[-1].startswith(text) for text in texts)


@pytest.mark.slow
def test_outputs_of_two_hundred_random_schemas_are_valid():
    """All that end; a small model goes on for ever where a schema sets no bound (digits, strings)."""
    llm = LLM(DEMO, max_batch=8, context=1024, dtype="float32")
    schemas = [random_schema(np.random.default_rng(seed)) for seed in range(200)]
    params = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=900, structured_outputs=StructuredOutputsParams(json=schema))
        for i, schema in enumerate(schemas)
    ]
    outputs = llm.generate(["x = "] * len(schemas), params)
    ended = 0
    for schema, output in zip(schemas, outputs, strict=True):
        completion = output.outputs[0]
        assert completion.error is None
        if completion.finish_reason is FinishReason.STOP:
            ended += 1
            jsonschema.validate(json.loads(completion.text), schema)
    assert ended >= 150


def test_logits_processors_apply_to_the_rows_that_name_them(ways):
    free = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    named = [
        SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logits_processors=p)
        for p in (("even",), ("next",))
    ]
    prompt = [3, 1, 40]
    llm = ways["whole"]
    ids = [o.outputs[0].token_ids for o in llm.generate([prompt] * 3, [free, *named])]
    assert ids[0] == llm.generate([prompt], free)[0].outputs[0].token_ids
    assert all(np.array(ids[1]) % 2 == 0)
    assert ids[2] == list(range(41, 51))
