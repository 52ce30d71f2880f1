"""From a Hugging Face directory, a GGUF file or a state dict to a model directory, tensor by tensor."""

import dataclasses
import functools
import itertools
import logging
import os
import pathlib
import re
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from rich.filesize import decimal

from jaxinfer.checkpoints import CheckpointError, Layout, Leaf, Writer, is_complete, read_file
from jaxinfer.checkpoints.huggingface import SINGLE, SafetensorsFolder, TensorInfo, read_json, read_json_list
from jaxinfer.checkpoints.manifest import part_of
from jaxinfer.checkpoints.paths import find_gguf, inside
from jaxinfer.models.config import (
    DecoderConfig,
    EncoderConfig,
    ModelConfig,
    ResNetConfig,
    VisionConfig,
    ViTConfig,
    YoloConfig,
)
from jaxinfer.models.devices import host_device
from jaxinfer.models.families import (
    Family,
    Source,
    describe_unknown,
    family_of,
    family_of_timm,
    is_timm,
    plan,
    recognise,
    yolov5,
)
from jaxinfer.models.families.fields import refuse
from jaxinfer.models.families.image_processors import PREPROCESSOR, with_preprocessor
from jaxinfer.models.families.sentence_transformers import (
    MODULE_CONFIG,
    MODULES,
    SENTENCE_FILES,
    SentenceModules,
    sentence_modules,
)
from jaxinfer.models.files.description import CONFIG, Description, SentenceConfig, parse_dtype, parse_quantization
from jaxinfer.models.files.generation_config import GENERATION, SamplingDefaults, read_sampling
from jaxinfer.models.files.tokenizer_files import (
    CHAT_TEMPLATES,
    OLDER,
    READ,
    TOKENIZER,
    FolderTokenizer,
    tokenizer_files,
)
from jaxinfer.models.leaves import canonical_leaves, quantized_format, scale_name
from jaxinfer.pallas_kernels.weights import QuantizedFormat
from jaxinfer.pallas_kernels.weights import quantize as quantize_matrix
from jaxinfer.progress import ProgressOption, long_work, showing

log = logging.getLogger(__name__)

LABELS = "labels.txt"
ADAPTER = "adapter_config.json"
SOURCE = "source.json"
"""In a model directory that was converted from a repository of the hub: which, and which commit of it."""
_HEADS = ("lm_head.weight", "embed_out.weight")
BLOCK_BYTES = 64 << 20  # of float32, quantised at once


class HuggingFaceModel:
    """A Hugging Face directory, a GGUF file, or the state dict of a family without `config.json`, checked in full
    before any tensor is read.

    Next to a state dict may be the labels of its classes (`_with_labels`), and `preprocessor_config.json`, which says
    how images are resized.

    Attributes:
      path: the directory, the GGUF file, or the safetensors file of a state dict.
      model_type: its family.
      config: the model.
      dtype: of most of its matrices, to be stored in.
      sentence: how it embeds texts, as sentence-transformers' files say.
      generates: False for a decoder that was published without its head, to embed.
      left_out: the tensors of parts that are not implemented, such as what sees images.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path)
        if not self.path.exists():
            raise CheckpointError(
                f"{path}: no such directory; name one with config.json and safetensors files, or a repository of the "
                "hub as ORG/NAME."
            )
        if self.path.is_dir() and is_complete(self.path):
            raise CheckpointError(
                f"{path}: a model directory already, which every command takes as it is; to store it in another "
                "format, convert what it was made from."
            )
        if gguf := find_gguf(self.path):
            from jaxinfer.models.files.gguf_model import GgufModel

            self.path, self._tensors = gguf, GgufModel(gguf)
            fields, generation = self._tensors.fields, self._tensors.generation
        else:
            self._tensors = SafetensorsFolder(self.path)
            fields, generation = read_json(self.path / CONFIG), read_json(self.path / GENERATION)
        try:
            family, config = self._describe(fields)
            names = {family.plain_name(name) for name in self._tensors.shapes}
            self.generates = not (isinstance(config, DecoderConfig) and _is_headless(fields, config, names))
            if not self.generates:
                config = dataclasses.replace(config, tied=True, head_bias=False)  # so that no head is looked for
            self.sentence = sentence_files(self.path, config)
            if isinstance(self._tensors, SafetensorsFolder):
                for i, (module, _) in enumerate(self.sentence.dense):
                    self._tensors.add(f"dense.{i}.", module)
            self._plan = plan(family, config, self._tensors.shapes, described_by="metadata" if gguf else CONFIG)
            self.config: ModelConfig = _with_labels(self.path, self._with_anchors(config, family))
        except ValueError as error:
            raise CheckpointError(f"{self.path}: {error}") from error
        self.model_type: str = fields.get("model_type", family.model_types[0])
        self._fields, self._generation = fields, generation
        self.left_out = tuple(
            name for name in self._tensors.shapes if re.fullmatch(family.left_out, family.plain_name(name))
        )
        self.dtype = _main_dtype(self._tensors.tensors, self._plan)
        self._heads = tuple(name for name in self._tensors.shapes if family.plain_name(name) in _HEADS)

    def _describe(self, fields: dict[str, Any]) -> tuple[Family, ModelConfig]:
        """Return the family and the model, by the fields of `config.json`, and by the tensors where it says little."""
        if is_timm(fields):
            return family_of_timm(fields, self._tensors.shapes)
        if fields:
            return describe_fields(self.path, fields)
        if recognised := recognise(self._tensors.shapes):
            family, config = recognised
            return family, _with_preprocessor(_folder(self.path), config, family)
        raise ValueError(describe_unknown(self._tensors.shapes))

    def _with_anchors(self, config: ModelConfig, family: Family) -> ModelConfig:
        """Return the config with a detector's own anchors, which training may have fitted to its images."""
        name = next((n for n in self._tensors.shapes if family.plain_name(n) == yolov5.ANCHORS), None)
        if not isinstance(config, YoloConfig) or name is None:
            return config
        return yolov5.with_anchors(config, self._tensors.read(name))

    def check_tied_head(self) -> None:
        """Raise CheckpointError for a model whose head is the embedding table, but whose checkpoint has another.

        Most tied checkpoints have no head; some have the table a second time.
        """
        if not isinstance(self.config, DecoderConfig) or not self.config.tied:
            return
        (table,) = self._plan["embed.table"].names
        for name in self._heads:
            if not np.array_equal(self._tensors.read(name), self._tensors.read(table)):
                raise CheckpointError(
                    f"{self.path}: {name} is not {table}, although tie_word_embeddings is true; set it to false in "
                    f"{CONFIG} if the head is the model's, or remove the tensor."
                )

    @property
    def leaf_names(self) -> tuple[str, ...]:
        """The leaves that its tensors make; of those with a part for each expert (`Leaf.parts`) the parts."""
        return tuple(self._plan)

    def read(self, name: str) -> np.ndarray:
        """Read one leaf in our layout, or one expert's part of it, in the checkpoint's dtype."""
        source = self._plan[name]
        index = () if source.index is None else (source.index,)
        return source.combine(*_of_one_dtype([self._tensors.read(tensor, *index) for tensor in source.names]))

    def tokenizer_files(self) -> Mapping[str, bytes | pathlib.Path]:
        """The files of the tokenizer by name: their contents, or where they are; none for models of images."""
        if isinstance(self.config, VisionConfig):
            return {}
        if isinstance(self._tensors, SafetensorsFolder):
            return self._tokenizer.files(self.config.vocab)
        return self._tensors.files

    @functools.cached_property
    def _tokenizer(self) -> FolderTokenizer:
        return FolderTokenizer(self.path, self.model_type, lowercase=self.sentence.lowercase)

    @property
    def texts(self) -> SentenceConfig:
        """How texts to embed become tokens: as sentence-transformers' files say, else as the tokenizer's."""
        if isinstance(self.config, VisionConfig) or not isinstance(self._tensors, SafetensorsFolder):
            return SentenceConfig()
        length = self.sentence.max_seq_length or self._tokenizer.max_length
        return SentenceConfig(
            max_seq_length=length if length is not None and 0 < length < self.config.context else None,
            truncation_side=self._tokenizer.truncation_side,
            prompts=dict(self.sentence.prompts),
            default_prompt=self.sentence.default_prompt,
        )

    def describe(self, *, dtype: str | None = None, quantize: str | None = None) -> Description:
        """Return the description of the model directory, in which matrices are stored as `convert` is asked to.

        Warns of tokens and fields that are left out.
        """
        reads_texts = isinstance(self.config, DecoderConfig) and isinstance(self._tensors, SafetensorsFolder)
        ends = self._tokenizer.end_of_text if reads_texts else ()
        return Description(
            family=self.model_type,
            config=self.config,
            dtype=parse_dtype(dtype) or self.dtype,
            quantization=parse_quantization(quantize),
            sentence=self.texts,
            generates=self.generates,
            **describe_texts(self.path, self._fields, self._generation, self.config, ends),
        )


def _is_headless(fields: Mapping[str, Any], config: DecoderConfig, names: set[str]) -> bool:
    """Return whether a decoder has no head and `config.json` agrees, as of `MistralModel`; names: of tensors."""
    named = fields.get("architectures")
    bare = isinstance(named, list) and any(str(name).endswith("Model") for name in named)
    return bare and not config.tied and names.isdisjoint(_HEADS)


def _of_one_dtype(parts: list[np.ndarray]) -> list[np.ndarray]:
    """Cast the parts of a leaf to float32 if their dtypes differ: it has the values of bfloat16 and of float16."""
    return parts if len({part.dtype for part in parts}) == 1 else [part.astype(np.float32) for part in parts]


def describe_texts(
    path: pathlib.Path,
    fields: Mapping[str, Any],
    generation: Mapping[str, Any],
    config: ModelConfig,
    ends: tuple[int, ...],
) -> dict[str, Any]:
    """Return what a `Description` says of texts: how they begin and end, and which sampling defaults they have.

    Warns of tokens and fields that are left out.

    Args:
      path: the directory, or the GGUF file.
      fields: of `config.json`.
      generation: of `generation_config.json`.
      config: the model; one of images has no texts.
      ends: the ends of a text to the tokenizer of a decoder.
    """
    if isinstance(config, VisionConfig):
        return {}
    sources = generation, fields, fields.get("text_config", {})
    decodes, file = isinstance(config, DecoderConfig), path / GENERATION if path.is_dir() else path
    return {
        "bos_id": next(iter(_token_ids(path, "bos_token_id", sources, config.vocab)), None),
        "eos_ids": _token_ids(path, "eos_token_id", sources, config.vocab, ends if decodes else None),
        "sampling": read_sampling(file, generation) if decodes else SamplingDefaults(),
    }


def _token_ids(
    path: pathlib.Path,
    role: str,
    sources: Iterable[Mapping[str, Any]],
    vocab: int,
    further: tuple[int, ...] | None = None,
) -> tuple[int, ...]:
    """The ids of `bos_token_id` or `eos_token_id`: none, one or several.

    They are those of the first file that names some: `generation_config.json`, `config.json`, its `text_config`; with
    `further` ones those of all files and these.

    Ids outside the vocabulary, which small checkpoints often keep from a larger one, are left out with a warning:
    the model can neither read nor write them.
    """
    named = [ids for fields in sources if (ids := _ids(path, role, fields.get(role)))]
    named = named[:1] if further is None else [*named, further]
    ids = tuple(dict.fromkeys(itertools.chain.from_iterable(named)))
    for outside in (i for i in ids if not 0 <= i < vocab):
        log.warning("%s: %s=%d is left out: the vocabulary has %d tokens.", path, role, outside, vocab)
    return tuple(i for i in ids if 0 <= i < vocab)


def _ids(path: pathlib.Path, role: str, value: Any) -> tuple[int, ...]:
    """The token ids that a config has for a role. Raises CheckpointError."""
    ids = tuple(value) if isinstance(value, list) else () if value is None else (value,)
    if any(type(i) is not int for i in ids):
        raise CheckpointError(f"{path}: {role}={value!r} must be a token id or a list of them; correct it.")
    return ids


def beside_weights(names: Collection[str]) -> list[str]:
    """Return those files of a Hugging Face directory that are read beside its weights."""
    read = {CONFIG, ADAPTER, GENERATION, PREPROCESSOR, LABELS, *SENTENCE_FILES, *READ}
    if TOKENIZER not in names:
        read |= set(OLDER)
    inside = rf"{CHAT_TEMPLATES}/.*\.jinja|{MODULE_CONFIG}"
    return [name for name in names if name in read or re.fullmatch(inside, name)]


def dense_weights(path: pathlib.Path) -> list[str]:
    """Return the files with the weights behind a sentence encoder's pooling, by the other files of its directory."""
    fields = read_json(path / CONFIG)
    if not fields or is_timm(fields):
        return []
    _, config = describe_fields(path, fields)
    return [f"{folder}/{SINGLE}" for folder, _ in sentence_files(path, config).dense]


def check_description(path: pathlib.Path) -> None:
    """Raise CheckpointError for a Hugging Face directory whose model or tokenizer is not implemented.

    Its weights need not be there yet; what they alone say is checked with them.
    """
    fields = read_json(path / CONFIG)
    if not fields or is_timm(fields):
        return
    try:
        family, config = describe_fields(path, fields)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(config, VisionConfig):
        tokenizer_files(path, fields.get("model_type", family.model_types[0]), config.vocab)


def sentence_files(path: pathlib.Path, config: ModelConfig) -> SentenceModules:
    """Read the files of sentence-transformers beside a model. Raises ValueError for what is not implemented."""
    if isinstance(config, VisionConfig) or not path.is_dir():
        return SentenceModules()
    read = sentence_modules(read_json_list(path / MODULES), lambda name: read_json(inside(path, name)), config.embed)
    if read.dense and not isinstance(config, EncoderConfig):
        raise ValueError(f"{MODULES}: Dense is not implemented behind a decoder; choose another checkpoint.")
    return read


def convert(
    hf_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    quantize: str | None = None,
    layout: Layout = "orbax",
    progress: ProgressOption = None,
    source: Mapping[str, str] | None = None,
) -> Description:
    """Write the model in `hf_dir` as a model directory.

    Everything is checked before the first tensor is converted, and nothing appears at `out_dir` until all is written. A
    model of any size needs host memory for only a few leaves at a time.

    Args:
      hf_dir: a Hugging Face directory, or one of timm's; a GGUF file; or a safetensors file with the state dict of
        timm's ViT, of torchvision's ResNet or of YOLOv5, or a directory with one. Its classes have the labels of
        NAME.labels.txt beside NAME.safetensors, or of labels.txt; `preprocessor_config.json` says how it resizes.
      out_dir: the model directory, empty or not existing.
      dtype: of the matrices: "float32", "bfloat16" or "float16"; None: as they are, and bfloat16 for the quantised ones
        of a GGUF file.
      quantize: "int8" or "fp8" with one scale per output channel; "int4" with one scale per 128 inputs of each
        channel. In int4, embeddings and matrices whose inputs are not a multiple of 128 are stored in int8.
      layout: "orbax", or "single-file" for a small model.
      progress: whether a line on stderr shows the bytes written so far and the total, or who is called with them; as in
        `LLM`.
      source: where `hf_dir` comes from, for the file `source.json`.
    """
    writer = open_writer(out_dir, dtype=dtype, quantize=quantize, layout=layout)
    model = HuggingFaceModel(hf_dir)
    if model.left_out:
        log.warning("%s: %d tensors are left out, as only the part that reads text runs.", hf_dir, len(model.left_out))
    description = model.describe(dtype=dtype, quantize=quantize)
    files = model.tokenizer_files()
    leaves = canonical_leaves(model.config, description.stored)
    total = sum(leaf.bytes for leaf in leaves.values())
    writer.check_size(total)
    _check_disk(writer.path, total)
    model.check_tied_head()
    with writer, showing(progress), long_work("converting", total=total, in_bytes=True) as work:
        for name, content in files.items():
            writer.add_file(name, content)
        writer.add_file(CONFIG, description.to_json())
        if source:
            writer.add_file(SOURCE, msgspec.json.format(msgspec.json.encode(source), indent=2) + b"\n")
        for name, index, array in _stored_leaves(model, leaves):
            if index is None:
                writer.add(name, array, leaves[name].axes)
            else:
                writer.add_part(name, index, array, leaves[name])
            work.advance(array.nbytes)
    return description


def open_writer(
    out_dir: str | os.PathLike[str], *, dtype: str | None = None, quantize: str | None = None, layout: Layout = "orbax"
) -> Writer:
    """Open the writer of a conversion. Raises ValueError for bad options or an occupied directory."""
    parse_dtype(dtype)
    parse_quantization(quantize)
    return Writer(out_dir, layout=layout)


def source_of(path: str | os.PathLike[str]) -> str:
    """Return where a model directory was fetched from, as ORG/NAME@COMMIT; empty if it was not."""
    content = read_file(path, SOURCE)
    return "" if content is None else source_text(msgspec.json.decode(content, type=dict[str, str]))


def source_text(source: Mapping[str, str]) -> str:
    """Write the source that a model directory names as ORG/NAME@COMMIT, or for a GGUF file as ORG/NAME@COMMIT:TAG."""
    return f"{source['repository']}@{source['commit']}" + (f":{tag}" if (tag := source.get("tag")) else "")


def _stored_leaves(
    source: HuggingFaceModel, leaves: Mapping[str, Leaf]
) -> Iterator[tuple[str, int | None, np.ndarray]]:
    """Yield each leaf of the model directory, or an expert's part of it; the scales of a quantised matrix follow it."""
    for read in source.leaf_names:
        name, index = part_of(read)
        if (quantized := quantized_format(leaves[name].dtype)) is None:
            yield name, index, _cast(source, read, leaves[name].dtype)
        else:
            matrix, scale = _quantize(source.read(read), quantized)
            yield name, index, matrix
            yield scale_name(name), index, scale


def _cast(source: HuggingFaceModel, name: str, dtype: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        array = np.ascontiguousarray(source.read(name).astype(jnp.dtype(dtype), copy=False))
    if dtype == "float16" and not np.isfinite(array).all():
        raise CheckpointError(
            f"{source.path}: {name} contains values beyond float16; convert with --dtype bfloat16 or float32."
        )
    return array


def _quantize(matrix: np.ndarray, quantized: QuantizedFormat) -> tuple[np.ndarray, np.ndarray]:
    """Quantise a matrix on the CPU, one block of rows at a time; returns it with its scales."""
    rows = max(1, BLOCK_BYTES // (matrix.shape[1] * 4))
    with jax.default_device(host_device()):
        blocks = [quantize_matrix(matrix[first : first + rows], quantized) for first in range(0, len(matrix), rows)]
        matrices, scales = ([np.asarray(part) for part in parts] for parts in zip(*blocks, strict=True))
    return np.concatenate(matrices), np.concatenate(scales, axis=-1)  # outputs come last in all scales


def describe_fields(path: pathlib.Path, fields: dict[str, Any]) -> tuple[Family, ModelConfig]:
    """Return the family and the model of a directory, by the fields of its `config.json` and the files beside it."""
    if (path / ADAPTER).is_file():
        raise ValueError(
            f"{ADAPTER} is beside the model, and transformers would load that adapter: merge it, or move it "
            "elsewhere and pass it in `adapters`."
        )
    family = family_of(fields)
    config = family.config(fields)
    if not isinstance(config, VisionConfig):
        _refuse_other_attention(fields, causal=isinstance(config, DecoderConfig))
    return family, _with_preprocessor(path, _with_pooling(path, config), family)


def _refuse_other_attention(fields: dict[str, Any], *, causal: bool) -> None:
    """Refuse `is_causal`, which in transformers decides for any model of texts whether tokens see later ones."""
    for part in (fields, fields.get("text_config")):
        if isinstance(part, dict) and part.get("is_causal") not in (None, causal):
            value = part["is_causal"]
            refuse(f"{CONFIG}: is_causal={value!r} is not implemented, only {causal}; choose another checkpoint.")


def _with_pooling(path: pathlib.Path, config: ModelConfig) -> ModelConfig:
    """Return the config with the way from token vectors to a text's that sentence-transformers' files say."""
    if isinstance(config, VisionConfig):
        return config
    sentence = sentence_files(path, config)
    pooled = dataclasses.replace(config, pooling=sentence.pooling or config.pooling, normalize=sentence.normalize)
    if not isinstance(pooled, EncoderConfig):
        return pooled
    return dataclasses.replace(pooled, dense=tuple(dense for _, dense in sentence.dense))


def _with_preprocessor(path: pathlib.Path, config: ModelConfig, family: Family) -> ModelConfig:
    """Return the config of a model of images with how they become pixels, if there is a file that says so."""
    fields = read_json(path / PREPROCESSOR)
    if not fields or not isinstance(config, ResNetConfig | ViTConfig):
        return config
    return with_preprocessor(config, fields, family.image_processor)


def _folder(path: pathlib.Path) -> pathlib.Path:
    """Return the folder of the files beside a model's weights, by the path of either."""
    return path if path.is_dir() else path.parent


def _with_labels(path: pathlib.Path, config: ModelConfig) -> ModelConfig:
    """Return the config with the labels of a text file, one a line, if there is one.

    It is `labels.txt` in the folder; one file of several, NAME.safetensors, may have its own in `NAME.labels.txt`.
    """
    of_file = path.with_name(f"{path.stem}.{LABELS}")
    file = of_file if path.is_file() and of_file.is_file() else _folder(path) / LABELS
    if not isinstance(config, VisionConfig) or not file.is_file():
        return config
    labels = tuple(line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip())
    if len(labels) != len(config.labels):
        raise ValueError(f"{file.name} has {len(labels)} labels for {len(config.labels)} classes; give one a line.")
    return dataclasses.replace(config, labels=labels)


def _main_dtype(tensors: Mapping[str, TensorInfo], sources: Mapping[str, Source]) -> str:
    """The dtype of most matrix elements; float64 is stored as float32."""
    elements: Counter[str] = Counter()
    for source in sources.values():
        for name in source.names:
            tensor = tensors[name]
            if len(tensor.shape) > 1:
                elements[tensor.dtype] += int(np.prod(tensor.shape))
    dtype = elements.most_common(1)[0][0]
    return "float32" if dtype == "float64" else dtype


def _check_disk(path: pathlib.Path, needed: int) -> None:
    existing: Any = next(parent for parent in path.parents if parent.exists())
    if (free := shutil.disk_usage(existing).free) < needed:
        raise CheckpointError(
            f"{path}: the model needs {decimal(needed)} on disk and {decimal(free)} are free; "
            "free some, or convert with --quantize int4."
        )
