"""The options of an engine: one list, typed, and fixed once the engine is made."""

import dataclasses
import typing

import numpy as np
import pytest

from jaxinfer.generation.engine.config import EncoderEngineConfig, EngineConfig, EngineOptions


def test_options_are_the_fields_of_the_configs_with_their_types():
    fields = {}
    for kind in (EngineConfig, EncoderEngineConfig):
        hints = typing.get_type_hints(kind)  # without their limits
        fields |= {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    assert typing.get_type_hints(EngineOptions) == {
        name: kind for name, kind in fields.items() if name not in ("max_batch", "context")
    }


def test_a_config_and_an_engine_cannot_be_changed(llm):
    with pytest.raises(dataclasses.FrozenInstanceError):
        llm.engine.config.overlap = False
    with pytest.raises(AttributeError):
        llm.engine.config = EngineConfig(max_batch=1, context=64)


def test_integers_of_numpy_are_integers():
    config = EngineConfig(max_batch=np.int64(2), context=np.int32(64), chunk_size=np.uint8(16), overlap=np.False_)
    assert config == EngineConfig(max_batch=2, context=64, chunk_size=16, overlap=False)
    assert {type(getattr(config, name)) for name in ("max_batch", "context", "chunk_size")} == {int}
    assert type(config.overlap) is bool


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        *(("max_batch", 2.0, "an integer"), ("context", "64", "an integer"), ("chunk_size", True, "an integer")),
        *(("page_size", None, "an integer"), ("max_lora_rank", np.zeros(1), "an integer")),
        ("max_adapters", 1.5, "an integer"),
        *(("overlap", 1, "True or False"), ("prefix_caching", "no", "True or False")),
    ],
)
def test_other_types_are_refused_by_the_name_of_the_field(name, value, wanted):
    with pytest.raises(ValueError, match=rf"EngineConfig.{name} must be {wanted}.*, got "):
        EngineConfig(**{"max_batch": 2, "context": 64, name: value})


def test_options_of_the_other_kind_of_model_are_refused_unless_they_are_off():
    config = EncoderEngineConfig.from_options({"level": -2, "max_adapters": 0}, max_batch=2, context=64)
    assert config == EncoderEngineConfig(max_batch=2, context=64, level=-2)
    assert EngineConfig.from_options({"level": 0}, max_batch=2, context=64) == EngineConfig(max_batch=2, context=64)
    with pytest.raises(
        ValueError,
        match=r"^EncoderEngineConfig.page_size=8 is for decoders, and this model is an encoder: leave it out",
    ):
        EncoderEngineConfig.from_options({"page_size": 8}, max_batch=2, context=64)
