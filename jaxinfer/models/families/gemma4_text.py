"""Gemma 4: wider heads in full attention, shared keys and values, layer inputs, experts in addition to the MLP."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer.fields import shown
from jaxinfer.models.config import BlockKind, DecoderConfig, LayerConfig, MoeConfig, RouterConfig, SharedMix
from jaxinfer.models.families import gemma4_tensors, llama
from jaxinfer.models.families.fields import FULL, SLIDING, Fields, refuse

_ROPE = {SLIDING: {}, FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25}}
_DEFAULTS = dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 262_144)
_DEFAULTS |= {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30}
_DEFAULTS |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 512}
_DEFAULTS |= {"max_position_embeddings": 131_072, "rope_parameters": _ROPE, "tie_word_embeddings": True}


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """The config of Gemma 4's text model."""
    hf = _DEFAULTS | {name: value for name, value in hf.items() if value is not None}
    fields, base = Fields(hf), llama.base_config(hf | {"rope_parameters": None})
    if (value := hf.get("use_bidirectional_attention")) not in (None, "vision"):  # of images, which are refused
        refuse(f"config.json: use_bidirectional_attention={shown(value)} is not implemented, only None and 'vision'.")
    if inputs := fields.integer("hidden_size_per_layer_input", default=256, least=0):
        fields.expect("vocab_size_per_layer_input", base.vocab)
    bias = fields.flag("attention_bias", default=False)
    base = base.with_mlp(activation=fields.activation("hidden_activation", default="gelu_pytorch_tanh"))
    base = base.with_attention(qkv_bias=bias, out_bias=bias, scale=1.0, qk_norm=True, value_norm=True)
    base = base.map_layers(lambda kind: dataclasses.replace(kind, block=BlockKind.SANDWICH, output_scale=True))
    base = base.vary(_change_of_layer(fields, base.layers), range(base.layers))
    return dataclasses.replace(
        base,
        embed_scale=base.embed**0.5,
        layer_inputs=inputs or None,
        logit_softcap=fields.cap("final_logit_softcapping"),
    )


def _change_of_layer(fields: Fields, layers: int) -> Callable[[LayerConfig, int], LayerConfig]:
    """Make a function that makes a layer's kind of what all have in common, and of its number."""
    kinds = [*fields.layer_types([SLIDING if (i + 1) % 6 else FULL for i in range(layers)])[:-1], FULL]
    keys_are_values, double = (fields.flag(x, default=False) for x in ("attention_k_eq_v", "use_double_wide_mlp"))
    wide = {"head_dim": fields.integer("global_head_dim", default=512)}
    if keys_are_values and (kv_heads := fields.optional(int, "num_global_key_value_heads")):
        wide["num_key_value_heads"] = kv_heads
    given = fields.optional(dict, "per_layer_config")
    unshared = layers - fields.integer("num_kv_shared_layers", default=0, least=0)

    def change(kind: LayerConfig, layer: int) -> LayerConfig:
        of_kind, full = kinds[layer], kinds[layer] == FULL
        part = Fields({str(layer): wide if full else {}} if given is None else given, "config.json: per_layer_config")
        sizes = Fields(part.optional(dict, str(layer)) or {}, f"{part.file}.{layer}")
        for name in sorted(sizes.values.keys() - {"head_dim", "num_key_value_heads"}):
            refuse(f"config.json: {name} in per_layer_config is not implemented; choose another checkpoint.")
        head_dim = sizes.integer("head_dim", default=kind.attention.head_dim, least=1)
        rotary = fields.rotary_by_layer_type(head_dim, full_theta=1e6, sliding_theta=1e4, sliding_names=("rope_theta",))
        kind = kind.with_attention(
            head_dim=head_dim,
            kv_heads=sizes.integer("num_key_value_heads", default=kind.attention.kv_heads, least=1),
            positions=rotary[of_kind],
            window=None if full else fields.integer("sliding_window"),
            keys_are_values=keys_are_values and full,
            shares_kv=layer >= unshared,
        )
        kind = kind.with_mlp(hidden=kind.mlp.hidden * (2 if double and layer >= unshared else 1))
        if not fields.flag("enable_moe_block", default=False):
            return kind
        count, chosen = fields.integer("num_experts"), fields.integer("top_k_experts")
        router = RouterConfig(experts=count, experts_per_token=chosen, expert_scale=True)
        moe = MoeConfig(router=router, shared_hidden=kind.mlp.hidden, shared_mix=SharedMix.NORMALIZED)
        return kind.with_mlp(hidden=fields.integer("moe_intermediate_size"), moe=moe)

    return change


FAMILY = dataclasses.replace(
    gemma4_tensors.FAMILY, model_types=("gemma4_text",), published=("Gemma 4, its text part alone",), config=config
)
