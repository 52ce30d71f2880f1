"""The options of an engine: one list, typed, and fixed once the engine is made."""

import dataclasses
import typing

import pytest

from jaxinfer.generation.engine.config import EngineConfig, EngineOptions


def test_options_are_the_fields_of_the_config_with_their_types():
    fields = typing.get_type_hints(EngineConfig)
    assert typing.get_type_hints(EngineOptions) == {
        name: kind for name, kind in fields.items() if name not in ("max_batch", "context")
    }


def test_a_config_and_an_engine_cannot_be_changed(llm):
    with pytest.raises(dataclasses.FrozenInstanceError):
        llm.engine.config.overlap = False
    with pytest.raises(AttributeError):
        llm.engine.config = EngineConfig(max_batch=1, context=64)
