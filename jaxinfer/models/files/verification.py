"""Compare the tensors of a model directory, or the outputs of its model, with a reference."""

import dataclasses
import os
import pathlib
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file

from jaxinfer import checkpoints
from jaxinfer.checkpoints import CheckpointError
from jaxinfer.checkpoints.manifest import part_name, part_of
from jaxinfer.models.config import DecoderConfig, VisionConfig, ViTConfig, YoloConfig
from jaxinfer.models.files.conversion import HuggingFaceModel
from jaxinfer.models.files.description import Description
from jaxinfer.models.files.loading import LoadedModel, load_model
from jaxinfer.models.leaves import quantized_format, scale_name
from jaxinfer.pallas_kernels.weights import GROUP, Weights, dequantize


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorReport:
    """How the stored weights differ from a Hugging Face directory's.

    Attributes:
      tensors: the number of compared tensors.
      max_abs_diff: the largest difference of one element, after dequantisation.
      beyond: tensors with a larger difference than rounding to the stored dtype explains.
    """

    tensors: int
    max_abs_diff: float
    beyond: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputReport:
    """How the model's outputs differ from those of a reference.

    Attributes:
      max_abs_diff: the largest difference of a logit, of a hidden value for encoders, of a prediction for detectors.
      kl: mean over tokens of KL(reference || model), in nats; None for all but decoders.
      top1: the fraction of tokens with the same most likely next token; None for all but decoders.
    """

    max_abs_diff: float
    kl: float | None = None
    top1: float | None = None


def compare_tensors(path: str | os.PathLike[str], hf_dir: str | os.PathLike[str]) -> TensorReport:
    """Compare every tensor of a model directory with the Hugging Face directory that it was converted from."""
    source, description = HuggingFaceModel(hf_dir), Description.read(path)
    if source.config != description.config:
        raise CheckpointError(
            f"{path}: config.json describes another model than {hf_dir}; name the directory it was converted from."
        )
    scales = checkpoints.load(path, only=lambda name: name.endswith(".scale"))
    worst, beyond, names = 0.0, [], set(source.leaf_names)
    for leaf, stored in checkpoints.stream(path, only={part_of(name)[0] for name in names}.__contains__):
        weights = Weights(stored, scales.get(scale_name(leaf)) if quantized_format(stored.dtype) else None)
        for name, matrix in [(leaf, weights)] if leaf in names else _parts(leaf, weights):
            reference = source.read(name).astype(np.float32)
            actual, allowed = np.asarray(dequantize(matrix, jnp.float32)), _rounding(reference, matrix)
            difference = np.abs(reference - actual)
            worst = max(worst, float(difference.max()))
            if (difference > allowed).any():
                beyond.append(name)
    return TensorReport(tensors=len(source.leaf_names), max_abs_diff=worst, beyond=tuple(sorted(beyond)))


def _parts(leaf: str, stack: Weights) -> Iterator[tuple[str, Weights]]:
    """Yield the matrix of each expert, by its name in the plan of a conversion."""
    for index in range(len(stack.weight)):
        scale = None if stack.scale is None else stack.scale[index]
        yield part_name(leaf, index), Weights(stack.weight[index], scale)


def _rounding(reference: np.ndarray, weights: Weights) -> np.ndarray:
    """The largest difference of each weight from the reference that rounding explains."""
    match quantized_format(weights.weight.dtype):
        case "int8":
            return np.asarray(weights.scale)[:, None] * 0.5001
        case "int4":  # the largest of a group may be clipped from 10 steps to 7
            return np.abs(np.asarray(weights.scale, np.float32)).T.repeat(GROUP, axis=1) * 3.001
    info = jnp.finfo(weights.weight.dtype)
    unit = 1.0 if weights.scale is None else np.asarray(weights.scale)[:, None]
    return np.abs(reference) * float(info.eps) / 2 + float(info.smallest_subnormal) * unit


def compare_outputs(path: str | os.PathLike[str], reference: str | os.PathLike[str]) -> OutputReport:
    """Compare the model, computed in float32, with another implementation's outputs.

    Args:
      path: the model directory.
      reference: a safetensors file with these tensors:
        `tokens` (or `input_ids`): int [B, T].
        `lengths`: int [B]; not needed if all rows are full.
        `token_types`: int [B, T], for an encoder, if it has any.
        `logits` [..., V] of a decoder or `hidden` [..., D] of an encoder, for all tokens or only the real ones.
        For an image model `images`, uint8 [B, H, W, 3], and a classifier's `logits` [B, classes] or a detector's
        `predictions` [B, candidates, 5 + classes], as `Yolo.predictions` has them; of a backbone without classes its
        `features` [B, D].
    """
    tensors = _read_reference(pathlib.Path(reference))
    model = load_model(path, dtype="float32")
    if isinstance(model.config, VisionConfig):
        return _compare_images(model, tensors, str(reference))
    decoder = isinstance(model.config, DecoderConfig)
    tokens = tensors.get("tokens", tensors.get("input_ids"))
    expected = tensors.get("logits" if decoder else "hidden")
    if tokens is None or expected is None:
        outputs = "logits" if decoder else "hidden"
        raise CheckpointError(f"{reference}: contains {sorted(tensors)}; needs tokens (or input_ids) and {outputs}.")
    batch, length = tokens.shape
    lengths = tensors.get("lengths", np.full(batch, length))
    positions = np.where(np.arange(length) < lengths[:, None], np.arange(length), -1).astype(np.int32)

    @jax.jit
    def run(state: nnx.State, tokens: jax.Array, positions: jax.Array, token_types: jax.Array | None) -> jax.Array:
        module = nnx.merge(model.graphdef, state)
        if decoder:
            return module.logits(module(tokens, positions)[0])
        return module(tokens, positions, token_types)

    outputs = run(model.state, tokens.astype(np.int32), positions, tensors.get("token_types"))
    actual = np.asarray(outputs, np.float64)[positions >= 0]
    expected = expected.astype(np.float64)
    if expected.shape[:2] == tokens.shape and expected.ndim == 3:
        expected = expected[positions >= 0]
    _check_shape(reference, expected, actual)
    worst = float(np.abs(actual - expected).max())
    if not decoder:
        return OutputReport(max_abs_diff=worst)
    log_p, log_q = (x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in (expected, actual))
    return OutputReport(
        max_abs_diff=worst,
        kl=float((np.exp(log_p) * (log_p - log_q)).sum(-1).mean()),
        top1=float((expected.argmax(-1) == actual.argmax(-1)).mean()),
    )


def _compare_images(model: LoadedModel, tensors: Mapping[str, np.ndarray], reference: str) -> OutputReport:
    """Compare an image model's outputs as `compare_outputs` does."""
    outputs = "predictions" if isinstance(model.config, YoloConfig) else "logits"
    if isinstance(model.config, ViTConfig) and not model.config.labels:
        outputs = "features"
    if not {"images", outputs} <= tensors.keys():
        raise CheckpointError(f"{reference}: contains {sorted(tensors)}; needs images and {outputs}.")
    expected = tensors[outputs].astype(np.float64)
    run = jax.jit(lambda state, images: getattr(nnx.merge(model.graphdef, state), outputs)(images))
    actual = np.asarray(run(model.state, tensors["images"]), np.float64)
    _check_shape(reference, expected, actual)
    return OutputReport(max_abs_diff=float(np.abs(actual - expected).max()))


def _check_shape(reference: str | os.PathLike[str], expected: np.ndarray, actual: np.ndarray) -> None:
    if expected.shape != actual.shape:
        raise CheckpointError(
            f"{reference}: outputs of shape {list(expected.shape)} do not fit the model's {list(actual.shape)}; "
            "use a reference made from the same model and inputs."
        )


def _read_reference(file: pathlib.Path) -> dict[str, np.ndarray]:
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file; name a Hugging Face directory or a safetensors file.")
    try:
        return load_file(file)
    except SafetensorError as error:
        raise CheckpointError(f"{file}: truncated or corrupt ({error}); make it again.") from error
