"""The image tower of SigLIP (arXiv:2303.15343), alone or beside its text tower, which is left out.

SigLIP 2 of a fixed resolution says that it is a SigLIP, and is one; `siglip2` (NaFlex) is not implemented.
"""

from collections.abc import Mapping

import numpy as np

from jaxinfer.models.config import ImagePooling, ViTConfig
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import Family, Source, linear, norm, table
from jaxinfer.models.families.vision import labels_by_head
from jaxinfer.models.families.vit import Names, vit_config, vit_sources


def _config(hf: Mapping[str, object]) -> ViTConfig:
    fields, tower, labels = Fields(hf), Fields(hf), ()
    if hf.get("model_type") == "siglip":
        tower = Fields(fields.optional(dict, "vision_config") or {}, "config.json: vision_config")
    if fields.optional(list, "architectures"):
        labels = labels_by_head(fields, ("SiglipForImageClassification",), ("SiglipModel", "SiglipVisionModel"))
    by_attention = not labels and tower.flag("vision_use_head", default=True)
    heads = tower.integer("num_attention_heads", default=12)
    activation = {"hidden_act": "gelu_pytorch_tanh"}
    return vit_config(
        Fields(activation | dict(tower.values), tower.file),
        eps=1e-6,
        labels=labels,
        class_tokens=0,
        pooling=ImagePooling.ATTENTION if by_attention else ImagePooling.NORMED_MEAN,
        pooling_heads=heads if by_attention else 0,
    )


def _sources(config: ViTConfig) -> dict[str, Source]:
    names, embed = "embeddings.position_embedding.weight", config.embed
    sources = vit_sources(config, _NAMES) | table("positions.table", names, config.patches, embed)
    if config.pooling is not ImagePooling.ATTENTION:
        return sources
    ours, theirs, joint = "attention_pooling", "head.attention", (3 * embed,)
    in_weight, in_bias = f"{theirs}.in_proj_weight", f"{theirs}.in_proj_bias"
    return (
        sources
        | {
            f"{ours}.query.table": Source(
                ("head.probe", in_weight, in_bias), ((1, 1, embed), (*joint, embed), joint), _projected
            ),
            f"{ours}.kv.weight": Source((in_weight,), ((*joint, embed),), _keys_and_values),
            f"{ours}.kv.bias": Source((in_bias,), (joint,), _keys_and_values),
        }
        | linear(f"{ours}.out", (f"{theirs}.out_proj",), (embed,), embed, bias=True)
        | norm(f"{ours}.norm", "head.layernorm", embed, bias=True)
        | linear(f"{ours}.mlp.gate_up", ("head.mlp.fc1",), (config.mlp.hidden,), embed, bias=True)
        | linear(f"{ours}.mlp.down", ("head.mlp.fc2",), (embed,), config.mlp.hidden, bias=True)
    )


def _projected(probe: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Project the learned query: [1, 1, D] -> [1, D], in float32."""
    probe, weight, bias = (array.astype(np.float32) for array in (probe, weight, bias))
    rows = probe.shape[-1]
    return probe[0] @ weight[:rows].T + bias[:rows]


def _keys_and_values(joint: np.ndarray) -> np.ndarray:
    """Leave out the first third, which makes queries."""
    return joint[len(joint) // 3 :]


_NAMES = Names(
    positions="",
    patches="embeddings.patch_embedding",
    layers="encoder.layers",
    attention_norm="layer_norm1",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    mlp_norm="layer_norm2",
    up="mlp.fc1",
    down="mlp.fc2",
    norm="post_layernorm",
    head="classifier",
)

FAMILY = Family(
    model_types=("siglip", "siglip_vision_model"),
    published=("SigLIP's image tower",),
    config=_config,
    sources=_sources,
    prefixes=("vision_model.",),
    # The text tower; the pooling of a checkpoint whose classifier has the mean of patches; places in older files.
    ignored=r"text_model\..*|logit_scale|logit_bias|head\..*|embeddings\.position_ids",
    image_processor="Siglip",
)
