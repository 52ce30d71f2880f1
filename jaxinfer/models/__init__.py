"""The models: configs, layers, one decoder, one encoder, models of images, and the families mapped onto them.

No scheduling. Start at `config/` (what a model is), `text/decoder.py` and `layers/layer.py` (what it computes), then
`files/loading.py` (how it gets onto its devices). Only `files/` opens model directories.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jaxinfer.models.config import (
    DecoderConfig,
    EncoderConfig,
    ModelConfig,
    ResNetConfig,
    TransformerConfig,
    VisionConfig,
    ViTConfig,
    YoloConfig,
)
from jaxinfer.models.layers.forward_context import Cache, ForwardContext, TokenRows
from jaxinfer.models.layers.low_rank import LayerAdapters, LowRankStack
from jaxinfer.models.weight_format import WeightFormat
from jaxinfer.pallas_kernels import KVPages, RecurrentState

if TYPE_CHECKING:
    from jaxinfer.models.text.decoder import Decoder
    from jaxinfer.models.text.encoder import Encoder
    from jaxinfer.models.vision.resnet import ResNet
    from jaxinfer.models.vision.vit import ViT
    from jaxinfer.models.vision.yolo import Yolo

__all__ = [
    "Cache",
    "Decoder",
    "DecoderConfig",
    "Encoder",
    "EncoderConfig",
    "ForwardContext",
    "KVPages",
    "LayerAdapters",
    "LowRankStack",
    "ModelConfig",
    "RecurrentState",
    "ResNet",
    "ResNetConfig",
    "TokenRows",
    "TransformerConfig",
    "ViT",
    "ViTConfig",
    "VisionConfig",
    "WeightFormat",
    "Yolo",
    "YoloConfig",
]

_MODULES = {
    "Decoder": "jaxinfer.models.text.decoder",
    "Encoder": "jaxinfer.models.text.encoder",
    "ResNet": "jaxinfer.models.vision.resnet",
    "ViT": "jaxinfer.models.vision.vit",
    "Yolo": "jaxinfer.models.vision.yolo",
}


def __getattr__(name: str) -> Any:
    # Imported when first used, since they import Flax.
    if name not in _MODULES:
        raise AttributeError(f"module 'jaxinfer.models' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
