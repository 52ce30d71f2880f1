"""RoBERTa: BERT with positions that start after the padding id."""

from collections.abc import Mapping

from jaxinfer.models.config import EncoderConfig
from jaxinfer.models.families import bert
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import Family


def _config(hf: Mapping[str, object]) -> EncoderConfig:
    return bert.encoder_config(hf, offset=Fields(hf).integer("pad_token_id", default=1) + 1)


FAMILY = Family(
    model_types=("roberta",),
    published=("RoBERTa",),
    config=_config,
    sources=bert.sources,
    prefixes=("roberta.",),
    ignored=r"embeddings\.position_ids|(pooler|lm_head)\..*",  # the heads of pre-training
)
