"""DeiT (arXiv:2012.12877) with its distillation token; without it a checkpoint is a ViT, and says so."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxinfer.models.config import IMAGENET_DEVIATION, IMAGENET_MEAN, ImagePooling, PreprocessingConfig, ViTConfig
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import Family, Source
from jaxinfer.models.families.vision import labels_by_head
from jaxinfer.models.families.vit import NAMES, RENAMED, vit_config, vit_sources

_TEACHER = "DeiTForImageClassificationWithTeacher"


def _config(hf: Mapping[str, object]) -> ViTConfig:
    fields = Fields(hf)
    heads = ("DeiTForImageClassification", _TEACHER)
    with_teacher = _TEACHER in (fields.optional(list, "architectures") or ())
    return vit_config(
        fields,
        eps=1e-12,
        labels=labels_by_head(fields, heads, ("DeiTModel",)),
        class_tokens=2,
        pooling=ImagePooling.CLASS_TOKENS if with_teacher else ImagePooling.CLS,
        preprocessing=PreprocessingConfig(mean=IMAGENET_MEAN, deviation=IMAGENET_DEVIATION),
    )


def _sources(config: ViTConfig) -> dict[str, Source]:
    names = dataclasses.replace(NAMES, class_tokens=("embeddings.cls_token", "embeddings.distillation_token"))
    if config.pooling is ImagePooling.CLS:
        return vit_sources(config, names)
    heads, classes = ("cls_classifier", "distillation_classifier"), len(config.labels)
    return vit_sources(config, dataclasses.replace(names, head="")) | {
        "head.weight": Source(tuple(f"{head}.weight" for head in heads), ((classes, config.embed),) * 2, _side_by_side),
        "head.bias": Source(tuple(f"{head}.bias" for head in heads), ((classes,),) * 2, _mean),
    }


def _side_by_side(by_class: np.ndarray, by_distillation: np.ndarray) -> np.ndarray:
    """Join two heads into one whose outputs are the mean of theirs: [classes, D] each -> [classes, 2 D]."""
    return np.concatenate((by_class, by_distillation), axis=1) / np.array(2, by_class.dtype)


def _mean(by_class: np.ndarray, by_distillation: np.ndarray) -> np.ndarray:
    return (by_class.astype(np.float32) + by_distillation.astype(np.float32)) / 2


FAMILY = Family(
    model_types=("deit",),
    published=("DeiT",),
    config=_config,
    sources=_sources,
    prefixes=("deit.",),
    ignored=r"pooler\..*|embeddings\.mask_token",  # of other heads
    renamed=RENAMED,
    image_processor="DeiT",
)
