"""Ultralytics' YOLOv5, version 6 of its architecture and later: a state dict without a config.json.

Its modules are numbered as the layers of the published architecture. Segmentation, classification and models with four
grids (P6) are not implemented.
"""

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from jaxinfer.models.config import STRIDES, YoloConfig
from jaxinfer.models.families.mapping import Family, Shape, Source, only
from jaxinfer.models.families.vision import UNUSED, count, normalised_conv, numbered, outputs_last, outputs_of

EPS = 1e-3
ANCHORS = "24.anchors"
"""A buffer of width and height of each grid's anchors, in cells of the grid."""
_ANCHORS_SHAPE = (len(STRIDES), 3, 2)


def _config(shapes: Mapping[str, Shape]) -> YoloConfig:
    if shapes.get(ANCHORS, _ANCHORS_SHAPE) != _ANCHORS_SHAPE:
        raise ValueError(
            f"The tensor {ANCHORS} is {list(shapes[ANCHORS])}: only models with three anchors in each of three grids "
            "are implemented."
        )
    return YoloConfig(
        labels=numbered(outputs_of(shapes, "24.m.0.weight") // 3 - 5),
        widths=tuple(outputs_of(shapes, f"{layer}.conv.weight") for layer in (0, 1, 3, 5, 7)),
        depths=tuple(count(shapes, f"{layer}.m.", ".cv1.conv.weight") for layer in (2, 4, 6, 8)),
    )


def with_anchors(config: YoloConfig, anchors: np.ndarray) -> YoloConfig:
    """Return the config with the anchors of a checkpoint's buffer."""
    pixels = anchors.astype(np.float64) * np.array(STRIDES)[:, None, None]
    return dataclasses.replace(config, anchors=tuple(tuple(map(tuple, grid)) for grid in pixels.tolist()))


def _sources(config: YoloConfig) -> dict[str, Source]:
    sources = {}
    for leaf, name, outputs, inputs, size in _convs(config):
        sources |= normalised_conv(leaf, f"{name}.conv", f"{name}.bn", outputs, inputs, size, eps=EPS)
    outputs = len(config.anchors[0]) * (5 + len(config.labels))
    for i, width in enumerate(config.widths[2:]):
        sources[f"heads.{i}.weight"] = Source((f"24.m.{i}.weight",), ((outputs, width, 1, 1),), outputs_last)
        sources[f"heads.{i}.bias"] = Source((f"24.m.{i}.bias",), ((outputs,),), only)
    return sources


def _convs(config: YoloConfig) -> Iterator[tuple[str, str, int, int, int]]:
    """Yield each convolution: our name, theirs, outputs, inputs, size."""
    w, depths = config.widths, config.depths
    yield "stem", "0", w[0], 3, 6
    for i in range(4):
        yield f"downs.{i}", f"{1 + 2 * i}", w[i + 1], w[i], 3
        yield from _csp(f"stages.{i}", 2 + 2 * i, w[i + 1], w[i + 1], depths[i])
    yield "pooling.conv1", "9.cv1", w[4] // 2, w[4], 1
    yield "pooling.conv2", "9.cv2", w[4], 4 * (w[4] // 2), 1
    yield "lateral5", "10", w[3], w[4], 1
    yield from _csp("top_down4", 13, w[3], 2 * w[3], depths[0])
    yield "lateral4", "14", w[2], w[3], 1
    yield from _csp("top_down3", 17, w[2], 2 * w[2], depths[0])
    yield "down3", "18", w[2], w[2], 3
    yield from _csp("bottom_up4", 20, w[3], 2 * w[2], depths[0])
    yield "down4", "21", w[3], w[3], 3
    yield from _csp("bottom_up5", 23, w[4], 2 * w[3], depths[0])


def _csp(leaf: str, layer: int, outputs: int, inputs: int, depth: int) -> Iterator[tuple[str, str, int, int, int]]:
    half = outputs // 2
    yield f"{leaf}.conv1", f"{layer}.cv1", half, inputs, 1
    yield f"{leaf}.conv2", f"{layer}.cv2", half, inputs, 1
    yield f"{leaf}.conv3", f"{layer}.cv3", outputs, 2 * half, 1
    for block in range(depth):
        yield f"{leaf}.blocks.{block}.conv1", f"{layer}.m.{block}.cv1", half, half, 1
        yield f"{leaf}.blocks.{block}.conv2", f"{layer}.m.{block}.cv2", half, half, 3


FAMILY = Family(
    model_types=("yolov5",),
    published=("YOLOv5",),
    config=_config,
    sources=_sources,
    ignored=rf"{UNUSED}|24\.anchors|24\.anchor_grid",
    mark="24.m.0.weight",
)
