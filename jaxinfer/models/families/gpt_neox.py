"""GPT-NeoX and Pythia: partial rotary positions, attention and MLP in parallel with a norm each."""

from collections.abc import Mapping

from jaxinfer.models.config import (
    AttentionConfig,
    BlockKind,
    DecoderConfig,
    LayerConfig,
    MlpConfig,
    NormConfig,
    NormKind,
)
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import Family, Source, linear, norm, qkv_rows, table


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    fields = Fields(hf)
    embed, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim, bias = fields.head_dim(embed, heads), fields.flag("attention_bias", default=True)
    parallel = fields.flag("use_parallel_residual", default=True)
    return DecoderConfig(
        vocab=fields.integer("vocab_size"),
        embed=embed,
        layers=fields.integer("num_hidden_layers"),
        context=fields.integer("max_position_embeddings", default=2048),
        pattern=(
            LayerConfig(
                block=BlockKind.PARALLEL_TWO_NORMS if parallel else BlockKind.SEQUENTIAL,
                mixer=AttentionConfig(
                    q_heads=heads,
                    kv_heads=heads,
                    head_dim=head_dim,
                    qkv_bias=bias,
                    out_bias=bias,
                    positions=fields.rotary(
                        head_dim, theta_names=("rotary_emb_base",), fraction=0.25, fraction_names=("rotary_pct",)
                    ),
                ),
                mlp=MlpConfig(
                    hidden=fields.integer("intermediate_size"),
                    activation=fields.activation("hidden_act", default="gelu"),
                    bias=True,
                ),
            ),
        ),
        norm=NormConfig(kind=NormKind.LAYER, eps=fields.number("layer_norm_eps", default=1e-5)),
        tied=fields.flag("tie_word_embeddings", default=False),
    )


def _sources(config: DecoderConfig) -> dict[str, Source]:
    embed = config.embed
    sources = table("embed.table", "embed_in.weight", config.vocab, embed) | norm(
        "final_norm", "final_layer_norm", embed, bias=True
    )
    if not config.tied:
        sources |= table("head.weight", "embed_out.weight", config.vocab, embed)
    for i in range(config.layers):
        layer = f"layers.{i}"
        attention, hidden = config.layer(i).attention, config.layer(i).mlp.hidden
        sources |= (
            norm(f"{layer}.attention_norm", f"{layer}.input_layernorm", embed, bias=True)
            | linear(  # already by head: its query, its key, its value
                f"{layer}.attention.qkv",
                (f"{layer}.attention.query_key_value",),
                (sum(qkv_rows(attention)),),
                embed,
                bias=attention.qkv_bias,
            )
            | linear(f"{layer}.attention.out", (f"{layer}.attention.dense",), (embed,), embed, bias=attention.out_bias)
            | norm(f"{layer}.mlp_norm", f"{layer}.post_attention_layernorm", embed, bias=True)
            | linear(f"{layer}.mlp.gate_up", (f"{layer}.mlp.dense_h_to_4h",), (hidden,), embed, bias=True)
            | linear(f"{layer}.mlp.down", (f"{layer}.mlp.dense_4h_to_h",), (embed,), hidden, bias=True)
        )
    return sources


FAMILY = Family(
    model_types=("gpt_neox",),
    published=("GPT-NeoX", "Pythia"),
    config=_config,
    sources=_sources,
    prefixes=("gpt_neox.",),
    # a tied head; the causal mask; a table we compute
    ignored=r"embed_out\.weight|layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)|rotary_emb\.inv_freq",
    renamed=(("lm_head.", "embed_out."),),
)
