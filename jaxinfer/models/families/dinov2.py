"""DINOv2 (arXiv:2304.07193), with and without registers (arXiv:2309.16588), as `transformers` has it.

Layer scale is multiplied into the projections before it. Positions are interpolated to the images' grid, which is not
the one they were learned for in most published files.
"""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import (
    IMAGENET_DEVIATION,
    IMAGENET_MEAN,
    Activation,
    ImagePooling,
    MlpConfig,
    PositionGrid,
    PreprocessingConfig,
    ViTConfig,
)
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import Family, Source
from jaxinfer.models.families.vision import labels_by_head
from jaxinfer.models.families.vit import NAMES, PROJECTIONS, vit_config, vit_sources


def _config(hf: Mapping[str, object]) -> ViTConfig:
    fields = Fields(hf)
    registers = hf.get("model_type") == "dinov2_with_registers"
    name = "Dinov2WithRegisters" if registers else "Dinov2"
    labels = ()
    if fields.optional(list, "architectures"):
        labels = labels_by_head(fields, (f"{name}ForImageClassification",), (f"{name}Model",))
    image_size, patch_size = fields.side("image_size", default=224), 16 if registers else 14
    return vit_config(
        fields,
        patch_size=patch_size,
        eps=1e-6,
        mlp=_mlp(fields),
        labels=labels,
        registers=fields.integer("num_register_tokens", default=4) if registers else 0,
        pooling=ImagePooling.CLS_AND_MEAN if labels else ImagePooling.CLS,
        position_grid=PositionGrid(
            side=image_size // fields.side("patch_size", default=patch_size), antialias=registers
        ),
        preprocessing=PreprocessingConfig(mean=IMAGENET_MEAN, deviation=IMAGENET_DEVIATION),
    )


def _mlp(fields: Fields) -> MlpConfig:
    hidden = int(fields.integer("hidden_size", default=768) * fields.number("mlp_ratio", default=4.0))
    if fields.flag("use_swiglu_ffn", default=False):
        return MlpConfig(hidden=(hidden * 2 // 3 + 7) // 8 * 8, activation=Activation.SILU, gated=True, bias=True)
    return MlpConfig(hidden=hidden, activation=fields.activation("hidden_act", default="gelu"), bias=True)


def _sources(config: ViTConfig) -> dict[str, Source]:
    up, down = ("weights_in", "weights_out") if config.mlp.gated else ("fc1", "fc2")
    names = dataclasses.replace(
        NAMES,
        registers="embeddings.register_tokens",
        layers="encoder.layer",
        attention_norm="norm1",
        mlp_norm="norm2",
        up=f"mlp.{up}",
        down=f"mlp.{down}",
        scales=("layer_scale1.lambda1", "layer_scale2.lambda1"),
    )
    return vit_sources(config, names)


FAMILY = Family(
    model_types=("dinov2", "dinov2_with_registers"),
    published=("DINOv2",),
    config=_config,
    sources=_sources,
    prefixes=("dinov2.", "dinov2_with_registers."),
    ignored=r"embeddings\.mask_token",  # of training
    renamed=PROJECTIONS,
    image_processor="Bit",
)
