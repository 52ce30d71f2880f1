"""Fields of `generation_config.json`: each is read, harmless, or named in a warning where it would change texts."""

import json
import logging

import pytest

from jaxinfer.checkpoints import CheckpointError
from jaxinfer.generation.params import SamplingParams
from jaxinfer.models.files.generation_config import HARMLESS, READ, SPECIAL_TOKENS, UNSUPPORTED, read_sampling
from jaxinfer.models.files.gguf_config import generation_fields
from tests.models import goldens

FIELDS = json.loads((goldens.DIRECTORY / "generation_fields.json").read_text())
"""What `goldens/make_generation_goldens.py` has found: the fields of transformers, and their defaults."""
CLASSES = (READ.keys(), SPECIAL_TOKENS, HARMLESS, UNSUPPORTED.keys())
VALUES = {"temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.5, "repetition_penalty": 1.5, "max_new_tokens": 5}


@pytest.fixture
def warnings(caplog):
    """A function that reads fields, and returns the texts of its warnings."""

    def read(**fields):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            read_sampling("FILE", fields)
        return [record.getMessage() for record in caplog.records]

    return read


@pytest.mark.parametrize("name", FIELDS)
def test_each_field_of_transformers_is_in_one_class_and_behaves_so(name, warnings):
    assert sum(name in fields for fields in CLASSES) == 1
    assert warnings(**{name: None}) == warnings(**{name: FIELDS[name]}) == []  # as if the field were left out
    if name in READ:
        sampling = read_sampling("FILE", {name: VALUES[name]})
        assert sampling.named == {READ[name]: VALUES[name]}
        assert getattr(SamplingParams(**sampling.named), READ[name]) == VALUES[name]
    else:
        assert read_sampling("FILE", {name: 7}).named == {}
        expected = [f"FILE: not supported, so texts are generated without: {name}=7."]
        assert warnings(**{name: 7}) == (expected if name in UNSUPPORTED else [])


def test_unknown_fields_are_named_with_the_unsupported_ones(warnings):
    (warning,) = warnings(chat_format="chatml", num_beams=4, bad_words_ids=[[1] * 100], top_k=5, suppress_tokens=[])
    named = warning.removeprefix("FILE: not supported, so texts are generated without: ")
    assert named.startswith("chat_format='chatml', num_beams=4, bad_words_ids=[[1, 1, ")
    assert len(warning) < 200


@pytest.mark.parametrize("neutral", [0, -1])
def test_top_k_of_all_tokens(neutral):
    assert SamplingParams(**read_sampling("FILE", {"top_k": neutral}).named) == SamplingParams()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1}, "FILE: temperature=-1: expected `float` >= 0.0; correct it, or remove it."),
        ({"temperature": "hot"}, "FILE: temperature='hot': expected `float | null`, got `str`; "),
        ({"top_p": 1.5}, "FILE: top_p=1.5: expected `float` <= 1.0; "),
        ({"top_k": 2.5}, "FILE: top_k=2.5: expected `int | null`, got `float`; "),
        ({"max_new_tokens": 0}, "FILE: max_new_tokens=0: expected `int` >= 1; "),
        ({"repetition_penalty": True}, "FILE: repetition_penalty=True: expected `float | null`, got `bool`; "),
    ],
)
def test_wrong_values_are_refused(fields, message):
    with pytest.raises(CheckpointError) as error:
        read_sampling("FILE", fields)
    assert str(error.value).startswith(message)


def test_keys_of_gguf_files(warnings):
    """They are in float32; those that llama.cpp alone has are named where they change texts."""
    float32 = {"temp": 0.6000000238418579, "top_p": 0.949999988079071, "penalty_repeat": 1.0499999523162842}
    metadata = {f"general.sampling.{key}": value for key, value in float32.items()} | {"general.name": "x"}
    fields = generation_fields(metadata | {"general.sampling.top_k": 20})
    assert fields == {"temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.05, "top_k": 20}
    neutral = {"xtc_probability": 0.0, "xtc_threshold": 0.1, "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1}
    assert warnings(**fields, **neutral) == []
    (warning,) = warnings(mirostat=2, xtc_probability=0.5, penalty_last_n=64, sequence="top_k;temp")
    assert warning.endswith("mirostat=2, xtc_probability=0.5, penalty_last_n=64, sequence='top_k;temp'.")
