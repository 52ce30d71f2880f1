"""OPT: ReLU and learned positions that start at row 2."""

from collections.abc import Mapping

from jaxinfer.models.config import (
    AttentionConfig,
    DecoderConfig,
    MlpConfig,
    NormConfig,
    NormKind,
    PositionKind,
    PositionsConfig,
)
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import Family, Source, by_kv_head, linear, norm, qkv_rows, table


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    fields = Fields(hf)
    embed, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    fields.expect("do_layer_norm_before", True, "only OPT-350m has it; take another size")
    fields.expect("word_embed_proj_dim", embed, "only OPT-350m projects its embeddings; take another size")
    fields.expect("_remove_final_layer_norm", False)
    fields.expect("layer_norm_elementwise_affine", True)
    bias = fields.flag("enable_bias", default=True)
    return DecoderConfig(
        vocab=fields.integer("vocab_size"),
        embed=embed,
        layers=fields.integer("num_hidden_layers"),
        context=fields.integer("max_position_embeddings", default=2048),
        attention=AttentionConfig(
            q_heads=heads,
            kv_heads=heads,
            head_dim=fields.head_dim(embed, heads),
            qkv_bias=bias,
            out_bias=bias,
        ),
        positions=PositionsConfig(kind=PositionKind.LEARNED, offset=2),
        mlp=MlpConfig(
            hidden=fields.integer("ffn_dim"),
            activation=fields.activation("activation_function", default="relu"),
            bias=bias,
        ),
        norm=NormConfig(kind=NormKind.LAYER, eps=1e-5),
        tied=fields.flag("tie_word_embeddings", default=True),
    )


def _sources(config: DecoderConfig) -> dict[str, Source]:
    attention, mlp, embed = config.attention, config.mlp, config.embed
    rows = config.context + config.positions.offset
    found = (
        table("embed.table", "embed_tokens.weight", config.vocab, embed)
        | table("positions.table", "embed_positions.weight", rows, embed)
        | norm("final_norm", "final_layer_norm", embed, bias=True)
    )
    if not config.tied:
        found |= table("head.kernel", "lm_head.weight", config.vocab, embed)
    for i in range(config.layers):
        layer = f"layers.{i}"
        q, k, v, out = (f"{layer}.self_attn.{part}_proj" for part in ("q", "k", "v", "out"))
        found |= (
            norm(f"{layer}.attention_norm", f"{layer}.self_attn_layer_norm", embed, bias=True)
            | linear(
                f"{layer}.attention.qkv",
                (q, k, v),
                qkv_rows(attention),
                embed,
                bias=attention.qkv_bias,
                combine=by_kv_head(attention),
            )
            | linear(f"{layer}.attention.out", (out,), (embed,), embed, bias=attention.out_bias)
            | norm(f"{layer}.mlp_norm", f"{layer}.final_layer_norm", embed, bias=True)
            | linear(f"{layer}.mlp.up", (f"{layer}.fc1",), (mlp.hidden,), embed, bias=mlp.bias)
            | linear(f"{layer}.mlp.down", (f"{layer}.fc2",), (embed,), mlp.hidden, bias=mlp.bias)
        )
    return found


FAMILY = Family(
    model_types=("opt",),
    config=_config,
    sources=_sources,
    prefixes=("model.decoder.", "decoder."),
    ignored=r"lm_head\.weight|version",  # a tied head; a version number from fairseq
)
