"""Models with a gated delta rule in most layers: their fields, and the tensors that they have in common."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxinfer.models.config import AttentionConfig, DecoderConfig, DeltaRuleConfig
from jaxinfer.models.families import experts, gemma2, llama
from jaxinfer.models.families.fields import FULL, Fields, refuse
from jaxinfer.models.families.mapping import Source, by_kv_head, linear, norm, only, qkv_rows

LINEAR = "linear_attention"
IGNORED = rf"{llama.IGNORED}|mtp\..*"
"""Tensors that are not needed: among others a layer that predicts the token after the next."""


def with_delta_rule(config: DecoderConfig, fields: Fields) -> DecoderConfig:
    """Set a gated delta rule in the layers without attention."""
    mixer = DeltaRuleConfig(
        key_heads=fields.integer("linear_num_key_heads", default=16),
        value_heads=fields.integer("linear_num_value_heads", default=32),
        key_dim=fields.integer("linear_key_head_dim", default=128),
        value_dim=fields.integer("linear_value_head_dim", default=128),
        conv=fields.integer("linear_conv_kernel_dim", default=4),
    )
    return config.vary(
        lambda kind, name: dataclasses.replace(kind, mixer=mixer) if name == LINEAR else kind,
        layer_types(fields, config.layers),
    )


def layer_types(fields: Fields, layers: int) -> Sequence[str]:
    """Read the kind of each layer: without `layer_types`, every n-th has attention."""
    every = fields.integer("full_attention_interval", default=4, least=1)
    default = [LINEAR if (i + 1) % every else FULL for i in range(layers)]
    kinds = fields.per_layer("layer_types", layers) or default
    if unknown := sorted({str(kind) for kind in kinds} - {FULL, LINEAR}):
        refuse(f"config.json: layer_types contains {unknown}, not implemented; known: {FULL}, {LINEAR}.")
        return default
    return kinds


def sources(
    config: DecoderConfig, projections: Callable[[DeltaRuleConfig, str, int], dict[str, Source]]
) -> dict[str, Source]:
    """The tensors of a model with norms that multiply by 1 + weight, also of queries and keys, and gated attention.

    projections: makes the sources of a delta rule's `qkv`, `gate` and `steps`, of its layer and the model's width.
    """
    embed = config.embed
    sources = experts.sources(config) | norm("final_norm", "norm", embed, combine=gemma2.one_plus)
    for i in range(config.layers):
        layer, kind = f"layers.{i}", config.layer(i)
        norms = [("attention_norm", "input_layernorm", embed), ("mlp_norm", "post_attention_layernorm", embed)]
        if isinstance(kind.mixer, DeltaRuleConfig):
            sources |= projections(kind.mixer, layer, embed) | after_projections(kind.mixer, layer, embed)
        else:
            sources |= _gated_attention(kind.attention, layer, embed)
            head_dim = kind.attention.head_dim
            norms += [(f"attention.{name}", f"self_attn.{name}", head_dim) for name in ("q_norm", "k_norm")]
        for ours, theirs, size in norms:
            sources |= norm(f"{layer}.{ours}", f"{layer}.{theirs}", size, combine=gemma2.one_plus)
    return sources


def _gated_attention(attention: AttentionConfig, layer: str, embed: int) -> dict[str, Source]:
    """The projections of attention whose `q_proj` has for each head its query and its gate."""
    rows, width, kv = qkv_rows(attention)[0], attention.head_dim, attention.kv_heads * attention.head_dim

    def part(q: np.ndarray, which: int) -> np.ndarray:
        return q.reshape(attention.q_heads, 2, width, *q.shape[1:])[:, which].reshape(rows, *q.shape[1:])

    def join(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        return by_kv_head(attention)(part(q, 0), k, v)

    q, k, v = (f"{layer}.self_attn.{name}_proj" for name in "qkv")
    qkv = linear(f"{layer}.attention.qkv", (q, k, v), (2 * rows, kv, kv), embed, bias=False, combine=join)
    return qkv | linear(f"{layer}.attention.gate", (q,), (2 * rows,), embed, bias=False, combine=lambda q: part(q, 1))


def by_key_head(mixer: DeltaRuleConfig, flat: np.ndarray) -> np.ndarray:
    """Reorder all queries, all keys, all values by key head, [Hk, F, ...]: its query, its key, its values."""
    keys = mixer.key_heads * mixer.key_dim
    parts = [x.reshape(mixer.key_heads, -1, *x.shape[1:]) for x in np.split(flat, (keys, 2 * keys))]
    return np.concatenate(parts, axis=1)


def rows_by_key_head(mixer: DeltaRuleConfig) -> Callable[..., np.ndarray]:
    """A function that joins queries, keys and values, [rows, ...], in one tensor or several, and orders by key head."""

    def combine(*parts: np.ndarray) -> np.ndarray:
        flat = np.concatenate(parts)
        return by_key_head(mixer, flat).reshape(flat.shape)

    return combine


def after_projections(
    mixer: DeltaRuleConfig, layer: str, embed: int, *, norm_name: str = "norm", out: str = "out_proj"
) -> dict[str, Source]:
    """The tensors of a delta rule but those of its projections from the stream.

    Args:
      mixer: the delta rule.
      layer: its layer.
      embed: the model's width.
      norm_name: of the norm of each head's output.
      out: of the projection back.
    """
    ours, theirs, heads = f"{layer}.delta_rule", f"{layer}.linear_attn", mixer.value_heads
    shape = mixer.key_heads * mixer.features, 1, mixer.conv
    return (
        linear(f"{ours}.out", (f"{theirs}.{out}",), (embed,), mixer.outputs, bias=False)
        | norm(f"{ours}.norm", f"{theirs}.{norm_name}", mixer.value_dim)
        | {
            f"{ours}.conv": Source((f"{theirs}.conv1d.weight",), (shape,), lambda x: by_key_head(mixer, x[:, 0])),
            f"{ours}.decay": Source((f"{theirs}.A_log",), ((heads,),), only),
            f"{ours}.step_bias": Source((f"{theirs}.dt_bias",), ((heads,),), only),
        }
    )
