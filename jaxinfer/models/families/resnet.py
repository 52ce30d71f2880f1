"""ResNet as `transformers` has it, and the parts that torchvision's uses too."""

from collections.abc import Callable, Iterator, Mapping

from jaxinfer.models.config import ResNetConfig
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import Family, Source, linear
from jaxinfer.models.families.vision import UNUSED, labels_of, normalised_conv

EPS = 1e-5

Names = Callable[[str], tuple[str, str]]
"""Our convolution -> their convolution and batch normalisation."""


def resnet_sources(config: ResNetConfig, names: Names, head: str) -> dict[str, Source]:
    """The tensors of a ResNet whose parts have these names."""
    sources = {}
    for leaf, outputs, inputs, size in _convs(config):
        sources |= normalised_conv(leaf, *names(leaf), outputs, inputs, size, eps=EPS)
    return sources | linear("head", (head,), (len(config.labels),), config.widths[-1], bias=True)


def _convs(config: ResNetConfig) -> Iterator[tuple[str, int, int, int]]:
    """Yield each convolution: name, outputs, inputs, size."""
    yield "stem", config.stem, 3, 7
    inputs = config.stem
    for stage, (width, depth) in enumerate(zip(config.widths, config.depths, strict=True)):
        for block in range(depth):
            ours = f"stages.{stage}.{block}"
            if config.bottleneck:
                inner = width // 4
                convs = ((inner, inputs, 1), (inner, inner, 3), (width, inner, 1))
            else:
                convs = ((width, inputs, 3), (width, width, 3))
            yield from ((f"{ours}.convs.{i}", *conv) for i, conv in enumerate(convs))
            if inputs != width or (not block and (stage or config.stride_in_first_stage)):
                yield f"{ours}.shortcut", width, inputs, 1
            inputs = width


def _config(hf: Mapping[str, object]) -> ResNetConfig:
    fields = Fields(hf)
    fields.expect("num_channels", 3)
    fields.expect("hidden_act", "relu")
    kind = fields.values.get("layer_type", "bottleneck")
    if kind not in ("basic", "bottleneck"):
        raise ValueError(f"config.json: layer_type={kind!r} is not implemented; known: basic, bottleneck.")
    return ResNetConfig(
        labels=labels_of(fields),
        stem=fields.integer("embedding_size", default=64),
        widths=fields.integers("hidden_sizes") or (256, 512, 1024, 2048),
        depths=fields.integers("depths") or (3, 4, 6, 3),
        bottleneck=kind == "bottleneck",
        stride_in_first_conv=fields.flag("downsample_in_bottleneck", default=False),
        stride_in_first_stage=fields.flag("downsample_in_first_stage", default=False),
    )


def _names(leaf: str) -> tuple[str, str]:
    match leaf.split("."):
        case ["stages", stage, block, "convs", conv]:
            name = f"encoder.stages.{stage}.layers.{block}.layer.{conv}"
        case ["stages", stage, block, "shortcut"]:
            name = f"encoder.stages.{stage}.layers.{block}.shortcut"
        case _:
            name = "embedder.embedder"
    return f"{name}.convolution", f"{name}.normalization"


FAMILY = Family(
    model_types=("resnet",),
    published=("ResNet of transformers",),
    config=_config,
    sources=lambda config: resnet_sources(config, _names, "classifier.1"),
    prefixes=("resnet.",),
    ignored=UNUSED,
    image_processor="ConvNext",
)
