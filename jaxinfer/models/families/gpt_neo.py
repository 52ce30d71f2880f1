"""GPT-Neo: unscaled attention, local in some layers."""

from collections.abc import Mapping

from jaxinfer.fields import shown
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
from jaxinfer.models.families.mapping import Family, Source, by_kv_head, linear, norm, qkv_rows, table


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """The window of each layer, from `attention_types`, a list of (kinds, repetitions)."""
    window = fields.integer("window_size", default=256)
    types = fields.optional(list, "attention_types") or [[["global", "local"], 12]]
    try:
        kinds = [str(kind) for kinds, times in types for kind in kinds * times]
    except (TypeError, ValueError):  # no pairs of a list and a number
        kinds = []
    if len(kinds) != layers or not set(kinds) <= {"global", "local"}:
        raise ValueError(
            f"config.json: attention_types={shown(types)} must name global or local for each of {layers} layers; "
            "correct it."
        )
    return tuple(window if kind == "local" else None for kind in kinds)


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    fields = Fields(hf)
    embed, heads = fields.integer("hidden_size"), fields.integer("num_heads", "num_attention_heads")
    layers = fields.integer("num_layers", "num_hidden_layers")
    return DecoderConfig(
        vocab=fields.integer("vocab_size"),
        embed=embed,
        layers=layers,
        context=fields.integer("max_position_embeddings", default=2048),
        pattern=(
            LayerConfig(
                mixer=AttentionConfig(
                    q_heads=heads,
                    kv_heads=heads,
                    head_dim=fields.head_dim(embed, heads),
                    out_bias=True,
                    scale=1.0,
                ),
                mlp=MlpConfig(
                    hidden=fields.integer("intermediate_size", default=4 * embed),
                    activation=fields.activation("activation_function", default="gelu_new"),
                    bias=True,
                ),
            ),
        ),
        learned_positions=LearnedPositions(),
        norm=NormConfig(kind=NormKind.LAYER, eps=fields.number("layer_norm_epsilon", default=1e-5)),
        tied=fields.flag("tie_word_embeddings", default=True),
    ).with_windows(_windows(fields, layers))


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
        q, k, v, out = (f"{theirs}.attn.attention.{part}_proj" for part in ("q", "k", "v", "out"))
        sources |= (
            norm(f"{ours}.attention_norm", f"{theirs}.ln_1", embed, bias=True)
            | linear(
                f"{ours}.attention.qkv",
                (q, k, v),
                qkv_rows(attention),
                embed,
                bias=False,
                combine=by_kv_head(attention),
            )
            | linear(f"{ours}.attention.out", (out,), (embed,), embed, bias=True)
            | norm(f"{ours}.mlp_norm", f"{theirs}.ln_2", embed, bias=True)
            | linear(f"{ours}.mlp.gate_up", (f"{theirs}.mlp.c_fc",), (hidden,), embed, bias=True)
            | linear(f"{ours}.mlp.down", (f"{theirs}.mlp.c_proj",), (embed,), hidden, bias=True)
        )
    return sources


FAMILY = Family(
    model_types=("gpt_neo",),
    published=("GPT-Neo",),
    config=_config,
    sources=_sources,
    prefixes=("transformer.",),
    ignored=r"lm_head\.weight|h\.\d+\.attn\.attention\.(masked_)?bias",  # a tied head; the causal mask
)
