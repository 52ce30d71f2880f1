"""Each field of `config.json`: left out, it means what it means to transformers; with another value, it has an effect.

The goldens are made by `goldens/make_default_goldens.py` and `goldens/make_field_goldens.py`.
"""

import copy
import json

import pytest

from jaxinfer.models.families import FAMILIES
from jaxinfer.models.files.conversion import describe_fields
from tests.models import goldens

OTHERS = {("mistral3_awkward", "tie_word_embeddings"), ("mistral3_text", "tie_word_embeddings")}
"""Defaults that differ: Mistral Small 3.1 has a head of its own, and no field that says so."""
FIELDS = json.loads((goldens.DIRECTORY / "fields.json").read_text())
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


def with_value(fields, path, value):
    """The fields with one changed, which may be inside of another."""
    name, *inner = path
    return fields | {name: with_value(fields.get(name) or {}, inner, value) if inner else value}


def test_the_fields_of_every_golden_are_known():
    assert FIELDS.keys() == DEFAULTS.keys() == {*goldens.NAMES}


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_field_that_is_left_out_has_the_default_of_transformers(name):
    fields = goldens.read_config(name)
    wrong = {}
    for path, changed in DEFAULTS[name].items():
        shorter, complete = map(config_of, without(fields, path, changed))
        refused = isinstance(shorter, str) and "is missing" in shorter
        if shorter != complete and not refused and (name, path) not in OTHERS:
            wrong[path] = shorter if isinstance(shorter, str) else changed
    assert wrong == {}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_that_changes_transformers_result_changes_the_config_or_is_refused(name):
    folder, ignored = goldens.DIRECTORY / name, []
    fields = goldens.read_config(name)
    plain = describe_fields(folder, fields)
    for field, value in FIELDS[name].items():
        try:
            ignored += [field] if describe_fields(folder, with_value(fields, field.split("/"), value)) == plain else []
        except ValueError:  # refused: other tests read the messages
            continue
    assert ignored == []
