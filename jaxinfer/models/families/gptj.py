"""GPT-J: attention and MLP in parallel, and a rotation of neighbouring features."""

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
)
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import (
    Family,
    Source,
    by_kv_head_from_pairs,
    linear,
    norm,
    qkv_rows,
    table,
)


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    fields = Fields(hf)
    fields.expect("tie_word_embeddings", False)  # the head has a bias of its own
    embed, heads = fields.integer("n_embd", "hidden_size"), fields.integer("n_head", "num_attention_heads")
    head_dim = fields.head_dim(embed, heads)
    return DecoderConfig(
        vocab=fields.integer("vocab_size"),
        embed=embed,
        layers=fields.integer("n_layer", "num_hidden_layers"),
        context=fields.integer("n_positions", "max_position_embeddings", default=2048),
        pattern=(
            LayerConfig(
                block=BlockKind.PARALLEL,
                mixer=AttentionConfig(
                    q_heads=heads,
                    kv_heads=heads,
                    head_dim=head_dim,
                    positions=PositionsConfig(
                        kind=PositionKind.ROTARY, rotary_dim=fields.integer("rotary_dim", default=64)
                    ),
                ),
                mlp=MlpConfig(
                    hidden=fields.integer("n_inner", default=4 * embed),
                    activation=fields.activation("activation_function", default="gelu_new"),
                    bias=True,
                ),
            ),
        ),
        norm=NormConfig(kind=NormKind.LAYER, eps=fields.number("layer_norm_epsilon", default=1e-5)),
        head_bias=True,
    )


def _sources(config: DecoderConfig) -> dict[str, Source]:
    embed = config.embed
    sources = (
        table("embed.table", "wte.weight", config.vocab, embed)
        | norm("final_norm", "ln_f", embed, bias=True)
        | linear("head", ("lm_head",), (config.vocab,), embed, bias=True)
    )
    for i in range(config.layers):
        ours, theirs = f"layers.{i}", f"h.{i}"
        attention, hidden = config.layer(i).attention, config.layer(i).mlp.hidden
        joined = by_kv_head_from_pairs(attention, attention.positions.rotary_dim)
        q, k, v, out = (f"{theirs}.attn.{part}_proj" for part in ("q", "k", "v", "out"))
        sources |= (
            norm(f"{ours}.attention_norm", f"{theirs}.ln_1", embed, bias=True)
            | linear(f"{ours}.attention.qkv", (q, k, v), qkv_rows(attention), embed, bias=False, combine=joined)
            | linear(f"{ours}.attention.out", (out,), (embed,), embed, bias=False)
            | linear(f"{ours}.mlp.gate_up", (f"{theirs}.mlp.fc_in",), (hidden,), embed, bias=True)
            | linear(f"{ours}.mlp.down", (f"{theirs}.mlp.fc_out",), (embed,), hidden, bias=True)
        )
    return sources


FAMILY = Family(
    model_types=("gptj",),
    published=("GPT-J",),
    config=_config,
    sources=_sources,
    prefixes=("transformer.",),
    ignored=r"h\.\d+\.attn\.((masked_)?bias|embed_positions)",  # the causal mask; a table we compute
)
