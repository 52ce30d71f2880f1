"""Images outside of programs: resized for a model, with Pillow (the extra `images`)."""

import numpy as np

from jaxinfer.extras import require_extra
from jaxinfer.models.config import PreprocessingConfig, Resampling
from jaxinfer.models.vision.images import resized_shape


def fitted(image: np.ndarray, size: int, cfg: PreprocessingConfig) -> np.ndarray:
    """Resize and crop an image for a model: uint8 [H, W, 3] -> [size, size, 3].

    `Resampling.LINEAR` is Pillow's bilinear here. Raises ValueError for another size where the config resizes none,
    MissingExtraError without Pillow.
    """
    height, width = image.shape[:2]
    if cfg.resampling is None:
        if (height, width) != (size, size):
            raise ValueError(f"the image must be {size} x {size}, got {height} x {width}: the model resizes none.")
        return image
    height, width = resized_shape(height, width, size, cfg)
    if image.shape[:2] != (height, width):
        require_extra("PIL", "resizing images")
        from PIL import Image

        bilinear = cfg.resampling is Resampling.LINEAR
        kernel = Image.Resampling["BILINEAR" if bilinear else cfg.resampling.name]
        image = np.asarray(Image.fromarray(image).resize((width, height), kernel))
    top, left = (height - size) // 2, (width - size) // 2
    return image[top : top + size, left : left + size]
