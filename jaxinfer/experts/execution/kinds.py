"""The kinds of experts: what each takes as an input, how it runs, and what it answers."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.experts.errors import ConfigError, InvalidInputError
from jaxinfer.generation.text import Tokenizer
from jaxinfer.models.config import EncoderConfig, ModelConfig, ResNetConfig, VisionConfig, ViTConfig, YoloConfig
from jaxinfer.models.files.loading import OpenedModel

NOTHING = "none"
"""The verdict of a detector that has found nothing."""
DONE = "done"
"""The verdict of an encoder: its vector is there."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judgement:
    """What an expert says of an input.

    Attributes:
      verdict: what the rules go by.
    """

    verdict: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classification(Judgement):
    """A classifier's answer; the verdict is the label of the most probable class.

    Attributes:
      probabilities: of all classes, float32 [classes].
    """

    probabilities: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Detection(Judgement):
    """A detector's answer, best first; the verdict is the label of the best box, or "none".

    Attributes:
      boxes: left, top, right, bottom in pixels of the input, float32 [N, 4].
      scores: float32 [N].
      labels: of the boxes.
    """

    boxes: np.ndarray
    scores: np.ndarray
    labels: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingVector(Judgement):
    """An encoder's answer; the verdict is "done".

    Attributes:
      vector: of length 1, float32 [D].
    """

    vector: np.ndarray


class ExpertKind(Protocol):
    """How experts of a kind work."""

    @property
    def config(self) -> ModelConfig:
        """The model's, without what experts of one architecture differ in."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Of an input, as it goes into a batch."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """Of its numbers."""
        ...

    @property
    def takes(self) -> str:
        """What its inputs are, for people; only experts that take the same can follow one another."""
        ...

    @property
    def verdicts(self) -> tuple[str, ...]:
        """All that its answers can say."""
        ...

    def check(self, payload: Any) -> np.ndarray:
        """The input as it goes into a batch. Raises InvalidInputError."""
        ...

    @staticmethod
    def run(model: Any, inputs: jax.Array) -> Any:
        """What the program computes of a padded batch."""
        ...

    def judge(self, outputs: Any, count: int) -> Sequence[Judgement]:
        """The answers to the first `count` inputs of a batch."""
        ...


class _ImageExpert[Config: ResNetConfig | ViTConfig | YoloConfig]:
    """What takes an image.

    Args:
      config: the model's.
      size: height and width of the images; None: as the model takes them without resizing.
    """

    def __init__(self, config: Config, size: tuple[int, int] | None = None):
        self.labels, self.config = config.labels, _without_labels(config)
        self.shape = (*(size or (config.image_size, config.image_size)), 3)
        self.dtype = np.dtype(np.uint8)
        self.takes = f"images of {list(self.shape)}"

    def check(self, payload: Any) -> np.ndarray:
        image = _array(payload)
        if image.dtype != self.dtype or image.shape != self.shape:
            raise InvalidInputError(
                f"an image must be uint8 {list(self.shape)} (height, width, RGB), "
                f"got {image.dtype.name} {list(image.shape)}."
            )
        return image

    @staticmethod
    def run(model: Any, inputs: jax.Array) -> Any:
        return model(inputs)


class Classifier[Config: ResNetConfig | ViTConfig](_ImageExpert[Config]):
    """Images to classes."""

    @property
    def verdicts(self) -> tuple[str, ...]:
        return self.labels

    def judge(self, outputs: Any, count: int) -> Sequence[Judgement]:
        probabilities = np.asarray(outputs)[:count]
        return [
            Classification(verdict=self.labels[best], probabilities=row)
            for row, best in zip(probabilities, probabilities.argmax(-1), strict=True)
        ]


class Detector(_ImageExpert[YoloConfig]):
    """Images to boxes."""

    @property
    def verdicts(self) -> tuple[str, ...]:
        return *self.labels, NOTHING

    def judge(self, outputs: Any, count: int) -> Sequence[Judgement]:
        found = jax.tree.map(np.asarray, outputs)
        judged = []
        for row in range(count):
            boxes = int(found.count[row])
            labels = tuple(self.labels[index] for index in found.classes[row, :boxes])
            judged.append(
                Detection(
                    verdict=labels[0] if labels else NOTHING,
                    boxes=found.boxes[row, :boxes],
                    scores=found.scores[row, :boxes],
                    labels=labels,
                )
            )
        return judged


class TextEncoder:
    """Texts, or their token ids, to vectors.

    Args:
      config: the model's.
      tokens: most tokens of a text; None: the model's context.
      tokenizer: for texts; None: token ids are needed.
    """

    verdicts = (DONE,)

    def __init__(self, config: EncoderConfig, tokens: int | None = None, tokenizer: Tokenizer | None = None):
        self.config, self._tokenizer = config, tokenizer
        self.shape = (min(tokens or config.context, config.context),)
        self.dtype = np.dtype(np.int32)
        vocabulary = hashlib.sha256(tokenizer.to_json().encode()).hexdigest()[:8] if tokenizer else config.vocab
        self.takes = f"{self.shape[0]} token ids (vocabulary {vocabulary})"

    def check(self, payload: Any) -> np.ndarray:
        if isinstance(payload, str):
            if self._tokenizer is None:
                raise InvalidInputError("the expert has no tokenizer: give token ids instead of a text.")
            try:
                payload = self._tokenizer.encode(payload)
            except ValueError as error:
                raise InvalidInputError(str(error)) from error
        ids = _array(payload)
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer) or not 0 < len(ids) <= self.shape[0]:
            raise InvalidInputError(
                f"token ids must be 1 to {self.shape[0]} integers, got {ids.dtype.name} {list(ids.shape)}."
            )
        if ids.min() < 0 or ids.max() >= self.config.vocab:
            raise InvalidInputError(f"token ids must be in [0, {self.config.vocab}), got {ids.min()} to {ids.max()}.")
        return np.pad(ids.astype(np.int32), (0, self.shape[0] - len(ids)), constant_values=-1)

    @staticmethod
    def run(model: Any, inputs: jax.Array) -> Any:
        positions = jnp.where(inputs < 0, -1, jnp.arange(inputs.shape[1]))
        return model.vectors(jnp.maximum(inputs, 0), positions)

    def judge(self, outputs: Any, count: int) -> Sequence[Judgement]:
        return [EmbeddingVector(verdict=DONE, vector=row) for row in np.asarray(outputs)[:count]]


def kind_of(opened: OpenedModel, *, size: tuple[int, int] | None = None, tokens: int | None = None) -> ExpertKind:
    """How a model works as an expert. Raises ConfigError for one that cannot be, and for options of another kind."""
    config = opened.config
    if size is not None and not isinstance(config, VisionConfig):
        raise ConfigError(f"{opened.folder}: image_size is for classifiers and detectors; this is another model.")
    if tokens is not None and not isinstance(config, EncoderConfig):
        raise ConfigError(f"{opened.folder}: tokens is for encoders; this is another model.")
    match config:
        case ResNetConfig() | ViTConfig():
            return Classifier(config, size)
        case YoloConfig():
            return Detector(config, size)
        case EncoderConfig():
            return TextEncoder(config, tokens, Tokenizer.of(opened.folder))
        case _:
            raise ConfigError(
                f"{opened.folder}: a language model cannot be an expert yet; classifiers, detectors and encoders can."
            )


def _array(payload: Any) -> np.ndarray:
    """A copy, so that the caller may change its own before the input is judged. Raises InvalidInputError."""
    try:
        return np.array(payload)
    except (TypeError, ValueError, OverflowError) as error:  # lists of different lengths
        raise InvalidInputError(f"the value must be an array: {error}.") from error


def _without_labels[Config: ResNetConfig | ViTConfig | YoloConfig](config: Config) -> Config:
    """The config with numbers for labels, so that experts that judge different things share their programs."""
    return dataclasses.replace(config, labels=tuple(map(str, range(len(config.labels)))))
