"""Known models as configs: the DeepSpeed Inference paper's Tables I and II, Llama, Qwen, Gemma and Mixtral shapes,
models of images.

The tables give layers, rounded widths and head counts. The rest (vocabulary, context, arrangement) is that of the
published model, or GPT-2's if none is published. If a table's rounding contradicts the published model, the published
numbers are used (GPT-Neo has 20 heads of 128, GPT-2 XL 25 of 64). Two rows of Table II contradict their own count of
parameters, which is that of 40 layers (8B+MoE-128), of 32 layers of 8000 (24B+MoE-128). Nothing is downloaded or
allocated here.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from jaxinfer.checkpoints import Leaf
from jaxinfer.models.config import (
    Activation,
    AttentionConfig,
    BlockKind,
    DecoderConfig,
    LayerConfig,
    LearnedPositions,
    MlpConfig,
    ModelConfig,
    MoeConfig,
    NormConfig,
    NormKind,
    PositionKind,
    PositionsConfig,
    ResNetConfig,
    RouterConfig,
    VisionConfig,
    ViTConfig,
    YoloConfig,
)
from jaxinfer.models.leaves import canonical_leaves, layer_of
from jaxinfer.models.weight_format import WeightFormat

_LAYER_NORM = NormConfig(kind=NormKind.LAYER, eps=1e-5)


def _gpt(*, embed: int, layers: int, heads: int, context: int = 2048) -> DecoderConfig:
    """Arrange layers as GPT-2 does, in another size (GPT-3 differs only in its sparse layers)."""
    return DecoderConfig(
        vocab=50_257,
        embed=embed,
        layers=layers,
        context=context,
        pattern=(
            LayerConfig(
                mixer=AttentionConfig(
                    q_heads=heads, kv_heads=heads, head_dim=embed // heads, qkv_bias=True, out_bias=True
                ),
                mlp=MlpConfig(hidden=4 * embed, activation=Activation.GELU_TANH, bias=True),
            ),
        ),
        learned_positions=LearnedPositions(),
        norm=_LAYER_NORM,
        tied=True,
    )


def _gpt_moe(*, embed: int, layers: int, heads: int) -> DecoderConfig:
    """Arrange layers as GPT-2 does, with 128 experts in every second one, of which a token has one (Table II)."""
    dense = _gpt(embed=embed, layers=layers, heads=heads)
    router = RouterConfig(experts=128, experts_per_token=1, normalize=False)
    (kind,) = dense.pattern
    return dataclasses.replace(dense, pattern=(kind, kind.with_mlp(moe=MoeConfig(router=router))))


def _llama(
    *, vocab: int, embed: int, layers: int, heads: int, kv_heads: int, hidden: int, context: int, theta: float
) -> DecoderConfig:
    return DecoderConfig(
        vocab=vocab,
        embed=embed,
        layers=layers,
        context=context,
        pattern=(
            LayerConfig(
                mixer=AttentionConfig(
                    q_heads=heads,
                    kv_heads=kv_heads,
                    head_dim=embed // heads,
                    positions=PositionsConfig(kind=PositionKind.ROTARY, theta=theta, rotary_dim=embed // heads),
                ),
                mlp=MlpConfig(hidden=hidden, activation=Activation.SILU, gated=True),
            ),
        ),
        norm=NormConfig(kind=NormKind.RMS, eps=1e-5),
    )


_GPT_NEO = DecoderConfig(
    vocab=50_257,
    embed=2560,
    layers=32,
    context=2048,
    pattern=(
        LayerConfig(
            mixer=AttentionConfig(q_heads=20, kv_heads=20, head_dim=128, out_bias=True, scale=1.0),
            mlp=MlpConfig(hidden=10_240, activation=Activation.GELU_TANH, bias=True),
        ),
    ),
    learned_positions=LearnedPositions(),
    norm=_LAYER_NORM,
    tied=True,
).with_windows((None, 256))

_GPT_J = DecoderConfig(
    vocab=50_400,
    embed=4096,
    layers=28,
    context=2048,
    pattern=(
        LayerConfig(
            block=BlockKind.PARALLEL,
            mixer=AttentionConfig(
                q_heads=16,
                kv_heads=16,
                head_dim=256,
                positions=PositionsConfig(kind=PositionKind.ROTARY, rotary_dim=64),
            ),
            mlp=MlpConfig(hidden=16_384, activation=Activation.GELU_TANH, bias=True),
        ),
    ),
    norm=_LAYER_NORM,
    head_bias=True,
)

_GPT_NEOX = DecoderConfig(
    vocab=50_432,
    embed=6144,
    layers=44,
    context=2048,
    pattern=(
        LayerConfig(
            block=BlockKind.PARALLEL_TWO_NORMS,
            mixer=AttentionConfig(
                q_heads=64,
                kv_heads=64,
                head_dim=96,
                qkv_bias=True,
                out_bias=True,
                positions=PositionsConfig(kind=PositionKind.ROTARY, rotary_dim=24),
            ),
            mlp=MlpConfig(hidden=24_576, activation=Activation.GELU_TANH, bias=True),
        ),
    ),
    norm=_LAYER_NORM,
)

_QWEN3 = DecoderConfig(
    vocab=151_936,
    embed=1024,
    layers=28,
    context=40_960,
    pattern=(
        LayerConfig(
            mixer=AttentionConfig(
                q_heads=16,
                kv_heads=8,
                head_dim=128,
                qk_norm=True,
                positions=PositionsConfig(kind=PositionKind.ROTARY, theta=1_000_000.0, rotary_dim=128),
            ),
            mlp=MlpConfig(hidden=3072, activation=Activation.SILU, gated=True),
        ),
    ),
    norm=NormConfig(kind=NormKind.RMS, eps=1e-6),
    tied=True,
)

_QWEN3_MOE = dataclasses.replace(
    _QWEN3.with_attention(q_heads=32, kv_heads=4).with_mlp(
        hidden=768, moe=MoeConfig(router=RouterConfig(experts=128, experts_per_token=8))
    ),
    embed=2048,
    layers=48,
    tied=False,
)

_MIXTRAL = _llama(
    vocab=32_000, embed=4096, layers=32, heads=32, kv_heads=8, hidden=14_336, context=32_768, theta=1_000_000.0
)

_GEMMA3_GLOBAL = LayerConfig(
    block=BlockKind.SANDWICH,
    mixer=AttentionConfig(
        q_heads=4,
        kv_heads=1,
        head_dim=256,
        qk_norm=True,
        positions=PositionsConfig(kind=PositionKind.ROTARY, theta=1_000_000.0, rotary_dim=256),
    ),
    mlp=MlpConfig(hidden=6912, activation=Activation.GELU_TANH, gated=True),
)
_GEMMA3_LOCAL = _GEMMA3_GLOBAL.with_attention(
    window=512, positions=PositionsConfig(kind=PositionKind.ROTARY, theta=10_000.0, rotary_dim=256)
)
_GEMMA3 = DecoderConfig(
    vocab=262_144,
    embed=1152,
    layers=26,
    context=32_768,
    pattern=(*(_GEMMA3_LOCAL,) * 5, _GEMMA3_GLOBAL),
    norm=NormConfig(kind=NormKind.RMS, eps=1e-6),
    embed_scale=1152**0.5,
    tied=True,
)

PRESETS: dict[str, DecoderConfig] = {
    "gpt2-1.5b": _gpt(embed=1600, layers=48, heads=25, context=1024),
    "gpt-neo-2.7b": _GPT_NEO,
    "gpt-j-6b": _GPT_J,
    "gpt-13b": _gpt(embed=5120, layers=40, heads=40),
    "gpt-neox-20b": _GPT_NEOX,
    "gpt-50b": _gpt(embed=8192, layers=62, heads=64),
    "gpt-87b": _gpt(embed=12_288, layers=48, heads=96),
    "lm-175b": _gpt(embed=12_288, layers=96, heads=96),
    "lm-530b": _gpt(embed=20_480, layers=105, heads=128),
    "gpt-moe-52b": _gpt_moe(embed=2048, layers=24, heads=16),
    "gpt-moe-107b": _gpt_moe(embed=3584, layers=16, heads=28),
    "gpt-moe-349b": _gpt_moe(embed=4096, layers=40, heads=32),
    "gpt-moe-1t": _gpt_moe(embed=8000, layers=32, heads=125),
    "gpt-moe-2t": _gpt_moe(embed=8192, layers=58, heads=64),
    "llama3.2-1b": dataclasses.replace(
        _llama(
            vocab=128_256,
            embed=2048,
            layers=16,
            heads=32,
            kv_heads=8,
            hidden=8192,
            context=131_072,
            theta=500_000.0,
        ),
        tied=True,
    ),
    "llama3-8b": _llama(
        vocab=128_256,
        embed=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        hidden=14_336,
        context=8192,
        theta=500_000.0,
    ),
    "llama3-70b": _llama(
        vocab=128_256,
        embed=8192,
        layers=80,
        heads=64,
        kv_heads=8,
        hidden=28_672,
        context=8192,
        theta=500_000.0,
    ),
    "mixtral-8x7b": _MIXTRAL.with_mlp(moe=MoeConfig(router=RouterConfig(experts=8, experts_per_token=2))),
    "qwen3-0.6b": _QWEN3,
    "qwen3-30b-a3b": _QWEN3_MOE,
    "gemma3-1b": _GEMMA3,
    "llama-213m": _llama(  # for the CPU benchmarks; a decode step reads 213M of its 246M (one row of the table)
        vocab=32_000,
        embed=1024,
        layers=16,
        heads=16,
        kv_heads=4,
        hidden=2816,
        context=2048,
        theta=10_000.0,
    ),
}


_BASIC = functools.partial(ResNetConfig, widths=(64, 128, 256, 512), bottleneck=False)
_BOTTLENECKS = functools.partial(ResNetConfig, widths=(256, 512, 1024, 2048), bottleneck=True)


def _vit(
    *, labels: tuple[str, ...], embed: int, layers: int, heads: int, patch_size: int = 16, **fields: Any
) -> ViTConfig:
    """Describe a ViT (arXiv:2010.11929 and arXiv:2012.12877, table 1), its MLP four times as wide as its tokens."""
    return ViTConfig(
        labels=labels,
        embed=embed,
        layers=layers,
        attention=AttentionConfig(q_heads=heads, kv_heads=heads, head_dim=embed // heads, qkv_bias=True, out_bias=True),
        mlp=MlpConfig(hidden=4 * embed, activation=Activation.GELU, bias=True),
        norm=NormConfig(kind=NormKind.LAYER, eps=1e-6),
        patch_size=patch_size,
        **fields,
    )


VISION_PRESETS: dict[str, Callable[..., VisionConfig]] = {
    "resnet18": functools.partial(_BASIC, depths=(2, 2, 2, 2)),
    "resnet50": functools.partial(_BOTTLENECKS, depths=(3, 4, 6, 3)),
    "resnet101": functools.partial(_BOTTLENECKS, depths=(3, 4, 23, 3)),
    "vit-ti": functools.partial(_vit, embed=192, layers=12, heads=3),
    "vit-s": functools.partial(_vit, embed=384, layers=12, heads=6),
    "vit-b": functools.partial(_vit, embed=768, layers=12, heads=12),
    "vit-l": functools.partial(_vit, embed=1024, layers=24, heads=16),
    "vit-h": functools.partial(_vit, embed=1280, layers=32, heads=16, patch_size=14),
    "yolov5n": functools.partial(YoloConfig, widths=(16, 32, 64, 128, 256), depths=(1, 2, 3, 1)),
    "yolov5s": functools.partial(YoloConfig, widths=(32, 64, 128, 256, 512), depths=(1, 2, 3, 1)),
    "yolov5m": functools.partial(YoloConfig, widths=(48, 96, 192, 384, 768), depths=(2, 4, 6, 2)),
    "yolov5l": functools.partial(YoloConfig, widths=(64, 128, 256, 512, 1024), depths=(3, 6, 9, 3)),
    "yolov5x": functools.partial(YoloConfig, widths=(80, 160, 320, 640, 1280), depths=(4, 8, 12, 4)),
}


def preset(name: str) -> DecoderConfig:
    """Look up a language model by name."""
    return _known(name, PRESETS)


def vision_preset(name: str, *, labels: tuple[str, ...], **fields: Any) -> VisionConfig:
    """Look up a model of images by name.

    Args:
      labels: of its classes.
      fields: of its config, where they differ from the preset's.

    >>> vision_preset("yolov5s", labels=("scratch", "dent"), image_size=320).widths
    (32, 64, 128, 256, 512)
    """
    return _known(name, VISION_PRESETS)(labels=labels, **fields)


def _known[T](name: str, presets: dict[str, T]) -> T:
    if name not in presets:
        raise ValueError(f"preset={name!r} is not known; known: {', '.join(presets)}.")
    return presets[name]


def parameter_count(config: ModelConfig) -> int:
    """Count the parameters of a model without allocating it."""
    return sum(math.prod(leaf.shape) for leaf in canonical_leaves(config, WeightFormat()).values())


def active_parameter_count(config: ModelConfig) -> int:
    """Count the parameters that a token is computed with: all but those of the experts that it is not sent to."""

    def active(name: str, leaf: Leaf) -> int:
        size, layer = math.prod(leaf.shape), layer_of(name)
        if not leaf.parts or layer is None:
            return size
        assert isinstance(config, DecoderConfig)
        moe = config.layer(layer).mlp.moe
        assert moe is not None
        return size // moe.router.experts * moe.router.experts_per_token

    return sum(active(name, leaf) for name, leaf in canonical_leaves(config, WeightFormat()).items())
