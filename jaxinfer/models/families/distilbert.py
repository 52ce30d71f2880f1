"""DistilBERT: BERT without segments."""

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


def _config(hf: Mapping[str, object]) -> EncoderConfig:
    fields = Fields(hf)
    embed, heads = fields.integer("dim", "hidden_size"), fields.integer("n_heads", "num_attention_heads")
    return EncoderConfig(
        vocab=fields.integer("vocab_size"),
        embed=embed,
        layers=fields.integer("n_layers", "num_hidden_layers"),
        context=fields.integer("max_position_embeddings", default=512),
        attention=AttentionConfig(
            q_heads=heads,
            kv_heads=heads,
            head_dim=fields.head_dim(embed, heads),
            qkv_bias=True,
            out_bias=True,
        ),
        learned_positions=LearnedPositions(),  # a sinusoidal table is in the checkpoint too
        mlp=MlpConfig(
            hidden=fields.integer("hidden_dim"),
            activation=fields.activation("activation", default="gelu"),
            bias=True,
        ),
        norm=NormConfig(kind=NormKind.LAYER, eps=1e-12),
    )


def _sources(config: EncoderConfig) -> dict[str, Source]:
    attention, embed, hidden = config.attention, config.embed, config.mlp.hidden
    sources = (
        table("embed.table", "embeddings.word_embeddings.weight", config.vocab, embed)
        | table("positions.table", "embeddings.position_embeddings.weight", config.context, embed)
        | norm("embed_norm", "embeddings.LayerNorm", embed, bias=True)
    )
    for i in range(config.layers):
        ours, theirs = f"layers.{i}", f"transformer.layer.{i}"
        q, k, v, out = (f"{theirs}.attention.{part}_lin" for part in ("q", "k", "v", "out"))
        sources |= (
            linear(
                f"{ours}.attention.qkv",
                (q, k, v),
                qkv_rows(attention),
                embed,
                bias=True,
                combine=by_kv_head(attention),
            )
            | linear(f"{ours}.attention.out", (out,), (embed,), embed, bias=True)
            | norm(f"{ours}.attention_norm", f"{theirs}.sa_layer_norm", embed, bias=True)
            | linear(f"{ours}.mlp.gate_up", (f"{theirs}.ffn.lin1",), (hidden,), embed, bias=True)
            | linear(f"{ours}.mlp.down", (f"{theirs}.ffn.lin2",), (embed,), hidden, bias=True)
            | norm(f"{ours}.mlp_norm", f"{theirs}.output_layer_norm", embed, bias=True)
        )
    return sources


FAMILY = Family(
    model_types=("distilbert",),
    published=("DistilBERT",),
    config=_config,
    sources=_sources,
    prefixes=("distilbert.",),
    ignored=r"embeddings\.position_ids|vocab_(transform|layer_norm|projector)\..*",  # the head of pre-training
)
