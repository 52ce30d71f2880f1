"""Convolutional models of images: classifiers and detectors."""

import dataclasses

from jaxinfer.models.config.checks import require_labels, require_layers, require_positive, require_sizes
from jaxinfer.models.config.preprocessing import IMAGENET_DEVIATION, IMAGENET_MEAN, PreprocessingConfig

_IMAGENET = PreprocessingConfig(mean=IMAGENET_MEAN, deviation=IMAGENET_DEVIATION)

STRIDES = (8, 16, 32)
"""Pixels of the image for one cell of each grid that a YOLO model predicts boxes in."""

_ANCHORS = (
    ((10.0, 13.0), (16.0, 30.0), (33.0, 23.0)),
    ((30.0, 61.0), (62.0, 45.0), (59.0, 119.0)),
    ((116.0, 90.0), (156.0, 198.0), (373.0, 326.0)),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """One image classifier: ResNet (arXiv:1512.03385)."""

    labels: tuple[str, ...]  # of the classes, in the order of the outputs
    stem: int = 64  # outputs of the first convolution
    widths: tuple[int, ...]  # outputs of each stage
    depths: tuple[int, ...]  # blocks of each stage
    bottleneck: bool  # blocks of 1x1, 3x3 and 1x1, a quarter as wide inside; else of two 3x3
    stride_in_first_conv: bool = False  # of a bottleneck, as in the paper; else in its 3x3 (v1.5)
    stride_in_first_stage: bool = False  # all stages have a stride of 2; else all but the first
    image_size: int = 224  # pixels of a side
    preprocessing: PreprocessingConfig = _IMAGENET

    def __post_init__(self) -> None:
        require_positive(self, "stem", "image_size")
        self.preprocessing.check_size(self.image_size)
        require_sizes(self, "widths", "depths")
        require_layers(self, sum(self.depths))
        require_labels(self, self.labels)
        if len(self.widths) != len(self.depths):
            raise ValueError(f"ResNetConfig.widths={self.widths} and depths={self.depths} must be of one length.")
        if self.bottleneck and any(width % 4 for width in self.widths):
            raise ValueError(f"ResNetConfig.widths={self.widths} of bottlenecks must be multiples of 4.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class YoloConfig:
    """One object detector: YOLOv5, version 6 of its architecture and later, with three grids (P3 to P5)."""

    labels: tuple[str, ...]  # of the classes, in the order of the outputs
    widths: tuple[int, ...]  # outputs of the first convolution and of the four stages
    depths: tuple[int, ...]  # bottlenecks of each of the four stages; those of the neck have as many as the first
    image_size: int = 640  # pixels: images are letterboxed to image_size x image_size
    confidence: float = 0.25  # detections with at most this score are dropped
    iou: float = 0.45  # of two boxes of one class that overlap by more, the one with the lower score is dropped
    anchors: tuple[tuple[tuple[float, float], ...], ...] = _ANCHORS  # pixels (width, height), by grid

    def __post_init__(self) -> None:
        require_sizes(self, "widths", "depths")
        require_layers(self, sum(self.depths))
        require_labels(self, self.labels)
        if (len(self.widths), len(self.depths)) != (5, 4):
            raise ValueError(f"YoloConfig needs 5 widths and 4 depths, got {self.widths} and {self.depths}.")
        if any(width % 2 for width in self.widths[1:]):
            raise ValueError(f"YoloConfig.widths={self.widths} must be even from the second on.")
        if self.image_size < 1 or self.image_size % STRIDES[-1]:
            raise ValueError(f"YoloConfig.image_size must be a multiple of {STRIDES[-1]}, got {self.image_size}.")
        for name in ("confidence", "iou"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"YoloConfig.{name} must be in [0, 1], got {getattr(self, name)}.")
        if len(self.anchors) != len(STRIDES) or len({len(grid) for grid in self.anchors}) != 1:
            raise ValueError(f"YoloConfig.anchors needs as many boxes for each of 3 grids, got {self.anchors}.")
        if any(side <= 0 for grid in self.anchors for box in grid for side in box):
            raise ValueError(f"YoloConfig.anchors must be positive, got {self.anchors}.")
