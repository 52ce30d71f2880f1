"""`config.json` of a model directory: what the model is, and how its weights are stored."""

import dataclasses
import os
import pathlib
from collections.abc import Iterator
from typing import Any, Literal, cast

import jax.numpy as jnp
import msgspec

from jaxinfer.checkpoints import CheckpointError, read_file
from jaxinfer.models.config import (
    KINDS,
    AttentionConfig,
    ConvolutionalConfig,
    DeltaRuleConfig,
    EncoderConfig,
    Kind,
    Mixer,
    ModelConfig,
    TransformerConfig,
    VisionConfig,
    kind_of,
)
from jaxinfer.models.files.generation_config import SamplingDefaults
from jaxinfer.models.files.older_configs import upgraded
from jaxinfer.models.weight_format import WeightFormat
from jaxinfer.pallas_kernels.weights import STORED_AS, QuantizedFormat

CONFIG = "config.json"
TruncationSide = Literal["left", "right"]
"""The end of a text that is cut."""
DTYPES = ("float32", "bfloat16", "float16")
_SHORT_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentenceConfig:
    """How texts to embed become tokens, as sentence-transformers' files say.

    Attributes:
      max_seq_length: the number of tokens that longer texts are cut to; None: the model's context.
      truncation_side: the end that is cut.
      prompts: texts that are put before a text, by name.
      default_prompt: the name of the prompt of texts that come without one.
    """

    max_seq_length: int | None = None
    truncation_side: TruncationSide = "right"
    prompts: dict[str, str] = dataclasses.field(default_factory=dict)
    default_prompt: str | None = None

    def prompt(self, given: str | None) -> str:
        """Return the text to put before a text: for a prompt's name its text, for None that of the default.

        Raises ValueError for another word where the model names its prompts: a name that is not one of them.
        """
        name = self.default_prompt if given is None else given
        if name and name.isidentifier() and self.prompts and name not in self.prompts:
            raise ValueError(
                f"prompt={name!r} is none of the model's prompts ({', '.join(self.prompts)}); name one, or give a "
                "text that is more than a word."
            )
        return "" if name is None else self.prompts.get(name, name)


class _ConfigFile(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`config.json` as it is written."""

    kind: Kind
    family: str
    dtype: Literal["float32", "bfloat16", "float16"]
    quantization: QuantizedFormat | None
    bos_id: int | None
    eos_ids: tuple[int, ...]
    sentence: SentenceConfig | None = None
    generates: bool = True
    sampling: SamplingDefaults = SamplingDefaults()
    config: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """The model that a directory holds, from its `config.json`.

    Attributes:
      family: Hugging Face's `model_type`, or any other name for a model that does not come from there.
      dtype: of the stored matrices; a quantised model computes in it.
      quantization: "int8", "int4" or "fp8" if the matrices are stored quantised.
      bos_id: the token that begins a text.
      eos_ids: the tokens that end one.
      sentence: how texts to embed become tokens; None: an older version of jaxinfer wrote the directory without it.
      generates: False for a decoder without a head, which can only embed.
      sampling: the values that its files name for sampling.
    """

    family: str
    config: ModelConfig
    dtype: str = "float32"
    quantization: QuantizedFormat | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    sentence: SentenceConfig | None = dataclasses.field(default_factory=SentenceConfig)
    generates: bool = True
    sampling: SamplingDefaults = dataclasses.field(default_factory=SamplingDefaults)

    def __post_init__(self) -> None:
        require_choice("dtype", self.dtype, DTYPES)
        _check_quantization(self.config, parse_quantization(self.quantization))

    @property
    def kind(self) -> Kind:
        return kind_of(self.config)

    @property
    def stored(self) -> WeightFormat:
        """The format of the checkpoint's leaves."""
        return WeightFormat(dtype=jnp.dtype(self.dtype), quantized=self.quantization)

    def to_json(self) -> bytes:
        """The content of `config.json`."""
        fields = msgspec.to_builtins(self, builtin_types=(tuple,)) | {"kind": self.kind}
        return msgspec.json.format(msgspec.json.encode(msgspec.convert(fields, _ConfigFile)), indent=2) + b"\n"

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> "Description":
        """Read `config.json`. Raises CheckpointError for anything that this version does not know."""
        file, content = pathlib.Path(folder) / CONFIG, read_file(folder, CONFIG)
        if content is None:
            raise CheckpointError(
                f"{folder}: no {CONFIG}; make a model directory with `jaxinfer convert HF_DIR OUT_DIR`."
            )
        try:
            file_fields = msgspec.json.decode(content, type=_ConfigFile)
            fields = upgraded(file_fields.kind, file_fields.config)
            config = msgspec.convert(fields, KINDS[file_fields.kind], dec_hook=_read_mixer)
            if unknown := sorted(_unknown_fields(fields, msgspec.to_builtins(config), "config")):
                raise ValueError(f"unknown fields {', '.join(unknown)}")
            if isinstance(config, EncoderConfig) and file_fields.sentence is None:
                raise ValueError("no field sentence, which says how texts become vectors")
        except ValueError as error:
            raise CheckpointError(
                f"{file}: {error}; convert the model again, or use the version of jaxinfer that wrote it."
            ) from error
        return cls(
            family=file_fields.family,
            config=config,
            dtype=file_fields.dtype,
            quantization=file_fields.quantization,
            bos_id=file_fields.bos_id,
            eos_ids=file_fields.eos_ids,
            sentence=file_fields.sentence,
            generates=file_fields.generates,
            sampling=file_fields.sampling,
        )


def _read_mixer(expected: type, fields: object) -> Mixer:
    """Read the config of a mixer, whose fields tell which one it is."""
    assert expected is Mixer
    has_state = isinstance(fields, dict) and "key_heads" in fields
    return msgspec.convert(fields, DeltaRuleConfig if has_state else AttentionConfig)


def require_transformer(folder: str | os.PathLike[str], config: ModelConfig) -> TransformerConfig:
    """The config if its model reads text. Raises ValueError, which names the folder, if it does not."""
    if isinstance(config, VisionConfig):
        raise ValueError(
            f"{folder} is an image model ({kind_of(config)}), which does not read text; name a text model."
        )
    return config


def _unknown_fields(given: object, known: object, where: str) -> Iterator[str]:
    if isinstance(given, dict) and isinstance(known, dict):
        for name, value in given.items():
            if name in known:
                yield from _unknown_fields(value, known[name], f"{where}.{name}")
            else:
                yield f"{where}.{name}"
    elif isinstance(given, list) and isinstance(known, list | tuple):
        for index, (value, of_known) in enumerate(zip(given, known, strict=True)):
            yield from _unknown_fields(value, of_known, f"{where}[{index}]")


def require_choice(name: str, value: str | None, choices: tuple[str | None, ...]) -> None:
    """Raise ValueError unless the value is one of the choices."""
    if value not in choices:
        known = ", ".join(choice for choice in choices if choice is not None)
        raise ValueError(f"{name}={value!r} is not implemented; known: {known}.")


def parse_dtype(name: str | None) -> str | None:
    """Parse the dtype of matrices with this name, or its short one, such as bf16; None stays.

    Raises ValueError, which lists the known names.
    """
    dtype = None if name is None else _SHORT_NAMES.get(name, name)
    require_choice("dtype", dtype, (None, *DTYPES))
    return dtype


def parse_quantization(name: str | None) -> QuantizedFormat | None:
    """Parse the format of matrices with this name. Raises ValueError, which lists the known names."""
    require_choice("quantize", name, (None, *STORED_AS))
    return cast(QuantizedFormat | None, name)


def _check_quantization(config: ModelConfig, quantization: QuantizedFormat | None) -> None:
    if quantization is not None and isinstance(config, ConvolutionalConfig):
        raise ValueError(
            f"quantize={quantization!r} is not implemented for an image {kind_of(config)}: convolutions have no "
            "quantised format; leave it out."
        )


def weight_format(description: Description, *, dtype: str | None = None, quantize: str | None = None) -> WeightFormat:
    """The format of a model loaded with these options; None: as stored."""
    dtype = parse_dtype(dtype)
    quantization, stored = parse_quantization(quantize), description.quantization
    _check_quantization(description.config, quantization)
    if stored is not None and quantization not in (None, stored):
        raise ValueError(
            f"quantize={quantization!r} needs a float model, and this one is stored in {stored}: convert the original "
            f"model with quantize={quantization!r}."
        )
    return WeightFormat(dtype=jnp.dtype(dtype or description.dtype), quantized=quantization or stored)
