"""Non-maximum suppression: of candidates that mean the same object, the best, in arrays of fixed size."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

CANDIDATES = 1000
"""The most candidates of an image, by their scores; the others are never detections."""

DETECTIONS = 300
"""Rows of the result."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Detections:
    """Objects detected on images, best first; rows from `count` on are zero.

    Attributes:
      boxes: float32 [B, 300, 4]: left, top, right and bottom in pixels.
      scores: float32 [B, 300], in (0, 1).
      classes: int32 [B, 300].
      count: int32 [B], valid rows.
    """

    boxes: jax.Array
    scores: jax.Array
    classes: jax.Array
    count: jax.Array


def suppress(predictions: jax.Array, *, confidence: float, iou: float) -> Detections:
    """Choose the detections among candidates, with boxes in the candidates' pixels.

    A candidate's score is the product of its object and best class columns; a candidate whose object column or score
    is at most `confidence` is none. From the best on, each one that is left drops those after it of the same class
    whose intersection over union with it is more than `iou`.

    Args:
      predictions: float32 [B, candidates, 5 + classes], as `Yolo.predictions` has them.
    """
    return jax.vmap(lambda image: _suppress(image, confidence, iou))(predictions)


def _suppress(predictions: jax.Array, confidence: float, iou: float) -> Detections:
    is_object, of_class = predictions[:, 4], predictions[:, 5:]
    scores = is_object * of_class.max(-1)
    scores = jnp.where((is_object > confidence) & (scores > confidence), scores, 0.0)
    scores, best = lax.top_k(scores, min(CANDIDATES, len(scores)))
    boxes, classes = corners(predictions[best, :4]), of_class[best].argmax(-1).astype(jnp.int32)

    places = jnp.arange(len(scores))
    drops = (overlaps(boxes) > iou) & (classes[:, None] == classes) & (places[:, None] < places)
    kept = _left(drops, scores > 0)
    rows = jnp.where(kept, jnp.cumsum(kept) - 1, DETECTIONS)  # beyond the result: dropped

    def placed(values: jax.Array) -> jax.Array:
        return jnp.zeros((DETECTIONS, *values.shape[1:]), values.dtype).at[rows].set(values, mode="drop")

    count = jnp.minimum(kept.sum(), DETECTIONS).astype(jnp.int32)
    return Detections(placed(boxes), placed(scores), placed(classes), count)


def _left(drops: jax.Array, valid: jax.Array) -> jax.Array:
    """Find the candidates that no candidate that is left drops.

    Args:
      drops: bool [N, N]: whether i drops j, if i is left; only for i < j.
      valid: bool [N].

    The rule is applied to all at once until nothing changes. After n rounds the first n are final, as a candidate
    depends on those before it alone; in practice a few rounds do, where a loop over candidates has N steps.
    """

    def apply_rule(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        left, _ = state
        return valid & ~(drops & left[:, None]).any(0), left

    first = apply_rule((valid, valid))
    return lax.while_loop(lambda state: (state[0] != state[1]).any(), apply_rule, first)[0]


def corners(boxes: jax.Array) -> jax.Array:
    """Turn centre and size of boxes into left, top, right, bottom: [..., 4] -> [..., 4]."""
    centre, half = boxes[..., :2], boxes[..., 2:] / 2
    return jnp.concatenate((centre - half, centre + half), axis=-1)


def overlaps(boxes: jax.Array) -> jax.Array:
    """Divide intersection by union for all pairs of boxes, [N, 4] -> [N, N]; 0 for boxes without area."""
    low = jnp.maximum(boxes[:, None, :2], boxes[None, :, :2])
    high = jnp.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    shared = jnp.prod(jnp.maximum(high - low, 0), axis=-1)
    area = jnp.prod(jnp.maximum(boxes[:, 2:] - boxes[:, :2], 0), axis=-1)
    union = area[:, None] + area - shared
    return jnp.where(union > 0, shared / jnp.where(union > 0, union, 1), 0.0)
