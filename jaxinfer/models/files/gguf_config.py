"""The architectures of GGUF files: their metadata as the fields of a `config.json`, and their tensors' names.

Pure: metadata and shapes in, fields and names out. The keys are listed in
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; what llama.cpp takes for granted is said where it is used.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxinfer.models.families import Shape

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER = {
    **_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXAONE_LAYER = {
    **{ours: theirs for ours, theirs in _LAYER.items() if ours not in ("attn_norm", "ffn_norm")},
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
EXPERTS_GATE_UP = "mlp.experts.gate_up_proj"
"""The gates and ups of all experts of a layer, [E, 2F, D], those of each with the gates first."""
_EXPERTS_LAYER = {
    **_LAYER,
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps.weight": EXPERTS_GATE_UP,
    "ffn_up_exps.weight": EXPERTS_GATE_UP,
    "ffn_gate_up_exps.weight": EXPERTS_GATE_UP,  # as newer versions of the converter write both, the gates first
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_DELTA_LAYER = {
    **{ours: theirs for ours, theirs in _EXPERTS_LAYER.items() if ours != "ffn_norm"},
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
}
_NEXT_LAYER = {
    **_DELTA_LAYER,
    "attn_qkv": "linear_attn.in_proj_qkvz",
    "attn_gate": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
}
_EXPERTS_KEYS = ("expert_count", "expert_used_count", "expert_feed_forward_length")
_SHARED_KEYS = (*_EXPERTS_KEYS, "expert_shared_feed_forward_length")
_DELTA_KEYS = (
    *("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size"),
    *("full_attention_interval", "nextn_predict_layers"),
    "rope.dimension_sections",  # positions in images have three axes, which are equal in texts
)
ROPE_FACTORS = "rope_freqs.weight"
"""By what the frequencies of Llama 3.1's rotary positions are divided; the other tensors have names in Hugging Face."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufArchitecture:
    """One value of `general.architecture`.

    Attributes:
      model_type: the family in Hugging Face's words.
      layer: the names of a layer's tensors in GGUF -> in Hugging Face's checkpoints.
      norm_offset: by how much norms are larger than in Hugging Face's checkpoints.
      rotates_pairs: whether rotated rows of queries and keys lie in pairs (2i, 2i + 1), not (i, i + head_dim / 2).
      has_delta_rules: whether layers have gated delta rules; in attention the first features of a head rotate.
      keys: what its metadata may have beside the keys of all.
    """

    model_type: str
    layer: Mapping[str, str] = dataclasses.field(default_factory=lambda: _LAYER)
    norm_offset: float = 0.0
    rotates_pairs: bool = False
    has_delta_rules: bool = False
    keys: tuple[str, ...] = ()

    def tensor_name(self, name: str) -> str:
        """The name in Hugging Face's checkpoints of a tensor in GGUF. Raises ValueError for an unknown one."""
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)(\.weight|\.bias|)", name)
        layer, part, kind = (None, "", "") if match is None else match.groups()
        table = _TOP if layer is None else self.layer
        theirs = table.get(part + kind) or (table[part] + kind if part in table else "")
        if not theirs:
            raise ValueError(f"the tensor {name!r} is not implemented for {self.model_type}; use a file without it.")
        return theirs if layer is None else f"model.layers.{layer}.{theirs}"


ARCHITECTURES = {
    "llama": GgufArchitecture(model_type="llama", rotates_pairs=True),
    "qwen2": GgufArchitecture(model_type="qwen2"),
    "qwen3": GgufArchitecture(model_type="qwen3"),
    "gemma3": GgufArchitecture(
        model_type="gemma3_text",
        layer=_GEMMA_LAYER,
        norm_offset=1.0,
        keys=("attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"),
    ),
    "gemma": GgufArchitecture(model_type="gemma", norm_offset=1.0),
    "ernie4_5": GgufArchitecture(model_type="ernie4_5"),
    "exaone4": GgufArchitecture(
        model_type="exaone4",
        layer=_EXAONE_LAYER,
        keys=("attention.sliding_window", "attention.sliding_window_pattern"),
    ),
    "qwen2moe": GgufArchitecture(model_type="qwen2_moe", layer=_EXPERTS_LAYER, keys=_SHARED_KEYS),
    "qwen3moe": GgufArchitecture(model_type="qwen3_moe", layer=_EXPERTS_LAYER, keys=_EXPERTS_KEYS),
    "qwen3next": GgufArchitecture(
        model_type="qwen3_next",
        layer=_NEXT_LAYER,
        norm_offset=1.0,
        has_delta_rules=True,
        keys=(*_SHARED_KEYS, *_DELTA_KEYS),
    ),
    "qwen35": GgufArchitecture(
        model_type="qwen3_5_text", layer=_DELTA_LAYER, norm_offset=1.0, has_delta_rules=True, keys=_DELTA_KEYS
    ),
    "qwen35moe": GgufArchitecture(
        model_type="qwen3_5_moe_text",
        layer=_DELTA_LAYER,
        norm_offset=1.0,
        has_delta_rules=True,
        keys=(*_SHARED_KEYS, *_DELTA_KEYS),
    ),
}

_KEYS = (
    *("context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned"),
)
_SAMPLING = "general.sampling."
_SAMPLING_NAMES = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
_ABSENT = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True}
"""Keys that say, with these values, that a model has no such part."""


def architecture_of(metadata: Mapping[str, Any]) -> GgufArchitecture:
    """The architecture of a file. Raises ValueError for one that is not implemented."""
    kind, name = metadata.get("general.type", "model"), metadata.get("general.architecture")
    if kind != "model":
        raise ValueError(f"general.type={kind!r} is not implemented, only 'model'; give the file of the model.")
    if name not in ARCHITECTURES:
        raise ValueError(f"general.architecture={name!r} is not implemented; known: {', '.join(ARCHITECTURES)}.")
    return ARCHITECTURES[name]


def config_fields(
    metadata: Mapping[str, Any], shapes: Mapping[str, Shape], rope_factors: np.ndarray | None
) -> dict[str, Any]:
    """The fields of a `config.json` for the model in a GGUF file.

    Args:
      metadata: of the file.
      shapes: of its tensors, by their names in GGUF.
      rope_factors: the tensor `ROPE_FACTORS`, [head_dim / 2]; None: there is none.

    Raises ValueError for keys and values that are not implemented, and for missing ones.
    """
    architecture = architecture_of(metadata)
    keys = _Keys(metadata, metadata["general.architecture"])
    keys.refuse_others({*_KEYS, *architecture.keys})
    embed, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", default=embed // max(heads, 1))
    keys.expect("attention.value_length", head_dim)
    if not architecture.has_delta_rules:
        keys.expect("rope.dimension_count", head_dim)
    if len(table := shapes.get("token_embd.weight", ())) != 2:
        raise ValueError("token_embd.weight, the matrix of embeddings, is missing; fetch the file again.")
    theta = keys.number("rope.freq_base", default=10_000.0)
    experts = keys.values.get(f"{keys.architecture}.expert_feed_forward_length")  # the width of all MLPs, if alone
    fields = {
        "model_type": architecture.model_type,
        "vocab_size": table[0],
        "hidden_size": embed,
        "intermediate_size": keys.integer("feed_forward_length", default=experts),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_theta": theta, **_rope_scaling(keys, theta, head_dim, rope_factors)},
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
        "tie_word_embeddings": "output.weight" not in shapes,
    }
    read = _OWN_FIELDS.get(architecture.model_type)
    return fields if read is None else fields | read(keys, fields)


def is_needed(metadata: Mapping[str, Any], name: str) -> bool:
    """Tell whether a tensor is of the model, and not of a layer that predicts the token after the next."""
    layers = _Keys(metadata, metadata["general.architecture"]).further_layers
    match = re.match(r"blk\.(\d+)\.", name)
    return name != ROPE_FACTORS and (match is None or int(match[1]) not in layers)


def generation_fields(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `generation_config.json`, from the keys `general.sampling.*`; llama.cpp's own keep their names.

    float32 values are written as their shortest decimals: 0.6, not 0.6000000238.
    """
    keys = {key.removeprefix(_SAMPLING): value for key, value in metadata.items() if key.startswith(_SAMPLING)}
    return {
        _SAMPLING_NAMES.get(key, key): float(str(np.float32(value))) if isinstance(value, float) else value
        for key, value in keys.items()
    }


@dataclasses.dataclass(frozen=True)
class _Keys:
    """The metadata of one architecture, whose keys begin with its name."""

    values: Mapping[str, Any]
    architecture: str

    def integer(self, key: str, default: int | None = None) -> int:
        return self._get(key, default, int)

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._get(key, default, int, float))

    def text(self, key: str, default: str) -> str:
        return self._get(key, default, str)

    def expect(self, key: str, value: object) -> None:
        """Refuse every value of a key except the implemented one."""
        name = f"{self.architecture}.{key}"
        if (actual := self.values.get(name, value)) != value:
            raise ValueError(f"{name}={actual!r} is not implemented, only {value!r}; choose another model.")

    @property
    def further_layers(self) -> range:
        """The last layers, which predict the tokens after the next; most models have none."""
        count = self.integer("block_count")
        return range(count - self.integer("nextn_predict_layers", default=0), count)

    def refuse_others(self, known: set[str]) -> None:
        """Refuse all keys but the known ones, and those that say that there is no such part."""
        for key, value in _ABSENT.items():
            if key not in known:
                self.expect(key, value)
        for name in self.values:
            architecture, _, key = name.partition(".")
            if architecture == self.architecture and key not in known | _ABSENT.keys():
                raise ValueError(f"{name}={self.values[name]!r} is not implemented; choose another model.")

    def _get(self, key: str, default: Any, *kinds: type) -> Any:
        name = f"{self.architecture}.{key}"
        value = self.values.get(name, default)
        if value is None:
            raise ValueError(f"{name} is missing; fetch the file again, or convert the model again.")
        if type(value) not in kinds:
            raise ValueError(f"{name}={value!r} is not implemented, only one {kinds[-1].__name__}.")
        return value


def _gemma3(keys: _Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of Gemma 3 that others have not, or have otherwise.

    llama.cpp knows the 27B model by its layers; its scores alone are not divided by the root of the width of a head.
    """
    large = fields["num_hidden_layers"] == 62
    return {
        "query_pre_attn_scalar": fields["hidden_size"] // fields["num_attention_heads"]
        if large
        else fields["head_dim"],
        "sliding_window": keys.integer("attention.sliding_window"),
        "sliding_window_pattern": keys.integer("attention.sliding_window_pattern", default=6),
        "rope_parameters": {
            "full_attention": fields["rope_parameters"],
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": keys.number("rope.freq_base_swa", default=10_000.0),
            },
        },
    }


def _ernie(keys: _Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ERNIE 4.5 that others have otherwise."""
    return {"use_bias": fields["attention_bias"]}


def _exaone4(keys: _Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of EXAONE 4 that others have not. Of its models, those without windows have no key of them."""
    window = keys.integer("attention.sliding_window", default=0)
    return {"sliding_window": window or None, "sliding_window_pattern": 4}


def _with_experts(keys: _Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of mixtures of Qwen that others have not; of Qwen2-MoE alone llama.cpp does not divide the weights."""
    shared = keys.architecture != "qwen3moe"
    return {
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "norm_topk_prob": keys.architecture != "qwen2moe",
        "qkv_bias": fields["attention_bias"],
    } | ({"shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length")} if shared else {})


def _with_delta_rules(keys: _Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of models with gated delta rules; the layers that predict tokens after the next are left out."""
    heads, rotated = keys.integer("ssm.time_step_rank"), keys.integer("rope.dimension_count")
    return {
        "num_hidden_layers": keys.further_layers.start,
        "linear_num_key_heads": keys.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": keys.integer("ssm.state_size"),
        "linear_value_head_dim": keys.integer("ssm.inner_size") // max(heads, 1),
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
        "full_attention_interval": keys.integer("full_attention_interval", default=4),
        "rope_parameters": fields["rope_parameters"] | {"partial_rotary_factor": rotated / fields["head_dim"]},
    }


def _experts_and_delta_rules(keys: _Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of models with both."""
    return _with_experts(keys, fields) | _with_delta_rules(keys, fields)


_OWN_FIELDS = {
    "gemma3_text": _gemma3,
    "ernie4_5": _ernie,
    "exaone4": _exaone4,
    "qwen2_moe": _with_experts,
    "qwen3_moe": _with_experts,
    "qwen3_next": _experts_and_delta_rules,
    "qwen3_5_text": _with_delta_rules,
    "qwen3_5_moe_text": _experts_and_delta_rules,
}


def _rope_scaling(keys: _Keys, theta: float, head_dim: int, factors: np.ndarray | None) -> dict[str, Any]:
    kind = keys.text("rope.scaling.type", default="none")
    if factors is not None:
        keys.expect("rope.scaling.type", "none")
        return _llama3(theta, head_dim, factors)
    if kind == "none":
        return {"rope_type": "default"}
    factor = keys.number("rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        original = keys.integer("rope.scaling.original_context_length")
        return {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
    raise ValueError(f"{keys.architecture}.rope.scaling.type={kind!r} is not implemented; known: none, linear, yarn.")


def _llama3(theta: float, head_dim: int, factors: np.ndarray) -> dict[str, Any]:
    """The scaling by whose parameters Llama 3.1's converter has computed the factors.

    It is the one that all of Llama 3.1 to 3.3 have, with a factor of their own: waves up to 2048 tokens keep their
    frequency, those from 8192 tokens on have it divided by the factor, and between it goes over, linear in 1 / length.
    """
    factor, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    lengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    kept = np.clip((original / lengths - low) / (high - low), 0, 1)  # the share of the original frequency
    if factors.shape != lengths.shape or not np.allclose(1 / factors, kept + (1 - kept) / factor, rtol=1e-4):
        raise ValueError(
            f"{ROPE_FACTORS}: only Llama 3.1's scaling of rotary frequencies is implemented, and these factors differ; "
            "choose another model."
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
