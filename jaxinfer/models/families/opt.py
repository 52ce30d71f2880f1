"""OPT: ReLU and learned positions that start at row 2; OPT-350m alone has post-norm blocks and narrower embeddings."""

from collections.abc import Mapping

from jaxinfer.models.config import (
    AttentionConfig,
    BlockKind,
    DecoderConfig,
    LayerConfig,
    LearnedPositions,
    MlpConfig,
    NormConfig,
    NormKind,
)
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import Family, Source, by_kv_head, constant, linear, norm, qkv_rows, table


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    fields = Fields(hf)
    embed, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    bias = fields.flag("enable_bias", default=True)
    word_embed = fields.integer("word_embed_proj_dim", default=embed)
    norm_before = fields.flag("do_layer_norm_before", default=True)
    return DecoderConfig(
        vocab=fields.integer("vocab_size"),
        embed=embed,
        layers=fields.integer("num_hidden_layers"),
        context=fields.integer("max_position_embeddings", default=2048),
        word_embed=None if word_embed == embed else word_embed,
        final_norm=norm_before and not fields.flag("_remove_final_layer_norm", default=False),
        pattern=(
            LayerConfig(
                block=BlockKind.SEQUENTIAL if norm_before else BlockKind.POST_NORM,
                mixer=AttentionConfig(
                    q_heads=heads,
                    kv_heads=heads,
                    head_dim=fields.head_dim(embed, heads),
                    qkv_bias=bias,
                    out_bias=bias,
                ),
                mlp=MlpConfig(
                    hidden=fields.integer("ffn_dim"),
                    activation=fields.activation("activation_function", default="relu"),
                    bias=bias,
                ),
            ),
        ),
        learned_positions=LearnedPositions(offset=2),
        norm=NormConfig(
            kind=NormKind.LAYER, eps=1e-5, affine=fields.flag("layer_norm_elementwise_affine", default=True)
        ),
        tied=fields.flag("tie_word_embeddings", default=True),
    )


def _norm(config: DecoderConfig, leaf: str, name: str) -> dict[str, Source]:
    if config.norm.affine:
        return norm(leaf, name, config.embed, bias=True)
    return constant(f"{leaf}.scale", 1.0, config.embed) | constant(f"{leaf}.bias", 0.0, config.embed)


def _sources(config: DecoderConfig) -> dict[str, Source]:
    assert config.learned_positions is not None, "every OPT has them"
    embed, width, rows = config.embed, config.output_width, config.context + config.learned_positions.offset
    sources = table("embed.table", "embed_tokens.weight", config.vocab, width)
    sources |= table("positions.table", "embed_positions.weight", rows, embed)
    if config.word_embed is not None:
        sources |= linear("project_in", ("project_in",), (embed,), width, bias=False)
        sources |= linear("project_out", ("project_out",), (width,), embed, bias=False)
    if config.final_norm:
        sources |= _norm(config, "final_norm", "final_layer_norm")
    if not config.tied:
        sources |= table("head.weight", "lm_head.weight", config.vocab, width)
    for i in range(config.layers):
        layer, attention, mlp = f"layers.{i}", config.layer(i).attention, config.layer(i).mlp
        q, k, v, out = (f"{layer}.self_attn.{part}_proj" for part in ("q", "k", "v", "out"))
        sources |= (
            _norm(config, f"{layer}.attention_norm", f"{layer}.self_attn_layer_norm")
            | linear(
                f"{layer}.attention.qkv",
                (q, k, v),
                qkv_rows(attention),
                embed,
                bias=attention.qkv_bias,
                combine=by_kv_head(attention),
            )
            | linear(f"{layer}.attention.out", (out,), (embed,), embed, bias=attention.out_bias)
            | _norm(config, f"{layer}.mlp_norm", f"{layer}.final_layer_norm")
            | linear(f"{layer}.mlp.gate_up", (f"{layer}.fc1",), (mlp.hidden,), embed, bias=mlp.bias)
            | linear(f"{layer}.mlp.down", (f"{layer}.fc2",), (embed,), mlp.hidden, bias=mlp.bias)
        )
    return sources


FAMILY = Family(
    model_types=("opt",),
    published=("OPT", "Galactica"),
    config=_config,
    sources=_sources,
    prefixes=("model.decoder.", "decoder."),
    ignored=r"lm_head\.weight|version",  # a tied head; a version number from fairseq
)
