"""Mistral Small 3.1 and 3.2, and Ministral 3: the Mistral in a model that also sees."""

import dataclasses

from jaxinfer.models.families import ministral3, mistral
from jaxinfer.models.families.text_part import text_part

FAMILY = text_part(
    dataclasses.replace(mistral.FAMILY, published=("Mistral Small 3.1", "Ministral 3")),
    "mistral3",
    others=(ministral3.FAMILY,),
)
