"""Configs refuse what makes no sense, and the formulas that they carry are right."""

import dataclasses
import math

import numpy as np
import pytest

from jaxinfer.checkpoints import CheckpointError
from jaxinfer.models.config import (
    NO_POSITIONS,
    Activation,
    AttentionConfig,
    BlockKind,
    EncoderConfig,
    GroupScore,
    LearnedPositions,
    MoeConfig,
    PositionKind,
    PositionsConfig,
    QueryTemperature,
    ResNetConfig,
    RopeScaling,
    RouterConfig,
    SharedMix,
    alibi_slopes,
)
from jaxinfer.models.families import gpt2
from jaxinfer.models.files.description import Description
from jaxinfer.models.layers.rotary import rotary_frequencies, rotary_table
from jaxinfer.models.presets import preset

LLAMA = preset("llama-213m")
LAYER = LLAMA.layer(0)
ROTARY = LAYER.attention.positions
TEMPERATURE = QueryTemperature(beta=0.1, original_context=16)
ROUTER = RouterConfig(experts=8, experts_per_token=3)
EXPERTS = dataclasses.replace(LAYER.mlp, moe=MoeConfig(router=ROUTER))
RESNET = ResNetConfig(labels=("a",), stem=8, widths=(8, 8), depths=(1, 1), bottleneck=False, image_size=8)


def change(part, **values):
    return lambda: dataclasses.replace(part, **values)


def encoder(**changes):
    """Makes an encoder with attention and MLP of a decoder."""
    attention = dataclasses.replace(LAYER.attention, **{"positions": NO_POSITIONS} | changes.pop("attention", {}))
    sizes = {"vocab": 8, "embed": 8, "layers": 1, "context": 8, "learned_positions": LearnedPositions()}
    fields = sizes | {"mlp": LAYER.mlp, "norm": LLAMA.norm, "attention": attention} | changes
    return lambda: EncoderConfig(**fields)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (change(LLAMA, vocab=0), r"DecoderConfig\.vocab must be >= 1, got 0"),
        (change(LLAMA, layers=-1), r"DecoderConfig\.layers must be >= 1, got -1"),
        (change(LLAMA, layers=10**9), "DecoderConfig has 1000000000 layers; models of at most 4096"),
        (change(RESNET, depths=(10**9, 1)), "ResNetConfig has 1000000001 layers"),
        (change(LAYER.attention, kv_heads=3), "q_heads=16 is not a multiple of kv_heads=3"),
        (change(LAYER.attention, window=0), r"AttentionConfig\.window must be None or >= 1, got 0"),
        (
            change(LAYER.attention, qk_norm_after_rope=True),
            "qk_norm_after_rope needs qk_norm=True and qk_norm_scope=head",
        ),
        (change(LAYER.attention, query_temperature=TEMPERATURE, qk_norm=True), "is not implemented with qk_norm=True"),
        (change(TEMPERATURE, original_context=0), r"QueryTemperature\.original_context must be >= 1, got 0"),
        (change(LAYER.mlp, activation=Activation.XIELU), "activation=xielu is not implemented in gated MLPs"),
        (change(ROTARY, rotary_dim=5), "rotary_dim must be even and >= 2, got 5"),
        (change(LAYER.attention, positions=dataclasses.replace(ROTARY, rotary_dim=66)), "larger than head_dim=64"),
        (change(LLAMA, pattern=()), r"DecoderConfig\.pattern must hold at least one kind of layer"),
        (change(LAYER.mlp, hidden=0), r"MlpConfig\.hidden must be >= 1"),
        (change(LLAMA, word_embed=0), r"DecoderConfig\.word_embed must be >= 1, got 0"),
        (change(LLAMA, tied=True, head_bias=True), "head_bias needs an untied head"),
        (change(ROUTER, experts=2), r"RouterConfig\.experts_per_token=3 is more than experts=2"),
        (change(ROUTER, experts_per_token=0), r"RouterConfig\.experts_per_token must be >= 1, got 0"),
        (change(ROUTER, groups=3), r"RouterConfig\.groups=3 must divide experts=8"),
        (change(ROUTER, groups=2, groups_per_token=3), "groups_per_token=3 be at most groups"),
        (change(ROUTER, groups=4), "groups_per_token=1 groups have 2 experts, fewer than experts_per_token=3"),
        (
            change(ROUTER, groups=8, groups_per_token=4, group_score=GroupScore.TOP_2_SUM),
            "group_score=top_2_sum needs groups of two experts or more",
        ),
        (change(ROUTER, capacity_factor=0.9), r"RouterConfig\.capacity_factor must be at least 1, got 0\.9"),
        (change(ROUTER, capacity_factor=math.nan), r"RouterConfig\.capacity_factor must be at least 1, got nan"),
        (change(EXPERTS.moe, shared_hidden=-1), r"MoeConfig\.shared_hidden must be >= 0, got -1"),
        (change(EXPERTS.moe, shared_mix=SharedMix.GATED), r"MoeConfig\.shared_mix=gated needs a shared MLP"),
        (change(LAYER, mlp=EXPERTS, block=BlockKind.PARALLEL), "block=parallel is not implemented with experts"),
        (encoder(mlp=EXPERTS), r"EncoderConfig\.mlp\.moe is not implemented: only decoders have experts"),
        (lambda: RopeScaling(kind="dynamic", factor=2.0), "kind='dynamic' is not implemented"),
        (lambda: RopeScaling(kind="yarn", factor=2.0), "original_context must be >= 1 for yarn"),
        (encoder(attention={"positions": ROTARY}), "kind=rotary is not implemented: positions are learned; use none"),
        (encoder(attention={"window": 4}), r"EncoderConfig\.attention\.window=4 is not implemented"),
    ],
)
def test_refusals_name_the_field(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_configs_are_hashable():
    assert hash(LLAMA) == hash(dataclasses.replace(LLAMA))


def test_an_unknown_kind_of_router_in_a_model_directory_is_refused(tmp_path):
    config = LLAMA.with_mlps((LAYER.mlp, EXPERTS))
    description = Description(family="mixtral", config=config, dtype="float32")
    (tmp_path / "config.json").write_bytes(description.to_json())
    assert Description.read(tmp_path) == description
    (tmp_path / "config.json").write_bytes(description.to_json().replace(b'"softmax"', b'"tanh"'))
    with pytest.raises(CheckpointError, match=r"config\.json: .*'tanh'.*router\.kind") as error:
        Description.read(tmp_path)
    assert "\n" not in str(error.value)


def test_kinds_cycle_over_layers():
    config = dataclasses.replace(LLAMA, layers=6).with_windows((None, 7)).with_mlps((LAYER.mlp, LAYER.mlp, EXPERTS))
    assert len(config.pattern) == 6
    assert [config.layer(i).attention.window for i in range(6)] == [None, 7] * 3
    assert config.moe_layers == (2, 5)
    assert config.layer_kinds == (0, 1, 2, 1, 0, 5)
    assert config.with_windows((7,)).layer_kinds == (0, 0, 2, 0, 0, 2)
    assert len(config.with_windows((7,)).pattern) == 3
    assert config.with_layers((5, 0)).pattern == (config.pattern[5], config.pattern[0])


def test_queries_have_no_temperature_in_an_engine_of_the_original_context():
    config = LLAMA.with_attention(query_temperature=TEMPERATURE)
    assert config.for_context(16) == LLAMA
    assert config.for_context(17) == config


def test_scores_are_divided_by_the_root_of_the_width_unless_a_scale_is_given():
    attention = AttentionConfig(q_heads=1, kv_heads=1, head_dim=4)
    assert attention.score_scale == 0.5
    assert dataclasses.replace(attention, scale=0.3).score_scale == 0.3


def test_gpt2_may_scale_scores_by_the_layer():
    fields = {"vocab_size": 8, "n_embd": 16, "n_layer": 3, "n_head": 4, "scale_attn_by_inverse_layer_idx": True}
    config, unscaled = (gpt2.FAMILY.config(fields | more) for more in ({}, {"scale_attn_weights": False}))
    assert [config.layer(i).attention.score_scale for i in range(3)] == [0.5, 0.5 / 2, 0.5 / 3]
    assert [unscaled.layer(i).attention.score_scale for i in range(3)] == [1.0, 1 / 2, 1 / 3]


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (1, [2**-8]),
        (8, [2**-i for i in range(1, 9)]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
        (12, [2**-i for i in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
    ],
)
def test_alibi_slopes(heads, expected):
    np.testing.assert_allclose(alibi_slopes(heads), expected, rtol=1e-12)


def frequency(pair: int, cfg: PositionsConfig) -> float:
    """One frequency, written from the papers pair by pair."""
    plain = cfg.theta ** (-2 * pair / cfg.rotary_dim)
    scaling = cfg.scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    rotations = scaling.original_context * plain / (2 * math.pi)  # within the trained context
    if scaling.kind == "llama3":
        if rotations > scaling.high_freq_factor:
            return plain
        if rotations < scaling.low_freq_factor:
            return plain / scaling.factor
        blend = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        return (1 - blend) * plain / scaling.factor + blend * plain

    def pair_with(rotations):  # solves rotations = context * theta^(-2 pair / dim) / 2 pi
        return cfg.rotary_dim / 2 * math.log(scaling.original_context / (2 * math.pi * rotations), cfg.theta)

    low = max(math.floor(pair_with(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_with(scaling.beta_slow)), cfg.rotary_dim - 1)
    interpolated = min(max((pair - low) / (high - low), 0), 1)
    return interpolated * plain / scaling.factor + (1 - interpolated) * plain


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        RopeScaling(kind="linear", factor=4.0),
        RopeScaling(kind="llama3", factor=8.0, original_context=8192),
        RopeScaling(kind="yarn", factor=16.0, original_context=4096),
    ],
)
def test_rotary_frequencies(scaling):
    cfg = PositionsConfig(kind=PositionKind.ROTARY, theta=500_000.0, rotary_dim=128, scaling=scaling)
    expected = [frequency(pair, cfg) for pair in range(64)]
    np.testing.assert_allclose(rotary_frequencies(cfg), expected, rtol=1e-6)


def test_yarn_multiplies_cos_and_sin():
    scaling = RopeScaling(kind="yarn", factor=4.0, original_context=64, attention_factor=1.25)
    cfg = PositionsConfig(kind=PositionKind.ROTARY, rotary_dim=8, scaling=scaling)
    cos, sin = rotary_table(cfg, np.arange(5)[None])
    np.testing.assert_allclose(cos**2 + sin**2, 1.25**2, rtol=1e-6)
