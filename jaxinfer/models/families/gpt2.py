"""GPT-2."""

from collections.abc import Mapping

from jaxinfer.models.config import (
    AttentionConfig,
    DecoderConfig,
    LayerConfig,
    LearnedPositions,
    MlpConfig,
    NormConfig,
    NormKind,
)
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import (
    Family,
    Source,
    by_kv_head_from_fused,
    linear,
    norm,
    qkv_rows,
    table,
)


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    config, fields = _uniform_config(hf), Fields(hf)
    if not fields.flag("scale_attn_by_inverse_layer_idx", default=False):
        return config
    scale = config.layer(0).attention.score_scale
    scales = [scale / (layer + 1) for layer in range(config.layers)]
    return config.vary(lambda kind, scale: kind.with_attention(scale=scale), scales)


def _uniform_config(hf: Mapping[str, object]) -> DecoderConfig:
    fields = Fields(hf)  # reorder_and_upcast_attn asks for scores in float32, which they always are
    embed, heads = fields.integer("n_embd", "hidden_size"), fields.integer("n_head", "num_attention_heads")
    return DecoderConfig(
        vocab=fields.integer("vocab_size"),
        embed=embed,
        layers=fields.integer("n_layer", "num_hidden_layers"),
        context=fields.integer("n_positions", "max_position_embeddings", default=1024),
        pattern=(
            LayerConfig(
                mixer=AttentionConfig(
                    q_heads=heads,
                    kv_heads=heads,
                    head_dim=fields.head_dim(embed, heads),
                    qkv_bias=True,
                    out_bias=True,
                    scale=None if fields.flag("scale_attn_weights", default=True) else 1.0,
                ),
                mlp=MlpConfig(
                    hidden=fields.integer("n_inner", default=4 * embed),
                    activation=fields.activation("activation_function", default="gelu_new"),
                    bias=True,
                ),
            ),
        ),
        learned_positions=LearnedPositions(),
        norm=NormConfig(kind=NormKind.LAYER, eps=fields.number("layer_norm_epsilon", default=1e-5)),
        tied=fields.flag("tie_word_embeddings", default=True),
    )


def _sources(config: DecoderConfig) -> dict[str, Source]:
    embed = config.embed
    sources = (
        table("embed.table", "wte.weight", config.vocab, embed)
        | table("positions.table", "wpe.weight", config.context, embed)
        | norm("final_norm", "ln_f", embed, bias=True)
    )
    if not config.tied:
        sources |= table("head.weight", "lm_head.weight", config.vocab, embed)
    for i in range(config.layers):
        ours, theirs = f"layers.{i}", f"h.{i}"
        attention, hidden = config.layer(i).attention, config.layer(i).mlp.hidden
        sources |= (
            norm(f"{ours}.attention_norm", f"{theirs}.ln_1", embed, bias=True)
            | linear(
                f"{ours}.attention.qkv",
                (f"{theirs}.attn.c_attn",),
                (sum(qkv_rows(attention)),),
                embed,
                bias=True,
                combine=by_kv_head_from_fused(attention),
                conv1d=True,
            )
            | linear(f"{ours}.attention.out", (f"{theirs}.attn.c_proj",), (embed,), embed, bias=True, conv1d=True)
            | norm(f"{ours}.mlp_norm", f"{theirs}.ln_2", embed, bias=True)
            | linear(f"{ours}.mlp.gate_up", (f"{theirs}.mlp.c_fc",), (hidden,), embed, bias=True, conv1d=True)
            | linear(f"{ours}.mlp.down", (f"{theirs}.mlp.c_proj",), (embed,), hidden, bias=True, conv1d=True)
        )
    return sources


FAMILY = Family(
    model_types=("gpt2",),
    published=("GPT-2",),
    config=_config,
    sources=_sources,
    prefixes=("transformer.",),
    ignored=r"lm_head\.weight|h\.\d+\.attn\.(masked_)?bias",  # a tied head; the causal mask
)
