"""Results become text as soon as they can, and end it where they should."""

import itertools
from array import array

import pytest

from jaxinfer.generation.engine.batch import Batch, DecodeRow, SequenceOutput, StepOutput
from jaxinfer.generation.engine.output import OutputProcessor
from jaxinfer.generation.engine.request import Request
from jaxinfer.generation.engine.view import RequestView
from jaxinfer.generation.outputs import FinishReason
from jaxinfer.generation.params import SamplingParams
from jaxinfer.text import Tokenizer
from tests.text.test_text_stream import byte_fallback, in_bytes


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_fallback().save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def texts_of(sequence, tokens):
    """What a reader sees after each token, until the sequence ends."""
    processor, view = OutputProcessor(itertools.count().__next__), RequestView([sequence])
    batch = Batch(rows=(DecodeRow(sequence, 0, array("i")),))
    for token in tokens:
        processor.process(batch, StepOutput(outputs=[SequenceOutput([token])]))
        yield view.output().outputs[0].text
        if sequence.finished:
            return


@pytest.mark.parametrize(
    ("options", "stop", "expected"),
    [
        ({}, None, ["x", "x", "x", "x日", "x日", "x日é", "x日éz", "x日ézz"]),
        ({"stop": "日é"}, "日é", ["x"] * 6),
        ({"stop": "日é", "include_stop_str_in_output": True}, "日é", ["x", "x", "x", "x日", "x日", "x日é"]),
        ({"stop": "x日", "min_tokens": 5}, None, ["x", "x", "x", "x日", "x日", "x日é", "x日éz", "x日ézz"]),
        ({"stop": ("éz", "zz"), "min_tokens": 7}, "zz", ["x", "x", "x", "x日", "x日", "x日é", "x日é", "x日é"]),
    ],
)
def test_text_and_stop_strings_in_byte_tokens_come_at_once(tokenizer, options, stop, expected):
    params = SamplingParams(max_tokens=9, **options)
    request = Request(
        request_id="r", prompt=None, prompt_token_ids=(300,), params=params, max_length=10, tokenizer=tokenizer
    )
    (sequence,) = request.sequences()
    assert list(texts_of(sequence, in_bytes("x日ézz"))) == expected
    assert (sequence.finish_reason, sequence.stop_reason) == (stop and FinishReason.STOP, stop)
