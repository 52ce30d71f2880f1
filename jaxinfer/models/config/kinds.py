"""The kinds of models, each with a config of its own."""

from typing import Literal

from jaxinfer.models.config.convolutional import ResNetConfig, YoloConfig
from jaxinfer.models.config.decoder import DecoderConfig
from jaxinfer.models.config.encoder import EncoderConfig
from jaxinfer.models.config.vit import ViTConfig

TransformerConfig = DecoderConfig | EncoderConfig
ConvolutionalConfig = ResNetConfig | YoloConfig
VisionConfig = ConvolutionalConfig | ViTConfig
ModelConfig = TransformerConfig | VisionConfig

Kind = Literal["decoder", "encoder", "classifier", "detector", "vision_transformer"]
KINDS: dict[Kind, type[ModelConfig]] = {
    "decoder": DecoderConfig,
    "encoder": EncoderConfig,
    "classifier": ResNetConfig,
    "detector": YoloConfig,
    "vision_transformer": ViTConfig,
}


def kind_of(config: ModelConfig) -> Kind:
    """The kind of model that a config describes."""
    return next(kind for kind, known in KINDS.items() if isinstance(config, known))
