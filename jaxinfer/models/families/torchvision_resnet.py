"""torchvision's ResNet: a state dict without a config.json. Wide and grouped variants (ResNeXt) are not implemented."""

from collections.abc import Mapping

from jaxinfer.models.config import ResNetConfig
from jaxinfer.models.families.mapping import Family, Shape
from jaxinfer.models.families.resnet import resnet_sources
from jaxinfer.models.families.vision import UNUSED, count, numbered, outputs_of


def _config(shapes: Mapping[str, Shape]) -> ResNetConfig:
    stages = range(1, 1 + count(shapes, "layer", ".0.conv1.weight", first=1))
    bottleneck = "layer1.0.conv3.weight" in shapes
    last = "conv3" if bottleneck else "conv2"
    return ResNetConfig(
        labels=numbered(outputs_of(shapes, "fc.weight")),
        stem=outputs_of(shapes, "conv1.weight"),
        widths=tuple(outputs_of(shapes, f"layer{stage}.0.{last}.weight") for stage in stages),
        depths=tuple(count(shapes, f"layer{stage}.", ".conv1.weight") for stage in stages),
        bottleneck=bottleneck,
    )


def _names(leaf: str) -> tuple[str, str]:
    match leaf.split("."):
        case ["stages", stage, block, "convs", conv]:
            block, number = f"layer{int(stage) + 1}.{block}", int(conv) + 1
            return f"{block}.conv{number}", f"{block}.bn{number}"
        case ["stages", stage, block, "shortcut"]:
            block = f"layer{int(stage) + 1}.{block}"
            return f"{block}.downsample.0", f"{block}.downsample.1"
    return "conv1", "bn1"


FAMILY = Family(
    model_types=("torchvision_resnet",),
    published=("ResNet of torchvision",),
    config=_config,
    sources=lambda config: resnet_sources(config, _names, "fc"),
    ignored=UNUSED,
    image_processor="ConvNext",
    mark="layer1.0.conv1.weight",
)
