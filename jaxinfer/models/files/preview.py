"""A checkpoint before it is converted: the model that it would become, by `config.json` or a GGUF header alone."""

import dataclasses
import re
from collections.abc import Collection
from pathlib import Path

from jaxinfer.checkpoints import CheckpointError
from jaxinfer.checkpoints.huggingface import read_json
from jaxinfer.checkpoints.paths import find_gguf
from jaxinfer.models.config import VisionConfig
from jaxinfer.models.families import is_timm
from jaxinfer.models.families.fields import surveyed
from jaxinfer.models.families.image_processors import PREPROCESSOR
from jaxinfer.models.families.sentence_transformers import MODULE_CONFIG, MODULES, PROMPTS, TRANSFORMER
from jaxinfer.models.files.conversion import GENERATION, HuggingFaceModel, describe_fields
from jaxinfer.models.files.description import CONFIG, DTYPES, Description
from jaxinfer.models.files.tokenizer_config import TOKENIZER_CONFIG
from jaxinfer.models.files.tokenizer_files import tokenizer_files

_BESIDE_CONFIG = (CONFIG, GENERATION, PREPROCESSOR, MODULES, PROMPTS, *TRANSFORMER, TOKENIZER_CONFIG)


def described_by(names: Collection[str]) -> list[str]:
    """Return `config.json` and the small files that say more of a model, of those that a repository has."""
    return [name for name in names if name in _BESIDE_CONFIG or re.fullmatch(MODULE_CONFIG, name)]


@dataclasses.dataclass(frozen=True)
class Preview:
    """A model that is not converted yet.

    Attributes:
      description: of the model directory that it would become; None if it is not supported.
      refused: an error for each thing that is not supported.
      source: the repository that it is in, as ORG/NAME@COMMIT; empty for a folder.
    """

    description: Description | None
    refused: tuple[str, ...] = ()
    source: str = ""


def preview(path: Path, *, weights: bool = True) -> Preview:
    """Return what a Hugging Face directory holds, and all that is not supported of it, not only the first thing.

    For a GGUF file it is the first thing.

    Args:
      path: the file, or the directory, of which `config.json` is enough.
      weights: whether the tensors that are there are checked too, by their names and shapes.

    Raises CheckpointError for a directory that does not say what it is.
    """
    if weights and (find_gguf(path) or any(path.glob("*.safetensors"))):
        return _with_weights(path)
    fields = read_json(path / CONFIG, required=True)
    if is_timm(fields):
        raise CheckpointError(
            f"{path}: timm's {CONFIG} does not list the model's sizes, and the weights are missing; add the weights."
        )
    return _by_fields(path)


def _with_weights(path: Path) -> Preview:
    seen = _by_fields(path) if read_json(path / CONFIG).get("model_type") else Preview(None)
    if seen.refused:
        return seen
    try:
        model = HuggingFaceModel(path)
    except CheckpointError as error:
        return Preview(None, (str(error),))
    return Preview(Description(family=model.model_type, config=model.config, dtype=model.dtype))


def _by_fields(path: Path) -> Preview:
    fields = read_json(path / CONFIG)
    with surveyed() as survey:
        try:
            family, config = describe_fields(path, fields)
        except ValueError as error:
            return Preview(None, (*survey.refused, str(error)))
    refused = survey.refused
    family_name = fields.get("model_type", family.model_types[0])
    if not isinstance(config, VisionConfig):
        try:
            tokenizer_files(path, family_name, config.vocab)
        except CheckpointError as error:
            refused.append(str(error))
    if refused:
        return Preview(None, tuple(refused))
    dtype = fields.get("dtype") or fields.get("torch_dtype")
    return Preview(Description(family=family_name, config=config, dtype=dtype if dtype in DTYPES else "float32"))
