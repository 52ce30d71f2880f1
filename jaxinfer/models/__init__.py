"""The models: configs, layers, one decoder, one encoder, and the families mapped onto them.

No scheduling. Start at `config.py` (what a model is), `decoder.py` and `layer.py` (what it computes), then `loading.py`
(how it gets onto its devices). Only loading, conversion, verification and adapters open files.
"""

from jaxinfer.models.config import DecoderConfig, EncoderConfig, ModelConfig
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.encoder import Encoder
from jaxinfer.models.forward_context import ForwardContext, TokenRows
from jaxinfer.models.linear import WeightFormat
from jaxinfer.models.low_rank import LayerAdapters, LowRankStack
from pallas_kernels import KVPages

__all__ = [
    "Decoder",
    "DecoderConfig",
    "Encoder",
    "EncoderConfig",
    "ForwardContext",
    "KVPages",
    "LayerAdapters",
    "LowRankStack",
    "ModelConfig",
    "TokenRows",
    "WeightFormat",
]
