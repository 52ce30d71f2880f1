"""`preprocessor_config.json`: how the image processors of `transformers` make pixels of an image."""

import dataclasses
import re
from collections.abc import Mapping
from typing import NamedTuple

from jaxinfer.models.config import PreprocessingConfig, Resampling, ResNetConfig, ViTConfig
from jaxinfer.models.families.fields import Fields

PREPROCESSOR = "preprocessor_config.json"
"""The file beside `config.json` that says how images become pixels."""

Colours = tuple[float, float, float]
Size = Mapping[str, int]


class _Defaults(NamedTuple):
    """The behaviour of a processor where its file does not say.

    Attributes:
      crop: what is cropped, if anything.
      square: a size that is a single number is of both sides, rather than of the shorter one.
      crop_share: the share of the resized image that is cropped, if the processor crops in this way.
    """

    resampling: Resampling
    size: Size
    crop: Size | None = None
    square: bool = True
    mean: Colours = (0.5, 0.5, 0.5)
    deviation: Colours = (0.5, 0.5, 0.5)
    crop_share: float | None = None


_CLIP_MEAN, _CLIP_DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

_PROCESSORS = {
    "ViT": _Defaults(Resampling.BILINEAR, {"height": 224, "width": 224}),
    "DeiT": _Defaults(Resampling.BICUBIC, {"height": 256, "width": 256}, {"height": 224, "width": 224}),
    "Bit": _Defaults(
        Resampling.BICUBIC,
        {"shortest_edge": 224},
        {"height": 224, "width": 224},
        square=False,
        mean=_CLIP_MEAN,
        deviation=_CLIP_DEVIATION,
    ),
    "ConvNext": _Defaults(Resampling.BICUBIC, {"shortest_edge": 384}, square=False, crop_share=224 / 256),
    "Siglip": _Defaults(Resampling.BICUBIC, {"height": 224, "width": 224}, square=False),
}

_RESAMPLING = {1: Resampling.LANCZOS, 2: Resampling.BILINEAR, 3: Resampling.BICUBIC}  # by Pillow's numbers

_READ = {
    *("image_processor_type", "feature_extractor_type", "do_resize", "size", "default_to_square", "resample"),
    *("do_center_crop", "crop_size", "crop_pct", "do_rescale", "rescale_factor"),
    *("do_normalize", "image_mean", "image_std"),
}
_HARMLESS = {  # images are RGB arrays, and answers are arrays of ours
    *("_valid_processor_keys", "processor_class", "auto_map", "do_convert_rgb", "data_format", "input_data_format"),
    *("return_tensors", "device", "disable_grouping"),
}
_SQUASHED_FROM = 384  # pixels, from which on ConvNext's processor resizes without cropping

_FOLDED = 1e-6
"""Differences of a rescale factor from 1 / 255 up to here are those of its digits."""


def with_preprocessor[Config: ResNetConfig | ViTConfig](
    config: Config, preprocessor: Mapping[str, object], default: str
) -> Config:
    """Return the config with what `preprocessor_config.json` says.

    Args:
      default: the processor of a file that does not name one.
    Raises ValueError for what is not implemented, and for images that do not fit the model.
    """
    fields = Fields(preprocessor, PREPROCESSOR)
    defaults = _PROCESSORS[_name(fields, default)]
    given = {name for name, value in preprocessor.items() if value not in (None, False)}
    if unknown := sorted(given - _READ - _HARMLESS):
        raise ValueError(f"{PREPROCESSOR}: {unknown[0]}={preprocessor[unknown[0]]!r} is not implemented; remove it.")
    image_size, resizing = _resizing(fields, defaults, config.image_size)
    interpolates = not isinstance(config, ViTConfig) or config.position_grid is not None
    if image_size != config.image_size and not interpolates:
        raise ValueError(
            f"{PREPROCESSOR}: images of {image_size} pixels do not fit images of {config.image_size} pixels in "
            "config.json; use the files of the same checkpoint."
        )
    mean, deviation = _statistics(fields, defaults)
    return dataclasses.replace(
        config,
        image_size=image_size,
        preprocessing=PreprocessingConfig(mean=mean, deviation=deviation, **resizing),
    )


def _name(fields: Fields, default: str) -> str:
    given = fields.optional(str, "image_processor_type", "feature_extractor_type")
    if given is None:
        return default
    name = re.sub("(ImageProcessor|ImageProcessorFast|ImageProcessorPil|FeatureExtractor)$", "", given)
    if name not in _PROCESSORS:
        known = ", ".join(f"{known}ImageProcessor" for known in _PROCESSORS)
        raise ValueError(f"{PREPROCESSOR}: image_processor_type={given!r} is not implemented; known: {known}.")
    return name


def _resizing(fields: Fields, defaults: _Defaults, image_size: int) -> tuple[int, dict]:
    """The size of the images, and how others become so: fields of `PreprocessingConfig`."""
    crops = fields.flag("do_center_crop", default=defaults.crop is not None)
    if not fields.flag("do_resize", default=True):
        if crops:
            raise ValueError(f"{PREPROCESSOR}: do_center_crop=True without do_resize is not implemented.")
        return image_size, {"resampling": None}
    resampling = _resampling(fields, defaults)
    resized, keep_ratio = _size(fields, "size", defaults.size, square=defaults.square)
    if defaults.crop_share is not None:
        if crops:
            raise ValueError(f"{PREPROCESSOR}: do_center_crop=True is not implemented beside crop_pct.")
        if not keep_ratio:
            raise ValueError(f"{PREPROCESSOR}: size={fields.values['size']!r} is not implemented, only shortest_edge.")
        if resized >= _SQUASHED_FROM:
            return resized, {"resampling": resampling}
        share = fields.number("crop_pct", default=defaults.crop_share)
        return resized, {"resampling": resampling, "resized": int(resized / share), "keep_ratio": True}
    if not crops:
        if keep_ratio:
            raise ValueError(
                f"{PREPROCESSOR}: size={fields.values.get('size', defaults.size)!r} without do_center_crop is not "
                "implemented, only squares."
            )
        return resized, {"resampling": resampling}
    cropped, of_shorter = _size(fields, "crop_size", defaults.crop or defaults.size, square=True)
    if of_shorter:
        raise ValueError(f"{PREPROCESSOR}: crop_size={fields.values['crop_size']!r} must have height and width.")
    return cropped, {"resampling": resampling, "resized": resized, "keep_ratio": keep_ratio}


def _resampling(fields: Fields, defaults: _Defaults) -> Resampling:
    number = fields.optional(int, "resample")
    if number is None:
        return defaults.resampling
    if number not in _RESAMPLING:
        known = ", ".join(f"{number} ({name})" for number, name in _RESAMPLING.items())
        raise ValueError(f"{PREPROCESSOR}: resample={number} is not implemented; known: {known}.")
    return _RESAMPLING[number]


def _size(fields: Fields, name: str, default: Size, *, square: bool) -> tuple[int, bool]:
    """The pixels of a side, and whether it is the shorter one of an image that keeps its ratio."""
    value = fields.values.get(name)
    value = default if value is None else value
    if type(value) is int:
        of_shorter = name == "size" and not fields.flag("default_to_square", default=square)
        value = {"shortest_edge": value} if of_shorter else {"height": value, "width": value}
    match value:
        case {"shortest_edge": int(side), **others} if not any(others.values()):
            return side, True
        case {"height": int(side), "width": int(width), **others} if side == width and not any(others.values()):
            return side, False
    raise ValueError(
        f"{PREPROCESSOR}: {name}={value!r} is not implemented, only height and width of a square, or shortest_edge."
    )


def _statistics(fields: Fields, defaults: _Defaults) -> tuple[Colours, Colours]:
    """Return mean and deviation of pixels in [0, 1], also where the file has them of pixels in another range."""
    mean, deviation = fields.colours("image_mean") or defaults.mean, fields.colours("image_std") or defaults.deviation
    if not fields.flag("do_normalize", default=True):
        mean, deviation = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    factor = fields.number("rescale_factor", default=1 / 255) if fields.flag("do_rescale", default=True) else 1.0
    if factor <= 0:
        raise ValueError(f"{PREPROCESSOR}: rescale_factor={factor!r} must be > 0; correct it.")
    largest = 255 * factor
    return (mean, deviation) if abs(largest - 1) < _FOLDED else (_divided(mean, largest), _divided(deviation, largest))


def _divided(colours: Colours, divisor: float) -> Colours:
    red, green, blue = colours
    return red / divisor, green / divisor, blue / divisor
