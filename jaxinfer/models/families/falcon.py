"""Falcon, in the layouts of Falcon-40B (and 11B), of Falcon-7B and of Falcon-RW."""

from collections.abc import Mapping

from jaxinfer.models.config import (
    AttentionConfig,
    BlockKind,
    DecoderConfig,
    LayerConfig,
    MlpConfig,
    NormConfig,
    NormKind,
    PositionKind,
    PositionsConfig,
    alibi_slopes,
)
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import Family, Source, linear, norm, qkv_rows, table


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    fields = Fields(hf)
    embed, heads = fields.integer("n_embed", "hidden_size"), fields.integer("num_attention_heads")
    head_dim, bias = fields.head_dim(embed, heads), fields.flag("bias", default=False)
    alibi = fields.flag("alibi", default=False)
    return DecoderConfig(
        vocab=fields.integer("vocab_size"),
        embed=embed,
        layers=fields.integer("num_hidden_layers"),
        context=fields.integer("max_position_embeddings", default=2048),
        pattern=(
            LayerConfig(
                block=_block(fields),
                mixer=AttentionConfig(
                    q_heads=heads,
                    kv_heads=_kv_heads(fields, heads),
                    head_dim=head_dim,
                    qkv_bias=bias,
                    out_bias=bias,
                    # The scores are scaled with the bias already added. transformers rounds the bias to bfloat16; we
                    # do not.
                    alibi=tuple(slope * head_dim**-0.5 for slope in alibi_slopes(heads)) if alibi else None,
                    positions=PositionsConfig(kind=PositionKind.ALIBI) if alibi else fields.rotary(head_dim),
                ),
                mlp=MlpConfig(
                    hidden=fields.integer("ffn_hidden_size", default=4 * embed),
                    activation=fields.activation("activation", default="gelu"),
                    bias=bias,
                ),
            ),
        ),
        norm=NormConfig(kind=NormKind.LAYER, eps=fields.number("layer_norm_epsilon", default=1e-5)),
        tied=fields.flag("tie_word_embeddings", default=True),
    )


def _kv_heads(fields: Fields, heads: int) -> int:
    if fields.flag("new_decoder_architecture", default=False):
        return fields.integer("num_kv_heads", default=heads)
    if fields.flag("multi_query", default=True):
        return 1  # whatever num_kv_heads says
    fields.expect("num_kv_heads", heads)
    return heads


def _block(fields: Fields) -> BlockKind:
    if not fields.flag("new_decoder_architecture", default=False):
        fields.expect("num_ln_in_parallel_attn", 1)
        return BlockKind.PARALLEL if fields.flag("parallel_attn", default=True) else BlockKind.SEQUENTIAL
    fields.expect("parallel_attn", True)
    if fields.integer("num_ln_in_parallel_attn", default=2) == 2:
        return BlockKind.PARALLEL_TWO_NORMS
    fields.expect("num_ln_in_parallel_attn", 1)
    return BlockKind.PARALLEL


_NORMS = {  # of each kind of block, the names of the norms before attention and before the MLP
    BlockKind.PARALLEL_TWO_NORMS: ("ln_attn", "ln_mlp"),
    BlockKind.PARALLEL: ("input_layernorm",),
    BlockKind.SEQUENTIAL: ("input_layernorm", "post_attention_layernorm"),
}


def _sources(config: DecoderConfig) -> dict[str, Source]:
    embed = config.embed
    sources = table("embed.table", "word_embeddings.weight", config.vocab, embed)
    sources |= norm("final_norm", "ln_f", embed, bias=True)
    if not config.tied:
        sources |= table("head.weight", "lm_head.weight", config.vocab, embed)
    for i in range(config.layers):
        ours, theirs, kind = f"layers.{i}", f"h.{i}", config.layer(i)
        attention, mlp = kind.attention, kind.mlp
        for leaf, name in zip(("attention_norm", "mlp_norm"), _NORMS[kind.block], strict=False):
            sources |= norm(f"{ours}.{leaf}", f"{theirs}.{name}", embed, bias=True)
        rows, dense = (sum(qkv_rows(attention)),), f"{theirs}.self_attention.dense"
        sources |= (
            linear(  # in every layout already by KV head: its queries, its key, its value
                f"{ours}.attention.qkv",
                (f"{theirs}.self_attention.query_key_value",),
                rows,
                embed,
                bias=attention.qkv_bias,
            )
            | linear(f"{ours}.attention.out", (dense,), (embed,), embed, bias=attention.out_bias)
            | linear(f"{ours}.mlp.gate_up", (f"{theirs}.mlp.dense_h_to_4h",), (mlp.hidden,), embed, bias=mlp.bias)
            | linear(f"{ours}.mlp.down", (f"{theirs}.mlp.dense_4h_to_h",), (embed,), mlp.hidden, bias=mlp.bias)
        )
    return sources


FAMILY = Family(
    model_types=("falcon",),
    published=("Falcon",),
    config=_config,
    sources=_sources,
    prefixes=("transformer.",),
    ignored=r"lm_head\.weight|(h\.\d+\.self_attention\.)?rotary(_emb)?\.inv_freq",  # a tied head; a table we compute
)
