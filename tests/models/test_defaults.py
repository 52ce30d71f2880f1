"""A `config.json` that lacks a field means what it means to transformers (`goldens/make_default_goldens.py`)."""

import copy
import json

import pytest

from jaxinfer.models.families import FAMILIES
from tests.models import goldens

OTHERS = {("mistral3_awkward", "tie_word_embeddings"), ("mistral3_text", "tie_word_embeddings")}
"""Defaults that differ: Mistral Small 3.1 has a head of its own, and no field that says so."""
DEFAULTS = json.loads((goldens.DIRECTORY / "defaults.json").read_text())


def config_of(fields):
    """The config, or why there is none: two goldens' sizes do not fit the defaults of others."""
    try:
        return FAMILIES[fields["model_type"]].config(fields)
    except ValueError as error:
        return str(error)


def without(fields, path, changed):
    """The fields without one, and the fields as transformers then has them."""
    shorter = copy.deepcopy(fields)
    *outer, name = path.split("/")
    inner = shorter[outer[0]] if outer else shorter
    value = inner.pop(name)
    complete = copy.deepcopy(shorter)
    (complete[outer[0]] if outer else complete).update({name: value} | changed)
    return shorter, complete


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_field_that_is_left_out_has_the_default_of_transformers(name):
    fields = json.loads((goldens.DIRECTORY / name / "config.json").read_text())
    wrong = {}
    for path, changed in DEFAULTS[name].items():
        shorter, complete = map(config_of, without(fields, path, changed))
        refused = isinstance(shorter, str) and "is missing" in shorter
        if shorter != complete and not refused and (name, path) not in OTHERS:
            wrong[path] = shorter if isinstance(shorter, str) else changed
    assert wrong == {}
