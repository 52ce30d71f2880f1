"""GLM-4.5 to GLM-4.7: Llama with half of each head rotated, and DeepSeek V3's experts in all but the first layers."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families import experts, llama
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import Source

_DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5}
_NAMES = experts.ExpertNames(shared="mlp.shared_experts")
_NEXT_TOKENS = r"layers\.(46|92)\..*"  # after the last layer: what predicts the token after the next


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    fields = Fields(hf)
    config = llama.base_config(_DEFAULTS | dict(hf)).with_attention(
        qkv_bias=fields.flag("attention_bias", default=False),
        qk_norm=fields.flag("use_qk_norm", default=False),
    )
    return experts.with_deepseek_experts(config, fields, first_dense=1, normalize=True)


def sources(config: DecoderConfig) -> dict[str, Source]:
    """The tensors of GLM-4.5 and dots.llm1."""
    return experts.sources(config, _NAMES)


FAMILY = dataclasses.replace(
    llama.FAMILY,
    model_types=("glm4_moe",),
    published=("GLM-4.5", "GLM-4.6", "GLM-4.7"),
    config=_config,
    sources=sources,
    ignored=f"{llama.IGNORED}|{_NEXT_TOKENS}",
)
