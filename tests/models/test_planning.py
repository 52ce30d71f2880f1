"""The planner's shape of a config."""

import dataclasses

import pytest

from jaxinfer.generation.engine.config import SNAPSHOTS_PER_SEQUENCE
from jaxinfer.models import config as c
from jaxinfer.models.planning import shape_of
from jaxinfer.models.presets import parameter_count
from jaxinfer.sharding.planner.memory import SNAPSHOTS
from tests.tiny import CONFIG, HYBRID

ROUTER = c.RouterConfig(experts=4, experts_per_token=2)
MIXTURE = dataclasses.replace(CONFIG.layer(0).mlp, moe=c.MoeConfig(router=ROUTER, shared_hidden=16))


@pytest.mark.parametrize("layers", [1, 3])
def test_parameters_are_those_of_the_model_but_norms_and_biases(layers):
    config = dataclasses.replace(CONFIG, layers=layers)
    assert shape_of("tiny", config).params == pytest.approx(parameter_count(config), rel=0.05)


def test_kinds_of_layers_are_counted():
    config = dataclasses.replace(CONFIG, layers=5).with_windows((8, None)).with_mlps((MIXTURE, CONFIG.layer(0).mlp))
    shape = shape_of("tiny", config)
    assert {(bool(layer.experts), layer.window): layer.count for layer in shape.layers} == {
        (True, 8): 3,
        (False, None): 2,
    }
    mixture = next(layer for layer in shape.layers if layer.experts)
    assert (mixture.experts, mixture.chosen) == (4, 2)
    assert shape.params == pytest.approx(parameter_count(config), rel=0.05)


def test_a_layer_with_a_recurrent_state_has_no_keys_and_values():
    shape, delta = shape_of("tiny", HYBRID), HYBRID.layer(0).mixer
    states = [layer.state_values + layer.conv_values for layer in shape.layers]
    assert [(layer.count, layer.kv_values, state) for layer, state in zip(shape.layers, states, strict=True)] == [
        (2, 0, delta.state_values),
        (1, HYBRID.layer(1).attention.kv_values, 0),
    ]
    assert shape.params == pytest.approx(parameter_count(HYBRID), rel=0.05)
    assert SNAPSHOTS == SNAPSHOTS_PER_SEQUENCE
