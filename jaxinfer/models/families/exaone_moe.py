"""EXAONE 4's attention with DeepSeek V3's experts, and norms before both."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families import exaone4, experts, llama
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import Source

_NAMES = experts.ExpertNames(selection_bias="mlp.e_score_correction_bias", shared="mlp.shared_experts")


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    fields = Fields({"routed_scaling_factor": 2.5} | dict(hf))
    return experts.with_deepseek_experts(exaone4.base_config(hf), fields, first_dense=1, normalize=True)


def _sources(config: DecoderConfig) -> dict[str, Source]:
    return experts.sources(config, _NAMES)


FAMILY = dataclasses.replace(
    llama.FAMILY,
    model_types=("exaone_moe",),
    published=("K-EXAONE",),
    config=_config,
    sources=_sources,
    ignored=rf"{llama.IGNORED}|mtp\..*",  # what predicts the token after the next
    renamed=(("mlp.gate.e_score_correction_bias", _NAMES.selection_bias),),  # as transformers 5 has it in memory
)
