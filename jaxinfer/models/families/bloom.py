"""BLOOM: ALiBi and a norm on the embeddings."""

from collections.abc import Mapping

from jaxinfer.models.config import (
    Activation,
    AttentionConfig,
    DecoderConfig,
    LayerConfig,
    MlpConfig,
    NormConfig,
    NormKind,
    PositionKind,
    PositionsConfig,
)
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import Family, Source, linear, norm, qkv_rows, table


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    fields = Fields(hf)
    fields.expect("apply_residual_connection_post_layernorm", False)
    embed, heads = fields.integer("hidden_size", "n_embed"), fields.integer("n_head", "num_attention_heads")
    return DecoderConfig(
        vocab=fields.integer("vocab_size"),
        embed=embed,
        layers=fields.integer("n_layer", "num_hidden_layers"),
        context=fields.integer("seq_length", default=2048),  # of training; ALiBi itself has no limit
        embed_norm=True,
        pattern=(
            LayerConfig(
                mixer=AttentionConfig(
                    q_heads=heads,
                    kv_heads=heads,
                    head_dim=fields.head_dim(embed, heads),
                    qkv_bias=True,
                    out_bias=True,
                    positions=PositionsConfig(kind=PositionKind.ALIBI),
                ),
                mlp=MlpConfig(hidden=4 * embed, activation=Activation.GELU_TANH, bias=True),
            ),
        ),
        norm=NormConfig(kind=NormKind.LAYER, eps=fields.number("layer_norm_epsilon", default=1e-5)),
        tied=fields.flag("tie_word_embeddings", default=True),
    )


def _sources(config: DecoderConfig) -> dict[str, Source]:
    embed = config.embed
    sources = (
        table("embed.table", "word_embeddings.weight", config.vocab, embed)
        | norm("embed_norm", "word_embeddings_layernorm", embed, bias=True)
        | norm("final_norm", "ln_f", embed, bias=True)
    )
    if not config.tied:
        sources |= table("head.weight", "lm_head.weight", config.vocab, embed)
    for i in range(config.layers):
        ours, theirs = f"layers.{i}", f"h.{i}"
        attention, hidden = config.layer(i).attention, config.layer(i).mlp.hidden
        sources |= (
            norm(f"{ours}.attention_norm", f"{theirs}.input_layernorm", embed, bias=True)
            | linear(  # already by head: its query, its key, its value
                f"{ours}.attention.qkv",
                (f"{theirs}.self_attention.query_key_value",),
                (sum(qkv_rows(attention)),),
                embed,
                bias=True,
            )
            | linear(f"{ours}.attention.out", (f"{theirs}.self_attention.dense",), (embed,), embed, bias=True)
            | norm(f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm", embed, bias=True)
            | linear(f"{ours}.mlp.gate_up", (f"{theirs}.mlp.dense_h_to_4h",), (hidden,), embed, bias=True)
            | linear(f"{ours}.mlp.down", (f"{theirs}.mlp.dense_4h_to_h",), (embed,), hidden, bias=True)
        )
    return sources


FAMILY = Family(
    model_types=("bloom",),
    published=("BLOOM",),
    config=_config,
    sources=_sources,
    prefixes=("transformer.",),
    ignored=r"lm_head\.weight",  # a tied head
)
