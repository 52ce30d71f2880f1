"""Gemma 4 as published: the text part of a model that also sees and hears."""

import dataclasses

from jaxinfer.models.families import gemma4_text
from jaxinfer.models.families.text_part import text_part

FAMILY = text_part(dataclasses.replace(gemma4_text.FAMILY, published=("Gemma 4 E2B, E4B, 26B-A4B and 31B",)), "gemma4")
