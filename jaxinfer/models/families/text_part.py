"""Models that also see: the part of them that reads text is a family of its own."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxinfer.fields import shown
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.families.fields import Fields, refuse
from jaxinfer.models.families.mapping import Family

_AXES = ("mrope_section", "mrope_interleaved")
"""How positions in images are divided into three axes. All three axes of a text are equal, so nothing is divided."""


def without_axes(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a text part's config, with rotary positions that are not divided into axes."""
    copied = dict(hf)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := copied.get(name), Mapping):
            rope = {key: value for key, value in rope.items() if key not in _AXES}
            copied[name] = {key: "default" if value == "mrope" else value for key, value in rope.items()}
    return copied


def text_part(
    family: Family, model_type: str, *, others: tuple[Family, ...] = (), flat: bool = False, alone: bool = False
) -> Family:
    """The family of models whose text part, with its config in `text_config`, is of `family`.

    The tensors of the other parts are left out. If the whole has a `tie_word_embeddings`, it counts.

    Args:
      family: of the text part.
      model_type: of the whole.
      others: families that the text part may be of, too, with the same tensors.
      flat: whether published files have the fields of the text part beside those of the whole, without `text_config`.
      alone: whether a checkpoint may be of the text part alone, with its own `model_type`.
    """
    families = {kind: each for each in (family, *others) for kind in each.model_types}

    def config(hf: Mapping[str, Any]) -> ModelConfig:
        if alone and hf.get("model_type") in family.model_types:
            return family.config(hf)
        fields = Fields(hf)
        text = fields.optional(dict, "text_config")
        if text is None and flat:
            text = dict(hf) | {"model_type": family.model_types[0]}
        if text is None:
            raise ValueError("config.json: text_config is missing; use the checkpoint's original config.json.")
        kind = Fields(text, "config.json: text_config").optional(str, "model_type") or family.model_types[0]
        if kind not in families:
            refuse(
                f"config.json: text_config.model_type={shown(kind)} is not implemented in {model_type}, only "
                f"{', '.join(map(repr, families))}; choose another checkpoint."
            )
        tied = fields.optional(bool, "tie_word_embeddings")
        return families.get(kind, family).config(text if tied is None else text | {"tie_word_embeddings": tied})

    return dataclasses.replace(
        family,
        model_types=(model_type, *family.model_types) if alone else (model_type,),
        config=config,
        prefixes=("language_model.model.", "model.language_model.", "language_model.", *family.prefixes),
        left_out=r"(model\.)?(vision_tower|multi_modal_projector|visual|audio_tower|embed_vision|embed_audio)\..*",
    )
