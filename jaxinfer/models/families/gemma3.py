"""Gemma 3 of 4B and more: the Gemma 3 in a model that also sees."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families import gemma3_text
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.text_part import text_part


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    Fields(hf).expect("final_logit_softcapping", None)  # transformers 5.23 reads it, and applies it in text models only
    return gemma3_text.config(hf)


FAMILY = text_part(
    dataclasses.replace(gemma3_text.FAMILY, config=_config, published=("Gemma 3 4B, 12B and 27B",)), "gemma3"
)
