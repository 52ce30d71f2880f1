"""Arcee (AFM): Llama with an MLP of squared ReLUs that is not gated."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families import llama
from jaxinfer.models.families.fields import Fields


def config(hf: Mapping[str, object]) -> DecoderConfig:
    """The config of Arcee, and of Nemotron but for its norms."""
    fields, base = Fields(hf), llama.config({"rms_norm_eps": 1e-5} | dict(hf))
    return base.with_mlp(activation=fields.activation("hidden_act", default="relu2"), gated=False)


FAMILY = dataclasses.replace(llama.FAMILY, model_types=("arcee",), published=("Arcee AFM 4.5B",), config=config)
