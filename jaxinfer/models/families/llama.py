"""Llama 2 and 3, and the parts that related families use."""

from collections.abc import Mapping

from jaxinfer.models.config import (
    AttentionConfig,
    BlockKind,
    DecoderConfig,
    LayerConfig,
    MlpConfig,
    NormConfig,
    NormKind,
    QKNormScope,
)
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import (
    Family,
    Source,
    alternate,
    by_kv_head,
    by_kv_head_from_pairs,
    linear,
    norm,
    only,
    qkv_rows,
    table,
)


def base_config(hf: Mapping[str, object]) -> DecoderConfig:
    """The part of a config that Llama, Mistral, Qwen, Gemma and Phi-3 have in common."""
    fields = Fields(hf)
    embed, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.optional(int, "head_dim") or fields.head_dim(embed, heads)
    return DecoderConfig(
        vocab=fields.integer("vocab_size"),
        embed=embed,
        layers=fields.integer("num_hidden_layers"),
        context=fields.integer("max_position_embeddings"),
        pattern=(
            LayerConfig(
                mixer=AttentionConfig(
                    q_heads=heads,
                    kv_heads=fields.integer("num_key_value_heads", default=heads),
                    head_dim=head_dim,
                    positions=fields.rotary(head_dim),
                ),
                mlp=MlpConfig(
                    hidden=fields.integer("intermediate_size"),
                    activation=fields.activation("hidden_act", default="silu"),
                    gated=True,
                ),
            ),
        ),
        norm=NormConfig(kind=NormKind.RMS, eps=fields.number("rms_norm_eps", default=1e-6)),
        tied=fields.flag("tie_word_embeddings", default=False),
    )


def config(hf: Mapping[str, object]) -> DecoderConfig:
    """The config of Llama."""
    fields, base = Fields(hf), base_config(hf)
    bias = fields.flag("attention_bias", default=False)
    return base.with_mlp(bias=fields.flag("mlp_bias", default=False)).with_attention(qkv_bias=bias, out_bias=bias)


def sources(config: DecoderConfig, *, rotates_pairs: bool = False) -> dict[str, Source]:
    """The tensors of a Llama-like model, without the biases, norms and head that its config leaves out.

    Experts are left to their family.

    rotates_pairs: whether rotated features of a head lie in pairs (2i, 2i + 1), as in Command R.
    """
    embed, shifted = config.embed, config.norm.kind is NormKind.LAYER
    sources = table("embed.table", "embed_tokens.weight", config.vocab, embed)
    sources |= norm("final_norm", "norm", embed, bias=shifted)
    if not config.tied:
        sources |= linear("head", ("lm_head",), (config.vocab,), embed, bias=config.head_bias)
    for i in range(config.layers):
        layer, kind = f"layers.{i}", config.layer(i)
        sources |= norm(f"{layer}.attention_norm", f"{layer}.input_layernorm", embed, bias=shifted)
        sources |= _mlp(f"{layer}.mlp", kind.mlp, embed)
        if kind.block is not BlockKind.PARALLEL:
            sources |= norm(f"{layer}.mlp_norm", f"{layer}.post_attention_layernorm", embed, bias=shifted)
        if kind.has_attention:
            pairs = rotary_dim(config) if rotates_pairs else None
            sources |= _attention(kind.attention, layer, embed, pairs=pairs, shifted=shifted)
    return sources


def _attention(
    attention: AttentionConfig, layer: str, embed: int, *, pairs: int | None, shifted: bool
) -> dict[str, Source]:
    """The tensors of a layer's attention. pairs: rotated features that lie in pairs; None: they lie in halves."""
    join = by_kv_head(attention) if pairs is None else by_kv_head_from_pairs(attention, pairs)
    q, k, v, o = (f"{layer}.self_attn.{part}_proj" for part in "qkvo")
    rows, bias, parts = qkv_rows(attention), attention.qkv_bias, 1 + attention.kv_parts
    sources = linear(f"{layer}.attention.qkv", (q, k, v)[:parts], rows[:parts], embed, bias=bias, combine=join)
    sources |= linear(f"{layer}.attention.out", (o,), (embed,), rows[0], bias=attention.out_bias)
    if attention.qk_norm:
        for name, size in [*zip(("q_norm", "k_norm"), qk_norm_sizes(attention), strict=True)][:parts]:
            sources |= norm(f"{layer}.attention.{name}", f"{layer}.self_attn.{name}", size, bias=shifted)
    return sources


def rotary_dim(config: DecoderConfig) -> int:
    """The number of features of a head that rotate in layers with rotary positions.

    Layers without positions have their features in the same order, so that heads are laid out alike in all layers.
    """
    return max(positions.rotary_dim for positions in config.positions)


def _mlp(module: str, mlp: MlpConfig, embed: int) -> dict[str, Source]:
    if mlp.moe is not None:
        return {}
    gate, up = f"{module}.gate_proj", f"{module}.up_proj"
    inner, combine = ((gate, up), alternate) if mlp.gated else ((up,), only)
    outputs = (mlp.hidden,) * len(inner)
    gate_up = linear(f"{module}.gate_up", inner, outputs, embed, bias=mlp.bias, combine=combine)
    return gate_up | linear(f"{module}.down", (f"{module}.down_proj",), (embed,), mlp.hidden, bias=mlp.bias)


def qk_norm_sizes(attention: AttentionConfig) -> tuple[int, int]:
    """The number of weights of the norms of queries and of keys."""
    if attention.qk_norm_scope is QKNormScope.HEAD:
        return attention.head_dim, attention.head_dim
    return attention.q_heads * attention.head_dim, attention.kv_heads * attention.head_dim


IGNORED = r"lm_head\.weight|(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"  # a tied head; a table we compute

FAMILY = Family(
    model_types=("llama",),
    published=("Llama 2 and 3", "TinyLlama", "SmolLM2"),
    config=config,
    sources=sources,
    prefixes=("model.",),
    ignored=IGNORED,
)
