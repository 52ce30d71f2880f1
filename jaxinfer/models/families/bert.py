"""BERT, and the parts that RoBERTa uses too."""

from collections.abc import Mapping

from jaxinfer.models.config import (
    AttentionConfig,
    EncoderConfig,
    LearnedPositions,
    MlpConfig,
    NormConfig,
    NormKind,
)
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import Family, Source, by_kv_head, linear, norm, qkv_rows, table


def encoder_config(hf: Mapping[str, object], *, offset: int) -> EncoderConfig:
    """The config of BERT or RoBERTa; `offset`: unused rows at the start of the position table."""
    fields = Fields(hf)
    fields.expect("is_decoder", False)
    fields.expect("position_embedding_type", "absolute")
    embed, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    return EncoderConfig(
        vocab=fields.integer("vocab_size"),
        embed=embed,
        layers=fields.integer("num_hidden_layers"),
        context=fields.integer("max_position_embeddings", default=512) - offset,
        attention=AttentionConfig(
            q_heads=heads,
            kv_heads=heads,
            head_dim=fields.head_dim(embed, heads),
            qkv_bias=True,
            out_bias=True,
        ),
        learned_positions=LearnedPositions(offset=offset),
        mlp=MlpConfig(
            hidden=fields.integer("intermediate_size"),
            activation=fields.activation("hidden_act", default="gelu"),
            bias=True,
        ),
        norm=NormConfig(kind=NormKind.LAYER, eps=fields.number("layer_norm_eps", default=1e-12)),
        token_types=fields.integer("type_vocab_size", default=2),
    )


def _config(hf: Mapping[str, object]) -> EncoderConfig:
    return encoder_config(hf, offset=0)


def sources(config: EncoderConfig) -> dict[str, Source]:
    """The tensors of BERT and RoBERTa."""
    attention, embed, hidden = config.attention, config.embed, config.mlp.hidden
    rows = config.context + config.learned_positions.offset
    sources = (
        table("embed.table", "embeddings.word_embeddings.weight", config.vocab, embed)
        | table("positions.table", "embeddings.position_embeddings.weight", rows, embed)
        | norm("embed_norm", "embeddings.LayerNorm", embed, bias=True)
    )
    if config.token_types:
        sources |= table("token_types.table", "embeddings.token_type_embeddings.weight", config.token_types, embed)
    for i in range(config.layers):
        ours, theirs = f"layers.{i}", f"encoder.layer.{i}"
        q, k, v = (f"{theirs}.attention.self.{part}" for part in ("query", "key", "value"))
        sources |= (
            linear(
                f"{ours}.attention.qkv",
                (q, k, v),
                qkv_rows(attention),
                embed,
                bias=True,
                combine=by_kv_head(attention),
            )
            | linear(f"{ours}.attention.out", (f"{theirs}.attention.output.dense",), (embed,), embed, bias=True)
            | norm(f"{ours}.attention_norm", f"{theirs}.attention.output.LayerNorm", embed, bias=True)
            | linear(f"{ours}.mlp.gate_up", (f"{theirs}.intermediate.dense",), (hidden,), embed, bias=True)
            | linear(f"{ours}.mlp.down", (f"{theirs}.output.dense",), (embed,), hidden, bias=True)
            | norm(f"{ours}.mlp_norm", f"{theirs}.output.LayerNorm", embed, bias=True)
        )
    return sources


FAMILY = Family(
    model_types=("bert",),
    published=("BERT",),
    config=_config,
    sources=sources,
    prefixes=("bert.",),
    ignored=r"embeddings\.position_ids|(pooler|cls)\..*",  # the heads of pre-training
    renamed=(("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")),
)
