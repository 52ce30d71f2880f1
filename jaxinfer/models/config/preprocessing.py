"""How images become the pixels that a model takes."""

import dataclasses
import enum

IMAGENET_MEAN, IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Statistics of the pixels of ImageNet, for red, green and blue in [0, 1]."""


class Resampling(enum.StrEnum):
    """How images are resized."""

    LINEAR = "linear"  # between the nearest pixels, however much larger the image is
    BILINEAR = "bilinear"  # Pillow's, as the others: smaller images have a share of every pixel (antialiasing)
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreprocessingConfig:
    """The way from an image of any size to the pixels of a classifier or a vision transformer.

    Images are resized, and their middle is cropped to the model's `image_size`; those of that size are taken as they
    are. Then the mean is subtracted from the pixels in [0, 1], and the rest divided by the deviation.
    """

    resampling: Resampling | None = Resampling.LINEAR  # None: images of other sizes are refused
    resized: int | None = None  # pixels of both sides before the crop; None: image_size
    keep_ratio: bool = False  # `resized` is the shorter side, and the longer one keeps its ratio to it
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)  # of red, green and blue
    deviation: tuple[float, float, float] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        if len(self.mean) != 3 or len(self.deviation) != 3 or min(self.deviation) <= 0:
            raise ValueError(
                "PreprocessingConfig.mean and deviation need a number for each of red, green and blue, deviations > 0; "
                f"got {self.mean} and {self.deviation}."
            )

    def check_size(self, image_size: int) -> None:
        """Raise ValueError if resized images are smaller than what is cropped of them."""
        if self.resized is not None and self.resized < image_size:
            raise ValueError(
                f"PreprocessingConfig.resized={self.resized} is less than image_size={image_size}: a crop is part of "
                "the resized image."
            )
