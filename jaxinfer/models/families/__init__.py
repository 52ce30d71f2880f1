"""The supported Hugging Face families, one small file each.

Start at `mapping.py` (tensors) and `fields.py` (configs); docs/adding-a-family.md says how to add one. No file is
opened here.
"""

from collections.abc import Mapping

from jaxinfer.models.families import (
    bert,
    bloom,
    distilbert,
    gemma2,
    gpt2,
    gpt_neo,
    gpt_neox,
    gptj,
    llama,
    mistral,
    opt,
    phi3,
    qwen2,
    qwen3,
    roberta,
)
from jaxinfer.models.families.mapping import Family, Source, plan

_MODULES = (
    *(gpt2, gpt_neo, gptj, gpt_neox, opt, bloom, llama, mistral, qwen2, qwen3, gemma2, phi3),
    *(bert, distilbert, roberta),
)
FAMILIES: dict[str, Family] = {
    model_type: module.FAMILY for module in _MODULES for model_type in module.FAMILY.model_types
}


def family_of(hf_config: Mapping[str, object]) -> Family:
    """The family of a `config.json`, by its `model_type`."""
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(
            f"config.json: model_type={model_type!r} is not implemented; known: {', '.join(sorted(FAMILIES))}."
        )
    return FAMILIES[model_type]


__all__ = ["FAMILIES", "Family", "Source", "family_of", "plan"]
