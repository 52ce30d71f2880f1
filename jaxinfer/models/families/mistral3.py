"""Mistral Small 3.1 and 3.2: the Mistral in a model that also sees."""

import dataclasses

from jaxinfer.models.families import mistral
from jaxinfer.models.families.text_part import text_part

# A head beside tied embeddings is not ignored: transformers takes it if it differs from them.
FAMILY = dataclasses.replace(text_part(mistral.FAMILY, "mistral3"), published=("Mistral Small 3.1",), ignored="")
