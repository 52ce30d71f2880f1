"""Parts of the families of image models: convolutions with the batch normalisation after them, and labels."""

from collections.abc import Mapping

import numpy as np

from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import Shape, Source

UNUSED = r".*\.num_batches_tracked"
"""A pattern of the tensors that batch normalisation keeps for training alone."""


def normalised_conv(
    leaf: str, conv: str, norm: str, outputs: int, inputs: int, size: int, *, eps: float
) -> dict[str, Source]:
    """One convolution of ours from theirs, which has no bias, and the batch normalisation of its outputs.

    With scale g, shift b, mean m and variance v of an output channel, and f = g / sqrt(v + eps), the weight is f W and
    the bias b - f m, computed in float32.
    """

    def factor(scale: np.ndarray, variance: np.ndarray) -> np.ndarray:
        return scale.astype(np.float32) / np.sqrt(variance.astype(np.float32) + np.float32(eps))

    def fold(weight: np.ndarray, scale: np.ndarray, variance: np.ndarray) -> np.ndarray:
        return outputs_last(weight.astype(np.float32)) * factor(scale, variance)

    def bias(scale: np.ndarray, variance: np.ndarray, shift: np.ndarray, mean: np.ndarray) -> np.ndarray:
        return shift.astype(np.float32) - factor(scale, variance) * mean.astype(np.float32)

    scale, shift, mean, variance = (f"{norm}.{part}" for part in ("weight", "bias", "running_mean", "running_var"))
    per_channel = (outputs,)
    return {
        f"{leaf}.weight": Source(
            (f"{conv}.weight", scale, variance), ((outputs, inputs, size, size), per_channel, per_channel), fold
        ),
        f"{leaf}.bias": Source((scale, variance, shift, mean), (per_channel,) * 4, bias),
    }


def outputs_last(weight: np.ndarray) -> np.ndarray:
    """Transpose a kernel: [outputs, inputs, height, width] -> [height, width, inputs, outputs]."""
    return weight.transpose(2, 3, 1, 0)


def numbered(classes: int) -> tuple[str, ...]:
    """Return labels of classes without names: "0", "1", ..."""
    return tuple(map(str, range(classes)))


def labels_of(fields: Fields) -> tuple[str, ...]:
    """The labels of a Hugging Face `config.json`, or numbers."""
    names: dict[str, str] = fields.optional(dict, "id2label") or {}
    return tuple(names[i] for i in sorted(names, key=int)) or numbered(fields.integer("num_labels", default=2))


def labels_by_head(fields: Fields, heads: tuple[str, ...], backbones: tuple[str, ...]) -> tuple[str, ...]:
    """The labels of a checkpoint with a head of classes; none for a backbone without one.

    Args:
      fields: of `config.json`; without `architectures` in it the first of `heads` is taken.
      heads: the architectures with a head of classes.
      backbones: those without.
    """
    architectures = fields.optional(list, "architectures") or [heads[0]]
    if architectures[0] in backbones:
        return ()
    if architectures[0] not in heads:
        raise ValueError(
            f"{fields.file}: architectures={architectures!r} is not implemented; known: {', '.join(heads + backbones)}."
        )
    fields.expect("problem_type", "single_label_classification")
    return labels_of(fields)


def outputs_of(shapes: Mapping[str, Shape], name: str) -> int:
    """Read the outputs of a convolution or linear from its weight's shape. Raises ValueError if there is none."""
    if not shapes.get(name):
        raise ValueError(f"The tensor {name} is missing; use the whole state dict of a model that is implemented.")
    return shapes[name][0]


def count(shapes: Mapping[str, Shape], before: str, after: str, *, first: int = 0) -> int:
    """Return how many tensors have names that differ only in a number, from `first`, between `before` and `after`."""
    number = first
    while f"{before}{number}{after}" in shapes:
        number += 1
    return number - first
