"""Reading Hugging Face configs and tensor lists: what is understood, and what is refused with which words."""

import contextlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from jaxinfer.checkpoints.huggingface import read_json
from jaxinfer.models import WeightFormat
from jaxinfer.models.config import AttentionConfig, BlockKind, PositionKind, RopeScaling
from jaxinfer.models.families import FAMILIES, STATE_DICTS, family_of, gemma2, mapping, plan
from jaxinfer.models.families.fields import surveyed
from jaxinfer.models.files.conversion import describe_fields
from jaxinfer.models.layers.rotary import rotary_frequencies
from tests.models import goldens, vision


def config_of(name: str, **changes):
    hf = goldens.read_config(name) | changes
    return family_of(hf).config(hf)


def test_every_family_has_two_goldens():
    counts = dict.fromkeys((*FAMILIES, *(name for family in STATE_DICTS for name in family.model_types)), 0)
    for name in goldens.NAMES:
        counts[goldens.read_config(name)["model_type"]] += 1
    for name in vision.GOLDENS:
        of_bare = name.rpartition("_")[0].replace("torchvision", "torchvision_resnet")
        counts[read_json(vision.DIRECTORY / name / "config.json").get("model_type", of_bare)] += 1
    assert min(count for name, count in counts.items() if name not in ALONE) >= 2, counts


def shapes_of(name: str) -> dict[str, tuple[int, ...]]:
    """The shapes of a golden's tensors."""
    with safe_open(goldens.DIRECTORY / name / "model.safetensors", "np") as file:
        return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118


ALONE = {"qwen3_5_text": "qwen3_5_plain", "qwen3_5_moe_text": "qwen3_5_moe_plain"}
"""Families of text parts that are published without the others -> a golden of the whole."""


@pytest.mark.parametrize("model_type", ALONE)
def test_a_text_part_alone_is_that_of_the_whole(model_type):
    name = ALONE[model_type]
    text = goldens.read_config(name)["text_config"] | {"model_type": model_type}
    shapes = shapes_of(name)
    alone = {key.replace("model.language_model.", "model."): shape for key, shape in shapes.items()}
    alone = {key: shape for key, shape in alone.items() if "visual" not in key}
    family, config = family_of(text), family_of(text).config(text)
    assert config == goldens.config_of(name)
    assert plan(family, config, alone).keys() == plan(family, config, shapes).keys()


def test_gemma_4_without_fields_is_as_in_transformers():
    fields = ("layer_types", "per_layer_config", "rope_parameters")
    config = config_of("gemma4_text_plain", **dict.fromkeys(fields), num_hidden_layers=7)
    kinds = [config.layer(layer).attention for layer in range(7)]
    assert [(kind.window, kind.head_dim) for kind in kinds] == [*[(5, 8)] * 5, *[(None, 512)] * 2]
    assert (kinds[5].positions.theta, kinds[5].positions.turning_pairs, kinds[0].positions.theta) == (1e6, 64, 1e4)
    frequencies = rotary_frequencies(kinds[5].positions)
    assert len(frequencies) == 256
    assert not frequencies[64:].any()
    np.testing.assert_allclose(frequencies[:64], 1e6 ** (-np.arange(64) / 256), rtol=1e-6)


GEMMA_4 = "gemma4_text_awkward"
"""Its last three layers use the keys and values of others."""


def test_unused_keys_of_gemma_4_are_ignored():
    family, config, shapes = family_of(goldens.read_config(GEMMA_4)), config_of(GEMMA_4), shapes_of(GEMMA_4)
    unused = {f"model.layers.5.self_attn.{name}.weight": (12, 24) for name in ("k_proj", "v_proj", "k_norm")}
    assert plan(family, config, shapes | unused).keys() == plan(family, config, shapes).keys()


def test_olmo_hybrid_without_fields_is_as_in_transformers():
    widths = dict.fromkeys(f"linear_{name}" for name in ("num_key_heads", "num_value_heads", "key_head_dim"))
    config = config_of("olmo_hybrid_plain", **widths, linear_value_head_dim=None, layer_types=None, num_hidden_layers=3)
    mixer = config.layer(0).mixer
    assert (mixer.key_heads, mixer.value_heads, mixer.key_dim, mixer.value_dim) == (4, 4, 4, 8)
    assert [config.layer(layer).has_attention for layer in range(3)] == [False, False, True]
    assert (mixer.negative_eigenvalues, mixer.norm_eps, config.norm.eps) == (True, 1e-5, 1e-6)
    for rope in ({"rope_parameters": {"rope_theta": None}}, {"rope_parameters": None, "rope_theta": None}):
        assert config_of("olmo_hybrid_plain", **rope).layer(3).positions.kind is PositionKind.NONE
    assert config_of("olmo_hybrid_plain", rope_parameters=None).layer(3).positions.kind is PositionKind.ROTARY


def test_joined_tensors_may_be_divided_in_any_way():
    """transformers saves OLMo Hybrid's convolution in three equal parts, though those published are of q, k and v."""
    name, part = "olmo_hybrid_plain", "model.layers.0.linear_attn.{}_conv1d.weight"
    family, config, shapes = family_of(goldens.read_config(name)), config_of(name), shapes_of(name)
    published = {part.format(x): (rows, 1, 4) for x, rows in zip("qkv", (24, 24, 40), strict=True)}
    assert shapes.items().isdisjoint(published.items())
    assert plan(family, config, shapes | published).keys() == plan(family, config, shapes).keys()
    with pytest.raises(
        ValueError, match=r"3 mis-shaped: .*k_conv1d.weight is \[30, 1, 4\], the config needs \[24, 1, 4\]"
    ):
        plan(family, config, shapes | {part.format("q"): (31, 1, 4)})


@pytest.mark.parametrize("hf", [{}, {"model_type": "ctrl"}, {"model_type": ["llama"]}])
def test_unknown_model_type_names_the_known(hf):
    with pytest.raises(ValueError, match=r"model_type=.*not implemented; known: afmoe, .*roberta"):
        family_of(hf)


STRETCHED = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 1.0, "alpha": 1000.0}
ROPE = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt2_tied", {"add_cross_attention": True}, "add_cross_attention=True"),
        ("gpt2_tied", {"activation_function": "quick_gelu"}, "activation_function='quick_gelu'.*known: gelu"),
        ("gpt2_tied", {"n_head": 5}, "24 is not a multiple of the 5 heads"),
        ("gpt_neo_alternating", {"num_layers": 3}, "attention_types=.*each of 3 layers"),
        ("gpt_neo_alternating", {"attention_types": [[["strided"], 2]]}, "attention_types=.*must name global or local"),
        ("gptj_partial", {"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ("bloom_tied", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post"),
        ("llama_linear", {"quantization_config": {"bits": 4}}, "quantization_config.*unquantised checkpoint"),
        ("llama_linear", {"rope_scaling": {"type": "axial", "factor": 2.0}}, "rope_scaling.rope_type='axial'"),
        ("llama_linear", {"rope_scaling": {"type": "linear", "factor": "2"}}, "factor='2' must be of type float"),
        ("llama_linear", {"rope_scaling": {"type": "linear"}}, "factor is missing"),
        (
            "llama_yarn",
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            "rope_parameters and rope_scaling differ; put what rope_scaling has into rope_parameters, and remove",
        ),
        ("llama_linear", {"hidden_act": "mish"}, "hidden_act='mish'"),
        ("llama_linear", {"hidden_size": None}, "hidden_size is missing"),
        ("llama_linear", {"hidden_size": "24"}, "hidden_size='24' must be of type int"),
        ("llama_linear", {"num_hidden_layers": True}, "num_hidden_layers=True must be of type int"),
        (
            "llama_yarn",
            {"rope_parameters": ROPE | {"mrope_section": [2]}},
            r"rope_parameters contains \['mrope_section'\]",
        ),
        (
            "llama_yarn",
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": False}},
            "truncate=False is not implemented",
        ),
        ("llama_linear", {"rms_norm_eps": -1.0}, r"NormConfig.eps must be in \[0, 1\), got -1.0"),
        ("llama_linear", {"rope_theta": -1.0}, "rope_theta=-1.0 must be > 0"),
        ("llama_linear", {"rope_scaling": []}, r"rope_scaling=\[\] must be of type dict"),
        ("llama_linear", {"rope_scaling": {"type": "linear", "factor": 0}}, "factor=0.0 must be > 0"),
        (
            "llama_linear",
            {"rope_scaling": {"type": "llama3", "factor": 2, "low_freq_factor": 1, "high_freq_factor": 1}},
            "low_freq_factor=1.0 must be > 0 and less than high_freq_factor=1.0",
        ),
        ("gemma2_window", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping=0.0 must be > 0"),
        ("gemma2_window", {"final_logit_softcapping": -1}, "final_logit_softcapping=-1.0 must be > 0"),
        ("mistral_window", {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ("qwen2_window", {"layer_types": []}, "layer_types has 0 entries for 2 layers"),
        ("qwen2_window", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
        ("qwen2_window", {"layer_types": ["linear_attention"] * 2}, r"layer_types contains \['linear_attention'\]"),
        ("gemma2_window", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        (
            "phi3_window",
            {"rope_parameters": None, "rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            "long_factor is missing",
        ),
        ("phi_parallel", {"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ("falcon_two_norms", {"parallel_attn": False}, "parallel_attn=False is not implemented"),
        ("falcon_two_norms", {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn=3 is not implemented"),
        ("falcon_multi_query", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn=2 is not implemented"),
        ("falcon_alibi", {"num_kv_heads": 2}, "num_kv_heads=2 is not implemented, only 6"),
        ("phi3_partial", {"lm_head_bias": True}, "lm_head_bias=True is not implemented"),
        ("phi3_partial", {"rope_parameters": ROPE}, "rope_type='linear' is not implemented in phi3"),
        ("mistral3_text", {"text_config": None}, "text_config is missing"),
        (
            "mistral3_text",
            {"text_config": {"model_type": "ministral"}},
            "text_config.model_type='ministral' is not impl",
        ),
        (
            "phi3_longrope",
            {
                "rope_parameters": None,
                "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0, 2.0]},
            },
            "for each of 3 feature pairs, got .1, 2.",
        ),
        (
            "phi3_longrope",
            {"rope_scaling": None, "rope_parameters": {"rope_type": "longrope", "short_factor": [0.0]}},
            "short_factor=.0.0. must be a list of positive numbers",
        ),
        ("gemma3_text_window", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("gemma3_text_window", {"rope_parameters": ROPE}, "rope_parameters has .*full_attention.*their own"),
        ("gemma_plain", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma4_text_plain", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is not impl"),
        ("gemma4_text_plain", {"per_layer_config": {"1": {"sliding_window": 9}}}, "sliding_window in per_layer_config"),
        ("gemma4_text_plain", {"num_kv_shared_layers": 6}, "shares_kv of layer 0: no layer before it"),
        ("gemma4_text_awkward", {"vocab_size_per_layer_input": 99}, "vocab_size_per_layer_input=99 is not implemented"),
        (
            "exaone4_awkward",
            {"layer_types": None, "sliding_window_pattern": "LLLG"},
            "sliding_window_pattern='LLLG' must be of type int",
        ),
        ("minimax_m2_plain", {"scoring_func": "softmax"}, "scoring_func='softmax' is not implemented"),
        ("minimax_m2_plain", {"use_qk_norm": False}, "use_qk_norm=False is not implemented"),
        (
            "exaone_moe_awkward",
            {"mlp_layer_types": ["moe"] * 3},
            r"mlp_layer_types contains \['moe'\], not implemented",
        ),
        ("hy_v3_plain", {"route_norm": False}, "route_norm=False is not implemented"),
        ("hy_v3_plain", {"qk_norm": False}, "qk_norm=False is not implemented"),
        ("ernie4_5_moe_plain", {"moe_norm_min": 0.5}, "moe_norm_min=0.5 is not implemented"),
        ("ernie4_5_moe_plain", {"use_bias": True}, "tie_word_embeddings=True is not implemented.*its head has a bias"),
        ("cwm_plain", {"attention_bias": True}, "attention_bias=True is not implemented"),
        ("solar_open_plain", {"use_qk_norm": True}, "use_qk_norm=True is not implemented"),
        ("olmo_hybrid_plain", {"hidden_act": "gelu"}, "hidden_act='gelu' is not implemented, only 'silu'"),
        ("solar_open_plain", {"first_k_dense_replace": 1}, "first_k_dense_replace=1 is not implemented"),
        ("mellum_plain", {"rope_parameters": ROPE}, "rope_parameters has .*full_attention.*their own"),
        ("hunyuan_v1_dense_plain", {"use_cla": True}, "use_cla=True is not implemented"),
        ("hunyuan_v1_dense_plain", {"use_qk_norm": False}, "use_qk_norm=False is not implemented"),
        ("hunyuan_v1_dense_plain", {"rope_parameters": STRETCHED | {"alpha": -1.0}}, "alpha=-1.0 must be in"),
        ("hunyuan_v1_moe_awkward", {"moe_topk": [3, 2]}, "moe_topk differs between layers, which is not implemented"),
        ("hunyuan_v1_moe_awkward", {"moe_topk": [3]}, "moe_topk has 1 entries for 2 layers"),
        ("afmoe_plain", {"score_func": "softmax"}, "score_func='softmax' is not implemented"),
        ("arcee_plain", {"hidden_act": "xielu"}, "hidden_act='xielu' is not implemented"),
        ("smollm3_awkward", {"no_rope_layers": [0]}, "no_rope_layers has 1 entries for 3 layers"),
        ("bert_pooled", {"is_decoder": True}, "is_decoder=True"),
        ("bert_pooled", {"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
    ],
)
def test_refusals_name_field_and_value(name, changes, message):
    with pytest.raises(ValueError, match=message):
        config_of(name, **changes)


@pytest.mark.parametrize("name", goldens.NAMES)
def test_a_field_that_changes_which_tokens_are_seen_is_refused(name, tmp_path):
    """Of any family: decoders see earlier tokens, encoders all."""
    causal, hf = name in goldens.DECODERS, goldens.read_config(name)
    describe_fields(tmp_path, hf | {"is_causal": causal})
    text = {"text_config": hf["text_config"] | {"is_causal": False}} if "text_config" in hf else {}
    for changes in ({"is_causal": not causal}, text):
        if changes:
            with pytest.raises(ValueError, match=f"is_causal={not causal} is not implemented, only {causal}"):
                describe_fields(tmp_path, hf | changes)


JSON_VALUES = (
    *(None, True, -1, 0, 2**31 - 1, 10**20, 1.5, -0.5, 1e308, float("inf"), "x" * 1000),
    *([], [1], [None, "x"], [0, 0, 0], {}, {"a": 1}, {"a": [1] * 1000}),
)


BY_FAMILY = sorted(goldens.NAMES, key=lambda name: goldens.read_config(name)["model_type"])


@pytest.mark.parametrize(("turn", "name"), [*enumerate(BY_FAMILY)])
def test_any_json_in_any_field_is_read_or_refused_in_one_line(turn, name):
    """No other error than ValueError, in fields of `rope_parameters` and `text_config` too.

    Alone and in a survey: a family's goldens take turns.
    """
    hf, messages = goldens.read_config(name), []
    absent = ("rope_scaling", "layer_types", "head_dim", "sliding_window_pattern", "no_rope_layer_interval")
    places = [(hf, field) for field in {*hf, *absent} - {"model_type"}]
    places += [(part, field) for part in hf.values() if isinstance(part, dict) for field in part]
    for part, field in places:
        before = dict(part)
        for value in JSON_VALUES:
            part[field] = value
            try:
                with surveyed() if turn % 2 else contextlib.nullcontext():
                    family_of(hf).config(hf)
            except ValueError as error:
                messages.append(str(error))
        part.clear()
        part |= before
    assert messages
    assert not any("\n" in message or len(message) > 500 for message in messages)


@pytest.mark.parametrize("name", ["dots1_awkward", "qwen3_moe_awkward", "mixtral_awkward"])
def test_more_experts_than_any_model_has_are_refused(name):
    """Before a name is made for each of them."""
    hf = goldens.read_config(name)
    field = next(field for field in ("n_routed_experts", "num_local_experts", "num_experts") if field in hf)
    with pytest.raises(ValueError, match=r"DecoderConfig has \d+ experts; models of at most 131072 are known"):
        config_of(name, **{field: 2**30})


def test_a_survey_collects_all_that_is_refused():
    changes = {
        "hidden_act": "mish",
        "quantization_config": {"bits": 4},
        "rope_parameters": ROPE | {"rope_type": "axial"},
        "layer_types": ["linear_attention"] * 2,
    }
    with surveyed() as survey:
        assert config_of("qwen2_window", **changes).layers == 2
    assert [message.split(": ")[1].split("=")[0] for message in survey.refused] == [
        "quantization_config",
        "rope_parameters.rope_type",
        "hidden_act",
        "layer_types contains ['linear_attention'], not implemented; known",
    ]
    assert survey.expected["is_encoder_decoder"] is False
    with pytest.raises(ValueError, match="quantization_config"):
        config_of("qwen2_window", **changes)


def test_old_and_new_rope_spellings_agree():
    new = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    old = {key: value for key, value in new.items() if key not in ("rope_theta", "rope_type")} | {"type": "llama3"}
    modern = config_of("llama_llama3", rope_parameters=new)
    assert modern == config_of("llama_llama3", rope_parameters=None, rope_theta=500_000, rope_scaling=old)
    assert modern.positions[0].scaling == RopeScaling(kind="llama3", factor=8.0, original_context=16)
    assert modern.positions[0].theta == 500_000.0
    assert modern == config_of("llama_llama3", rope_parameters=new | {"max_position_embeddings": 64})


def test_yarn_attention_factor():
    def factor(**fields):
        rope = {"rope_type": "yarn", "factor": 4.0} | fields
        return config_of("llama_yarn", rope_parameters=rope).positions[0].scaling.attention_factor

    assert factor() == pytest.approx(0.1 * np.log(4) + 1)
    ratio = config_of("llama_yarn").context / 16
    assert factor(factor=None, original_max_position_embeddings=16) == pytest.approx(0.1 * np.log(ratio) + 1)
    assert factor(attention_factor=1.5) == 1.5
    assert factor(mscale=2.0, mscale_all_dim=1.0) == pytest.approx((0.2 * np.log(4) + 1) / (0.1 * np.log(4) + 1))


def test_dynamic_scaling_is_of_longer_texts_than_any_request():
    assert config_of("granite_awkward").positions == config_of("granite_awkward", rope_scaling=None).positions


def test_longrope_depends_on_the_engine_s_context():
    config = config_of("phi3_longrope")
    short, long = config.for_context(8), config.for_context(9)
    assert long == config != short
    assert rotary_frequencies(*short.positions)[2] == pytest.approx(rotary_frequencies(*long.positions)[2] * 16 / 1.3)
    assert config_of("llama_yarn").for_context(8) == config_of("llama_yarn")


def test_layers_have_positions_of_their_own():
    config = config_of("smollm3_plain")
    rotary, none = config.positions
    assert [kind.attention.positions for kind in config.pattern] == [rotary, rotary, rotary, none]
    assert (rotary.kind, none.kind) == (PositionKind.ROTARY, PositionKind.NONE)
    assert config.layer_kinds == (0, 0, 0, 3, 0)
    local, full = config_of("gemma3_text_awkward").positions
    assert (local.theta, full.theta) == (10_000.0, 1_000_000.0)
    assert config_of("olmo3_window").layer(0).attention.positions.scaling is None


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("qwen2_tied", [None]),
        ("qwen2_window", [None, 4]),
        ("mistral_window", [5]),
        ("gemma2_awkward", [3, None]),
        ("gpt_neo_awkward", [3, 3, None]),
        ("exaone4_awkward", [None, 3]),
        ("exaone4_plain", [None]),
        ("ministral_awkward", [4, None]),
        ("exaone_moe_plain", [5, None]),
        ("vaultgemma_awkward", [3, None]),
        ("cwm_awkward", [None, 4, 4, 4]),
        ("mellum_awkward", [None, 3]),
        ("qwen2_5_vl_awkward", [None, 4]),
    ],
)
def test_windows(name, windows):
    assert [kind.attention.window for kind in config_of(name).pattern] == windows


def test_in_exaone_only_layers_with_a_window_have_positions():
    config = config_of("exaone4_awkward")
    assert [kind.attention.positions.kind for kind in config.pattern] == ["none", "rotary"]
    assert [positions.kind for positions in config_of("exaone4_plain").positions] == ["rotary"]
    default = config_of("exaone4_awkward", layer_types=None, num_hidden_layers=5)
    assert [default.layer(i).attention.window for i in range(5)] == [3, 3, 3, None, 3]


def test_a_text_s_positions_are_not_divided_into_axes():
    assert "mrope_section" in goldens.read_config("qwen3_vl_plain")["text_config"]["rope_parameters"]
    (positions,) = config_of("qwen3_vl_plain").positions
    assert (positions.theta, positions.rotary_dim, positions.scaling) == (500_000.0, 8, None)


def test_the_text_part_s_fields_may_stand_beside_the_others():
    flat = goldens.read_config("qwen2_5_vl_awkward")
    assert flat["rope_scaling"]["type"] == "mrope"
    assert "text_config" not in flat
    text = {name: value for name, value in flat.items() if name not in ("model_type", "vision_config")}
    nested = {"model_type": "qwen2_5_vl", "text_config": text | {"model_type": "qwen2_5_vl_text"}}
    assert family_of(nested).config(nested) == config_of("qwen2_5_vl_awkward")


def test_positions_of_cwm_are_scaled_unless_a_config_says_otherwise():
    scaling = config_of("cwm_plain", rope_parameters=None).positions[0].scaling
    assert (scaling.kind, scaling.factor, scaling.original_context) == ("llama3", 16.0, 8192)
    assert config_of("cwm_plain", rope_parameters={"rope_type": "default"}).positions[0].scaling is None


def test_alpha_stretches_the_rotation_of_hunyuan():
    positions = config_of("hunyuan_v1_dense_plain", rope_parameters=STRETCHED).positions[0]
    assert positions.theta == pytest.approx(10_000 * 1000 ** (8 / 6))
    assert positions.scaling is None
    assert config_of("hunyuan_v1_dense_awkward").positions[0].theta == 10_000.0


def test_ministral_3_may_be_the_text_part_of_a_model_that_sees():
    alone, whole = goldens.read_config("ministral3_plain"), {"model_type": "mistral3", "tie_word_embeddings": False}
    config = family_of(whole).config(whole | {"text_config": alone})
    assert config == config_of("ministral3_plain")
    temperature = config.layer(0).attention.query_temperature
    assert (temperature.beta, temperature.original_context) == (0.3, 16)


def test_gelu_means_its_tanh_approximation_in_gemma():
    for name in ("gelu", None, "gelu_pytorch_tanh"):
        assert config_of("gemma_plain", hidden_act=name).layer(0).mlp.activation == "gelu_tanh"


def test_a_number_of_rotated_features_may_stand_for_their_share():
    config = config_of("minimax_m2_awkward")
    assert config == config_of("minimax_m2_awkward", partial_rotary_factor=None, rotary_dim=4)
    assert config.layer(0).attention.positions.rotary_dim == 4


def test_neox_without_parallel_residual_is_sequential():
    assert config_of("gpt_neox_parallel").layer(0).block is BlockKind.PARALLEL_TWO_NORMS
    assert config_of("gpt_neox_sequential").layer(0).block is BlockKind.SEQUENTIAL


# The tensors of a checkpoint.


def tensors_of(name: str):
    hf = goldens.read_config(name)
    family = family_of(hf)
    config = family.config(hf)
    shapes = {}
    for source in family.sources(config).values():
        shapes |= dict(zip(source.names, source.shapes, strict=True))
    return family, config, shapes


@pytest.mark.parametrize(
    ("name", "prefix"), [("llama_yarn", "model."), ("opt_awkward", "decoder."), ("bert_pooled", "")]
)
def test_plan_gives_the_checkpoint_s_own_names(name, prefix):
    family, config, shapes = tensors_of(name)
    resolved = plan(family, config, {prefix + key: shape for key, shape in shapes.items()})
    used = {key for source in resolved.values() for key in source.names}
    assert used == {prefix + key for key in shapes}


def test_plan_lists_every_problem_at_once():
    family, config, shapes = tensors_of("llama_yarn")
    shapes["norm.weight"] = (7,)
    shapes["layers.0.mlp.up_proj.weight"] = (1, 2)
    del shapes["lm_head.weight"], shapes["layers.1.self_attn.k_proj.weight"]
    shapes |= {"layers.2.input_layernorm.weight": (24,), "score.weight": (2, 24)}
    with pytest.raises(ValueError, match="do not fit a llama") as error:
        plan(family, config, shapes)
    message = str(error.value)
    assert "2 missing: " in message
    assert "lm_head.weight" in message
    assert "layers.1.self_attn.k_proj.weight" in message
    assert "2 unexpected: layers.2.input_layernorm.weight, score.weight" in message
    assert "layers.0.mlp.up_proj.weight is [1, 2], the config needs [40, 24]" in message
    assert "norm.weight is [7], the config needs [24]" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "leftovers"),
    [
        ("gpt2_tied", ["lm_head.weight", "h.0.attn.bias", "transformer.h.1.attn.masked_bias"]),
        ("gpt_neo_alternating", ["transformer.h.0.attn.attention.bias", "transformer.h.0.attn.attention.masked_bias"]),
        ("gptj_partial", ["transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"]),
        ("gpt_neox_parallel", ["gpt_neox.layers.0.attention.bias", "gpt_neox.layers.0.attention.rotary_emb.inv_freq"]),
        ("opt_tied", ["lm_head.weight", "decoder.version"]),
        ("bloom_tied", ["lm_head.weight"]),
        ("llama_linear", ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"]),
        ("bert_pooled", ["bert.embeddings.position_ids", "pooler.dense.weight", "cls.seq_relationship.bias"]),
        ("distilbert_plain", ["vocab_transform.weight", "vocab_layer_norm.bias"]),
        ("roberta_plain", ["roberta.embeddings.position_ids", "lm_head.dense.weight", "lm_head.bias"]),
    ],
)
def test_leftovers_are_expected(name, leftovers):
    family, config, shapes = tensors_of(name)
    assert plan(family, config, shapes | dict.fromkeys(leftovers, (1,)))


def test_two_spellings_of_one_tensor_are_refused():
    family, config, shapes = tensors_of("llama_yarn")
    with pytest.raises(ValueError, match=r"1 unexpected: norm\.weight"):
        plan(family, config, shapes | {"model.norm.weight": (24,)})


# The order of rows.

heads = st.integers(1, 3)


@given(kv_heads=heads, group=heads, head_dim=st.sampled_from([2, 4, 6]), inputs=st.sampled_from([(), (3,)]))
def test_rows_by_kv_head(kv_heads, group, head_dim, inputs):
    attention = AttentionConfig(q_heads=kv_heads * group, kv_heads=kv_heads, head_dim=head_dim)
    q, k, v = (
        np.random.default_rng(i).normal(size=(n, *inputs)).astype(ml_dtypes.bfloat16)
        for i, n in enumerate(mapping.qkv_rows(attention))
    )
    fused = mapping.by_kv_head(attention)(q, k, v)
    assert fused.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(fused, mapping.by_kv_head_from_fused(attention)(np.concatenate((q, k, v))))
    blocks = fused.reshape(kv_heads, group + 2, head_dim, *inputs)
    for head in range(kv_heads):
        for member in range(group):
            query = (head * group + member) * head_dim
            np.testing.assert_array_equal(blocks[head, member], q[query : query + head_dim])
        rows = np.s_[head * head_dim : (head + 1) * head_dim]
        np.testing.assert_array_equal(blocks[head, group], k[rows])
        np.testing.assert_array_equal(blocks[head, group + 1], v[rows])


@given(hidden=st.integers(1, 5), inputs=st.sampled_from([(), (3,)]))
def test_gate_and_up_alternate(hidden, inputs):
    gate, up = np.random.default_rng(0).normal(size=(2, hidden, *inputs))
    both = mapping.alternate(gate, up)
    np.testing.assert_array_equal(both[0::2], gate)
    np.testing.assert_array_equal(both[1::2], up)
    np.testing.assert_array_equal(both, mapping.alternate_from_fused(np.concatenate((gate, up))))


@given(count=heads, head_dim=st.sampled_from([4, 6, 8]), rotary=st.integers(1, 4))
def test_pairs_become_halves(count, head_dim, rotary):
    rotary_dim = min(2 * rotary, head_dim)
    names = np.array([(head, feature) for head in range(count) for feature in range(head_dim)])
    moved = mapping.pairs_to_halves(names, head_dim, rotary_dim).reshape(count, head_dim, 2)
    for head in range(count):
        assert (moved[head, :, 0] == head).all()
        for pair in range(rotary_dim // 2):
            assert moved[head, pair, 1] == 2 * pair
            assert moved[head, pair + rotary_dim // 2, 1] == 2 * pair + 1
        assert (moved[head, rotary_dim:, 1] == np.arange(rotary_dim, head_dim)).all()


def test_gemma_norms_are_summed_in_float32():
    weight = np.array([2**-9], ml_dtypes.bfloat16)  # 1 + weight needs more bits than bfloat16 has
    assert gemma2.one_plus(weight) == np.float32(1 + 2**-9)


def test_int8_has_a_scale_beside_every_matrix_it_multiplies():
    golden = goldens.load("llama_yarn")
    shapes = goldens.leaf_shapes(goldens.abstract(golden.config, WeightFormat(quantized="int8")))
    matrices = [leaf for leaf, array in golden.leaves.items() if array.ndim == 2]
    assert all(f"{leaf.rpartition('.')[0]}.scale" in shapes for leaf in matrices)
