"""The kinds of experts: their inputs, how they run, and what their outputs mean."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.experts.errors import ConfigError, InvalidInputError
from jaxinfer.experts.results import Classification, Detection, EmbeddingVector, Judgement
from jaxinfer.models.config import EncoderConfig, ModelConfig, ResNetConfig, VisionConfig, ViTConfig, YoloConfig
from jaxinfer.models.files.description import SentenceConfig
from jaxinfer.models.files.loading import OpenedModel
from jaxinfer.models.vision.image_files import fitted, letterboxed, unfitted, unletterboxed
from jaxinfer.text import Tokenizer, encode_to_embed

NOTHING = "none"
"""The verdict of a detector that has found nothing."""
DONE = "done"
"""The verdict of an encoder, whose answer is its vector."""


class ExpertKind(Protocol):
    """The interface of a kind of experts."""

    @property
    def config(self) -> ModelConfig:
        """The model's config, without what differs between experts of an architecture."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an input in a batch."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """The dtype of an input."""
        ...

    @property
    def takes(self) -> str:
        """A description of its inputs for people; experts can follow one another only if it is equal."""
        ...

    @property
    def verdicts(self) -> tuple[str, ...]:
        """All possible verdicts."""
        ...

    def check(self, payload: Any) -> np.ndarray:
        """Prepare an input for a batch. Raises InvalidInputError."""
        ...

    def fit(self, image: np.ndarray) -> np.ndarray:
        """Resize and crop an image, uint8 [H, W, 3], to an input. Raises InvalidInputError."""
        ...

    def unfit(self, boxes: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
        """Move boxes, float [N, 4], from what `fit` returned to the image [height, width] that it was made from."""
        ...

    @staticmethod
    def run(model: Any, inputs: jax.Array) -> Any:
        """Compute a padded batch: the body of the program."""
        ...

    def judge(self, outputs: Any, count: int) -> Sequence[Judgement]:
        """The answers to the first `count` inputs of a batch."""
        ...


class _ImageExpert[Config: ResNetConfig | ViTConfig | YoloConfig]:
    """An expert whose input is an image.

    Args:
      config: the model's config.
      size: height and width of the images, which the program resizes; None: the model's.
    """

    def __init__(self, config: Config, size: tuple[int, int] | None = None):
        self.labels, self.config = config.labels, _without_labels(config)
        self._resizes = size is not None
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

    def fit(self, image: np.ndarray) -> np.ndarray:
        return self.check(image if self._resizes else self._fit(image))

    def _fit(self, image: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def unfit(self, boxes: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
        return boxes if self._resizes else self._unfit(boxes, shape)

    def _unfit(self, boxes: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
        raise NotImplementedError

    @staticmethod
    def run(model: Any, inputs: jax.Array) -> Any:
        return model(inputs)


class Classifier[Config: ResNetConfig | ViTConfig](_ImageExpert[Config]):
    """An expert that maps images to classes."""

    def _fit(self, image: np.ndarray) -> np.ndarray:
        return fitted(image, self.config.image_size, self.config.preprocessing)

    def _unfit(self, boxes: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
        return unfitted(boxes, shape, self.config.image_size, self.config.preprocessing)

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
    """An expert that maps images to boxes."""

    def _fit(self, image: np.ndarray) -> np.ndarray:
        return letterboxed(image, self.config.image_size)

    def _unfit(self, boxes: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
        return unletterboxed(boxes, shape, self.config.image_size)

    @property
    def verdicts(self) -> tuple[str, ...]:
        return *self.labels, NOTHING

    def judge(self, outputs: Any, count: int) -> Sequence[Judgement]:
        detections = jax.tree.map(np.asarray, outputs)
        judged = []
        for row in range(count):
            boxes = int(detections.count[row])
            labels = tuple(self.labels[index] for index in detections.classes[row, :boxes])
            judged.append(
                Detection(
                    verdict=labels[0] if labels else NOTHING,
                    boxes=detections.boxes[row, :boxes],
                    scores=detections.scores[row, :boxes],
                    labels=labels,
                )
            )
        return judged


class TextEncoder:
    """An expert that maps texts, or their token ids, to vectors.

    Args:
      config: the model's config.
      tokens: maximum tokens of a text; None: the model's context.
      tokenizer: encodes texts; None: inputs must be token ids.
      sentence: how it encodes them.
    """

    verdicts = (DONE,)

    def __init__(
        self,
        config: EncoderConfig,
        tokens: int | None = None,
        tokenizer: Tokenizer | None = None,
        sentence: SentenceConfig | None = None,
    ):
        self.config, self._tokenizer, self._sentence = config, tokenizer, sentence or SentenceConfig()
        self.shape = (min(tokens or config.context, config.context),)
        self.dtype = np.dtype(np.int32)
        vocabulary = hashlib.sha256(tokenizer.to_json().encode()).hexdigest()[:8] if tokenizer else config.vocab
        self.takes = f"{self.shape[0]} token ids (vocabulary {vocabulary})"

    def check(self, payload: Any) -> np.ndarray:
        if isinstance(payload, str):
            if self._tokenizer is None:
                raise InvalidInputError("the expert has no tokenizer: give token ids instead of a text.")
            try:
                payload = encode_to_embed(
                    self._tokenizer,
                    payload,
                    self._sentence,
                    vocab=self.config.vocab,
                    context=self.config.context,
                )
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

    def fit(self, image: np.ndarray) -> np.ndarray:
        raise InvalidInputError("the expert takes texts, not images.")

    def unfit(self, boxes: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
        raise InvalidInputError("the expert takes texts, not images.")

    @staticmethod
    def run(model: Any, inputs: jax.Array) -> Any:
        positions = jnp.where(inputs < 0, -1, jnp.arange(inputs.shape[1]))
        return model.vectors(jnp.maximum(inputs, 0), positions)

    def judge(self, outputs: Any, count: int) -> Sequence[Judgement]:
        return [EmbeddingVector(verdict=DONE, vector=row) for row in np.asarray(outputs)[:count]]


def kind_of(opened: OpenedModel, *, size: tuple[int, int] | None = None, tokens: int | None = None) -> ExpertKind:
    """Return how a model works as an expert.

    Raises ConfigError for a model that cannot be one, and for options of another kind.
    """
    config = opened.config
    if size is not None and not isinstance(config, VisionConfig):
        raise ConfigError(f"{opened.folder}: image_size is for classifiers and detectors; this is another model.")
    if tokens is not None and not isinstance(config, EncoderConfig):
        raise ConfigError(f"{opened.folder}: tokens is for encoders; this is another model.")
    match config:
        case ViTConfig(labels=()):
            raise ConfigError(
                f"{opened.folder}: has no head of classes, so it gives no verdicts; jaxinfer.Embedder takes it."
            )
        case ResNetConfig() | ViTConfig():
            return Classifier(config, size)
        case YoloConfig():
            return Detector(config, size)
        case EncoderConfig():
            sentence = opened.description.sentence
            return TextEncoder(config, tokens, Tokenizer.from_folder(opened.folder), sentence)
        case _:
            raise ConfigError(
                f"{opened.folder}: a language model cannot be an expert yet; classifiers, detectors and encoders can."
            )


def _array(payload: Any) -> np.ndarray:
    """Copy the input, so that the caller may change its array before it is judged. Raises InvalidInputError."""
    try:
        return np.array(payload)
    except (TypeError, ValueError, OverflowError) as error:  # lists of different lengths
        raise InvalidInputError(f"the value must be an array: {error}.") from error


def _without_labels[Config: ResNetConfig | ViTConfig | YoloConfig](config: Config) -> Config:
    """Replace the labels with numbers, so that experts that judge different things share their programs."""
    return dataclasses.replace(config, labels=tuple(map(str, range(len(config.labels)))))
