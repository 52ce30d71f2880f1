"""The numbers that a model is made of: frozen configs that check themselves when they are made.

A family (`families/`) maps a Hugging Face `config.json` onto these; a model directory stores them as JSON.
Start at `decoder.py` for language models, and at `vit.py` for images.
Dimensions everywhere: batch (B), tokens (T), keys (S), embed (D), vocab (V), mlp hidden (F), heads (H), head_dim (K);
of images batch (B), height (H), width (W), channels (C).
"""

from jaxinfer.models.config.attention import AttentionConfig, QKNormScope, QueryTemperature
from jaxinfer.models.config.checks import MAX_EXPERTS, MAX_LAYERS
from jaxinfer.models.config.convolutional import STRIDES, ResNetConfig, YoloConfig
from jaxinfer.models.config.decoder import DecoderConfig
from jaxinfer.models.config.delta_rule import DeltaRuleConfig
from jaxinfer.models.config.encoder import DenseActivation, DenseConfig, EncoderConfig
from jaxinfer.models.config.kinds import (
    KINDS,
    ConvolutionalConfig,
    Kind,
    ModelConfig,
    TransformerConfig,
    VisionConfig,
    kind_of,
)
from jaxinfer.models.config.layers import BlockKind, LayerConfig
from jaxinfer.models.config.mixer import Mixer
from jaxinfer.models.config.mlp import (
    Activation,
    GroupScore,
    MlpConfig,
    MoeConfig,
    RouterConfig,
    RouterKind,
    SharedMix,
)
from jaxinfer.models.config.norm import NormConfig, NormKind
from jaxinfer.models.config.positions import (
    NO_POSITIONS,
    LearnedPositions,
    PositionKind,
    PositionsConfig,
    RopeScaling,
    alibi_slopes,
)
from jaxinfer.models.config.preprocessing import (
    IMAGENET_DEVIATION,
    IMAGENET_MEAN,
    PreprocessingConfig,
    Resampling,
)
from jaxinfer.models.config.text import Pooling
from jaxinfer.models.config.vit import ImagePooling, PositionGrid, ViTConfig

__all__ = [
    "IMAGENET_DEVIATION",
    "IMAGENET_MEAN",
    "KINDS",
    "MAX_EXPERTS",
    "MAX_LAYERS",
    "NO_POSITIONS",
    "STRIDES",
    "Activation",
    "AttentionConfig",
    "BlockKind",
    "ConvolutionalConfig",
    "DecoderConfig",
    "DeltaRuleConfig",
    "DenseActivation",
    "DenseConfig",
    "EncoderConfig",
    "GroupScore",
    "ImagePooling",
    "Kind",
    "LayerConfig",
    "LearnedPositions",
    "Mixer",
    "MlpConfig",
    "ModelConfig",
    "MoeConfig",
    "NormConfig",
    "NormKind",
    "Pooling",
    "PositionGrid",
    "PositionKind",
    "PositionsConfig",
    "PreprocessingConfig",
    "QKNormScope",
    "QueryTemperature",
    "ResNetConfig",
    "Resampling",
    "RopeScaling",
    "RouterConfig",
    "RouterKind",
    "SharedMix",
    "TransformerConfig",
    "ViTConfig",
    "VisionConfig",
    "YoloConfig",
    "alibi_slopes",
    "kind_of",
]
