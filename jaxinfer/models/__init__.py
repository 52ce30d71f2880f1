"""The models: configs, layers, one decoder, one encoder, and the families mapped onto them.

No file access and no scheduling. Start at `config.py` (what a model is), then `decoder.py` (what it computes).
"""

from jaxinfer.models.config import DecoderConfig, EncoderConfig, ModelConfig
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.encoder import Encoder
from jaxinfer.models.layers import KVPages, WeightFormat

__all__ = ["Decoder", "DecoderConfig", "Encoder", "EncoderConfig", "KVPages", "ModelConfig", "WeightFormat"]
