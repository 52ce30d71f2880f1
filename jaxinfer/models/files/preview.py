"""A checkpoint before it is converted: the model that it would become, by `config.json` or a GGUF header alone."""

import dataclasses
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jaxinfer.checkpoints import CheckpointError
from jaxinfer.checkpoints.huggingface import read_json
from jaxinfer.checkpoints.paths import find_gguf
from jaxinfer.models.config import VisionConfig
from jaxinfer.models.families import is_timm
from jaxinfer.models.families.fields import surveyed
from jaxinfer.models.families.image_processors import PREPROCESSOR
from jaxinfer.models.families.sentence_transformers import MODULE_CONFIG, SENTENCE_FILES
from jaxinfer.models.files.conversion import HuggingFaceModel, describe_fields, describe_texts
from jaxinfer.models.files.description import CONFIG, DTYPES, Description
from jaxinfer.models.files.generation_config import GENERATION
from jaxinfer.models.files.tokenizer_config import TOKENIZER_CONFIG
from jaxinfer.models.files.tokenizer_files import TOKENIZER, FolderTokenizer, token_texts, tokenizer_files

_BESIDE_CONFIG = (CONFIG, GENERATION, PREPROCESSOR, *SENTENCE_FILES, TOKENIZER_CONFIG)


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
      ends: the texts of the tokens that end a text, by id; empty where no file says them.
    """

    description: Description | None
    refused: tuple[str, ...] = ()
    source: str = ""
    ends: Mapping[int, str] = dataclasses.field(default_factory=dict)


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
    fields = read_json(path / CONFIG)
    if fields.get("model_type") and (refused := _refused(path, fields)):
        return Preview(None, refused)
    try:
        model = HuggingFaceModel(path)
        description = model.describe()
    except CheckpointError as error:
        return Preview(None, (str(error),))
    return _preview(path, description, model.tokenizer_files() if find_gguf(path) else {})


def _by_fields(path: Path) -> Preview:
    fields = read_json(path / CONFIG)
    if refused := _refused(path, fields):
        return Preview(None, refused)
    family, config = describe_fields(path, fields)
    family_name = fields.get("model_type", family.model_types[0])
    dtype = fields.get("dtype") or fields.get("torch_dtype")
    ends = () if isinstance(config, VisionConfig) else FolderTokenizer(path, family_name).end_of_text
    try:
        texts = describe_texts(path, fields, read_json(path / GENERATION), config, ends or _listed_end(path))
    except CheckpointError as error:
        return Preview(None, (str(error),))
    description = Description(
        family=family_name,
        config=config,
        dtype=dtype if dtype in DTYPES else "float32",
        **texts,
    )
    return _preview(path, description, {})


def _preview(path: Path, description: Description, files: Mapping[str, bytes | Path]) -> Preview:
    """Return the preview of a supported model; files: those of its tokenizer that are not in the directory."""
    content = files.get(TOKENIZER, path / TOKENIZER)
    if isinstance(content, Path):
        content = content.read_bytes() if content.is_file() else None
    if content is not None:
        return Preview(description, ends=token_texts(description.eos_ids, content))
    listed = _listed_tokens(read_json(path / TOKENIZER_CONFIG))
    return Preview(description, ends={id_: listed.get(id_, "") for id_ in description.eos_ids})


def _listed_end(path: Path) -> tuple[int, ...]:
    """The end of a text by `tokenizer_config.json` alone: `tokenizer.json` may not be fetched yet."""
    fields = read_json(path / TOKENIZER_CONFIG)
    token = fields.get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    return tuple(id_ for id_, text in _listed_tokens(fields).items() if text == token)[:1]


def _listed_tokens(fields: Mapping[str, Any]) -> dict[int, str]:
    """The texts of the tokens that `tokenizer_config.json` lists, by id."""
    listed = fields.get("added_tokens_decoder")
    entries = listed.items() if isinstance(listed, dict) else ()
    texts = {id_: entry.get("content") if isinstance(entry, dict) else None for id_, entry in entries}
    return {int(id_): text for id_, text in texts.items() if id_.isdecimal() and isinstance(text, str)}


def _refused(path: Path, fields: dict[str, Any]) -> tuple[str, ...]:
    """An error for each thing that the files beside the weights say and that is not supported."""
    with surveyed() as survey:
        try:
            family, config = describe_fields(path, fields)
        except ValueError as error:
            return (*survey.refused, str(error))
    refused = survey.refused
    if not isinstance(config, VisionConfig):
        try:
            tokenizer_files(path, fields.get("model_type", family.model_types[0]), config.vocab)
        except CheckpointError as error:
            refused.append(str(error))
    return tuple(refused)
