"""The vision transformer, and what becomes of its tokens, against the same in float64 written token by token."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from scipy.special import erf

from jaxinfer.models import ViT, WeightFormat, devices
from jaxinfer.models.abstract import merge_model
from jaxinfer.models.config import ImagePooling, PositionGrid, PreprocessingConfig, ViTConfig
from jaxinfer.models.layers.token_adaptation import NO_ADAPTATION, MergeSchedule, PromptMode, TokenAdaptation
from jaxinfer.models.presets import vision_preset
from tests.models import goldens, vision

LABELS = tuple("abcdefg")
BASE = vision_preset("vit-b", labels=LABELS)
DEEP = dataclasses.replace(
    BASE,
    embed=32,
    attention=dataclasses.replace(BASE.attention, q_heads=2, kv_heads=2, head_dim=16),
    mlp=dataclasses.replace(BASE.mlp, hidden=64),
)
"""Narrow, with the layers and tokens of ViT-B."""
SHALLOW = dataclasses.replace(DEEP, layers=2, image_size=80)
MEAN = dataclasses.replace(DEEP, pooling=ImagePooling.MEAN)
POOLINGS = {
    pooling.value: dataclasses.replace(SHALLOW, pooling=pooling) for pooling in (ImagePooling.CLS, ImagePooling.MEAN)
} | {
    # As DINOv2 with registers, DeiT with a teacher and SigLIP have them; awkward counts of tokens before the patches.
    "cls_and_mean": dataclasses.replace(SHALLOW, pooling=ImagePooling.CLS_AND_MEAN, registers=3),
    "class_tokens": dataclasses.replace(SHALLOW, pooling=ImagePooling.CLASS_TOKENS, class_tokens=2),
    "attention": dataclasses.replace(SHALLOW, pooling=ImagePooling.ATTENTION, pooling_heads=4, class_tokens=0),
    "normed_mean": dataclasses.replace(SHALLOW, pooling=ImagePooling.NORMED_MEAN, class_tokens=0, registers=2),
}
PROMPTS = 4


@functools.cache
def leaves_of(config: ViTConfig) -> dict[str, np.ndarray]:
    """Random weights that matter: activations keep their size, and no bias is 0."""
    rng = np.random.default_rng(3)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name.endswith(".weight"):
            return rng.normal(0, shape[1] ** -0.5, shape)
        if name.endswith(".scale"):
            return rng.uniform(0.5, 1.5, shape)
        return rng.normal(0, 1.0 if name.endswith(".table") else 0.3, shape)

    return {name: draw(name, leaf.shape).astype(np.float32) for name, leaf in vision.shapes(config).items()}


@functools.cache
def images_of(config: ViTConfig) -> np.ndarray:
    """Noise that is darker to the left."""
    size = config.image_size
    shade = np.linspace(0.1, 1, size)[:, None]
    return (np.random.default_rng(4).uniform(0, 256, (2, size, size, 3)) * shade).astype(np.uint8)


@functools.cache
def prompts_of(config: ViTConfig) -> np.ndarray:
    return np.random.default_rng(5).normal(0, 1.0, (2, config.layers, PROMPTS, config.embed)).astype(np.float32)


# The reference, one image at a time.


class Reference:
    """A ViT of class tokens and registers, prompts, and other tokens, in float64."""

    def __init__(self, config: ViTConfig):
        self.config = config
        self.leaves = {name: leaf.astype(np.float64) for name, leaf in leaves_of(config).items()}

    def linear(self, name, x):
        return x @ self.leaves[f"{name}.weight"].T + self.leaves[f"{name}.bias"]

    def norm(self, name, x):
        centred = x - x.mean(-1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + self.config.norm.eps)
        return centred / deviation * self.leaves[f"{name}.scale"] + self.leaves[f"{name}.bias"]

    def tokens(self, image):
        config, p = self.config, self.config.patch_size
        pixels = (image / 255 - config.preprocessing.mean) / config.preprocessing.deviation
        rows = [
            pixels[y : y + p, x : x + p].reshape(-1)
            for y in range(0, config.image_size, p)
            for x in range(0, config.image_size, p)
        ]
        first, none = config.class_tokens, np.empty((0, config.embed))
        class_tokens, registers = (self.leaves.get(f"{name}.table", none) for name in ("class_token", "registers"))
        positions = self.leaves["positions.table"]
        patches = self.linear("patches", np.stack(rows)) + positions[first:]
        return np.concatenate((class_tokens + positions[:first], registers, patches))

    def attend(self, layer, x, sizes):
        """What attention adds, and the mean of its heads' keys."""
        heads, width = self.config.attention.q_heads, self.config.attention.head_dim
        qkv = self.linear(f"layers.{layer}.attention.qkv", self.norm(f"layers.{layer}.attention_norm", x))
        mixed, keys = [], []
        for head in range(heads):
            q, k, v = np.split(qkv[:, 3 * width * head : 3 * width * (head + 1)], 3, axis=1)
            weights = np.exp(q @ k.T / np.sqrt(width)) * sizes  # a token of size s is s equal tokens
            mixed.append(weights @ v / weights.sum(-1, keepdims=True))
            keys.append(k)
        return self.linear(f"layers.{layer}.attention.out", np.concatenate(mixed, axis=1)), np.mean(keys, axis=0)

    def feed_forward(self, layer, x):
        return self.mlp(f"layers.{layer}.mlp", self.norm(f"layers.{layer}.mlp_norm", x))

    def mlp(self, name, x):
        hidden = self.linear(f"{name}.gate_up", x)
        return self.linear(f"{name}.down", 0.5 * hidden * (1 + erf(hidden / np.sqrt(2))))

    def pool(self, x, sizes, first):
        """x: [n, D], of which the tokens from `first` on are made of patches."""

        def mean(x):
            return (x[first:] * sizes[first:, None]).sum(0) / self.config.patches

        normed = self.norm("norm", x)
        match self.config.pooling:
            case ImagePooling.CLS:
                return normed[0]
            case ImagePooling.MEAN:
                return self.norm("norm", mean(x))
            case ImagePooling.NORMED_MEAN:
                return mean(normed)
            case ImagePooling.CLS_AND_MEAN:
                return np.concatenate((normed[0], mean(normed)))
            case ImagePooling.CLASS_TOKENS:
                return normed[: self.config.class_tokens].reshape(-1)
            case ImagePooling.ATTENTION:
                return self.attention_pool(normed[first:], sizes[first:])

    def attention_pool(self, x, sizes):
        k, v = np.split(self.linear("attention_pooling.kv", x), 2, axis=1)
        query, heads, mixed = self.leaves["attention_pooling.query.table"][0], self.config.pooling_heads, []
        of_heads = zip(np.split(query, heads), np.split(k, heads, 1), np.split(v, heads, 1), strict=True)
        for head_q, head_k, head_v in of_heads:
            weights = np.exp(head_k @ head_q / np.sqrt(len(head_q))) * sizes
            mixed.append(weights @ head_v / weights.sum())
        y = self.linear("attention_pooling.out", np.concatenate(mixed))
        return y + self.mlp("attention_pooling.mlp", self.norm("attention_pooling.norm", y))

    def logits(self, image, merges=(), prompts=None, mode=PromptMode.REPLACE):
        """merges: of each layer. prompts: [layers, PROMPTS, D]."""
        x, first = self.tokens(image), self.config.first_patch
        sizes, kept_prompts = np.ones(len(x)), 0  # kept_prompts: those among the tokens
        for layer in range(self.config.layers):
            if prompts is not None:
                dropped = kept_prompts if mode is PromptMode.REPLACE else 0
                x = np.concatenate((x[:first], prompts[layer], x[first + dropped :]))
                sizes = np.concatenate((sizes[:first], np.ones(PROMPTS), sizes[first + dropped :]))
                kept_prompts += PROMPTS - dropped
            added, keys = self.attend(layer, x, sizes)
            x = x + added
            protected = first + kept_prompts
            kept = min(1, protected)  # ToMe's class token, which decides what is at an even place
            others = np.r_[0:kept, protected : len(x)]
            if merges:
                merged, merged_sizes = merge(x[others], sizes[others], keys[others], merges[layer], kept)
                x = np.concatenate((merged[:kept], x[kept:protected], merged[kept:]))
                sizes = np.concatenate((merged_sizes[:kept], sizes[kept:protected], merged_sizes[kept:]))
            x = x + self.feed_forward(layer, x)
        assert sizes.sum() == self.config.tokens + kept_prompts
        return self.linear("head", self.pool(x, sizes, first + kept_prompts))


def merge(x, sizes, keys, r, kept):
    """ToMe, pair by pair. x: [n, D], `kept` class tokens (0 or 1) first."""
    r = min(r, (len(x) - kept) // 2)
    units = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    pairs = []  # the most similar one at an odd place of each token at an even place, except the class token
    for a in range(2 * kept, len(x), 2):
        cosines = units[1::2] @ units[a]
        pairs.append((-cosines.max(), a, 1 + 2 * int(cosines.argmax())))
    sums, sizes, gone = x * sizes[:, None], sizes.copy(), set()
    for _, a, b in sorted(pairs)[:r]:
        sums[b] += sums[a]
        sizes[b] += sizes[a]
        gone.add(a)
    left = [a for a in range(0, len(x), 2) if a not in gone] + list(range(1, len(x), 2))
    return sums[left] / sizes[left, None], sizes[left]


# Ours.


def ours(config: ViTConfig, adaptation: TokenAdaptation, prompts: np.ndarray | None = None) -> np.ndarray:
    def logits(leaves, images, prompts):
        model = merge_model(config, WeightFormat(), leaves)
        return model.head(model.features(images, adaptation, prompts))

    return vision.run(logits, list(leaves_of(config).values()), images_of(config), prompts)


def check(config, adaptation, prompts=None):
    reference, options = Reference(config), {"merges": adaptation.merges, "mode": adaptation.prompt_mode}
    rows = [None] * 2 if prompts is None else prompts
    expected = [reference.logits(image, prompts=row, **options) for image, row in zip(images_of(config), rows)]  # noqa: B905
    np.testing.assert_allclose(ours(config, adaptation, prompts), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("config", "r", "schedule"),
    [
        pytest.param(DEEP, 5, MergeSchedule.CONSTANT, marks=pytest.mark.slow),
        pytest.param(MEAN, 13, MergeSchedule.DECREASING, marks=pytest.mark.slow),
        (dataclasses.replace(MEAN, layers=3, image_size=80), 12, MergeSchedule.CONSTANT),  # more than there are
        (dataclasses.replace(DEEP, layers=3), 20, MergeSchedule.DECREASING),
    ],
)
def test_merged(config, r, schedule):
    check(config, TokenAdaptation(merges=schedule.merges(r, config.layers)))


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("mode", PromptMode)
def test_prompts(mode, pooling):
    check(POOLINGS[pooling], TokenAdaptation(prompts=PROMPTS, prompt_mode=mode), prompts_of(POOLINGS[pooling]))


@pytest.mark.parametrize(
    "pooling",
    [
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("cls_and_mean", "normed_mean")),
        "class_tokens",
        "attention",
    ],
)
def test_other_tokens_and_poolings(pooling):
    """Merging alone, and merging beside prompts; the goldens have level 0."""
    config = POOLINGS[pooling]
    assert config.feature_width == leaves_of(config)["head.weight"].shape[1]
    check(config, TokenAdaptation(merges=(5, 6)))
    accumulated = TokenAdaptation(prompts=PROMPTS, prompt_mode=PromptMode.ACCUMULATE, merges=(5, 6))
    check(config, accumulated, prompts_of(config))


@pytest.mark.parametrize("mode", PromptMode)
def test_prompts_and_merging(mode):
    """Where merging changes the order of tokens, prompts stay in their places."""
    config = dataclasses.replace(SHALLOW, pooling=ImagePooling.MEAN)
    check(config, TokenAdaptation(prompts=PROMPTS, prompt_mode=mode, merges=(5, 6)), prompts_of(config))


def test_level_0_is_the_plain_model():
    """It is the same program."""

    def program(logits):
        def run(leaves, images):
            return logits(merge_model(SHALLOW, WeightFormat(), leaves), images)

        return goldens.program(run, list(leaves_of(SHALLOW).values()), images_of(SHALLOW))

    plain = program(lambda model, images: model.logits(images))
    for adaptation in (NO_ADAPTATION, TokenAdaptation(merges=(0,) * SHALLOW.layers)):
        assert program(lambda model, images, a=adaptation: model.head(model.features(images, a))) == plain


@pytest.mark.parametrize("batch", [12, pytest.param(16, marks=pytest.mark.slow)])
def test_large_batches(batch, monkeypatch):
    """On a CPU a program takes them in parts, here of 8."""
    monkeypatch.setattr(devices, "BYTES_AT_ONCE", 8 * SHALLOW.tokens * SHALLOW.embed * 4)
    adaptation = TokenAdaptation(prompts=PROMPTS, merges=(5, 6))

    def features(leaves, images, prompts):
        return merge_model(SHALLOW, WeightFormat(), leaves).features(images, adaptation, prompts)

    repeated = [np.concatenate([array] * (batch // 2)) for array in (images_of(SHALLOW), prompts_of(SHALLOW))]
    actual = vision.run(features, list(leaves_of(SHALLOW).values()), *repeated)
    two = vision.run(features, list(leaves_of(SHALLOW).values()), images_of(SHALLOW), prompts_of(SHALLOW))
    np.testing.assert_allclose(actual, np.concatenate([two] * (batch // 2)), atol=1e-5)


def test_isolated_tokens_can_be_protected():
    merges = (5, 6)
    energy = ours(SHALLOW, TokenAdaptation(merges=merges, protect_isolated=0.5))
    assert np.isfinite(energy).all()
    by_similarity = [Reference(SHALLOW).logits(image, merges) for image in images_of(SHALLOW)]
    assert np.abs(energy - by_similarity).max() > 1e-3


@pytest.mark.parametrize(
    ("r", "tokens"),
    [
        (5, range(197, 136, -5)),
        (10, range(197, 76, -10)),
        (13, range(197, 40, -13)),
        (15, range(197, 16, -15)),
        (16, [*range(197, 36, -16), 21, 11]),
        (20, [197, 177, 157, 137, 117, 97, 77, 57, 37, 19, 10, 6, 4]),
        (25, [197, 172, 147, 122, 97, 72, 47, 24, 13, 7, 4, 3, 2]),
    ],
)
def test_counts(r, tokens):
    """The tokens before each layer and at the end, as ToMe's authors have them."""
    tokens = list(tokens)
    adaptation = TokenAdaptation(merges=MergeSchedule.CONSTANT.merges(r, BASE.layers))
    assert adaptation.counts(BASE.tokens, BASE.layers) == list(itertools.pairwise(tokens))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [(PromptMode.REPLACE, [(30, 25), (25, 19)]), (PromptMode.ACCUMULATE, [(30, 25), (29, 23)])],
)
def test_counts_with_prompts(mode, expected):
    adaptation = TokenAdaptation(prompts=PROMPTS, prompt_mode=mode, merges=(5, 6))
    assert adaptation.counts(SHALLOW.tokens, SHALLOW.layers) == expected

    def tokens(leaves, images, prompts):
        model = merge_model(SHALLOW, WeightFormat(), leaves)
        return adaptation.run_layers(model.layers, model.enter(images), prompts=prompts)[0]

    actual = jax.eval_shape(tokens, list(leaves_of(SHALLOW).values()), images_of(SHALLOW), prompts_of(SHALLOW))
    assert actual.shape == (2, expected[-1][1], SHALLOW.embed)


def test_schedules():
    assert MergeSchedule.CONSTANT.merges(3, 4) == (3, 3, 3, 3)
    assert MergeSchedule.DECREASING.merges(13, 12) == (26, 23, 21, 18, 16, 14, 11, 9, 7, 4, 2, 0)
    assert MergeSchedule.DECREASING.merges(5, 1) == (5,)


def test_probabilities():
    model = vision.build(SHALLOW)
    assert isinstance(model, ViT)
    actual = vision.run(model, images_of(SHALLOW))
    assert (actual.shape, actual.dtype) == ((2, len(LABELS)), np.float32)
    np.testing.assert_allclose(actual.sum(-1), 1, rtol=1e-6)


def test_prompts_that_do_not_fit():
    model = vision.build(SHALLOW)
    with pytest.raises(ValueError, match="4 prompts a layer are needed, got None"):
        model.features(images_of(SHALLOW), TokenAdaptation(prompts=4))
    with pytest.raises(ValueError, match=r"0 prompts a layer are needed, got \(2, 2, 4, 32\)"):
        model.features(images_of(SHALLOW), prompts=prompts_of(SHALLOW))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dataclasses.replace(BASE, image_size=15), "image_size=15 is less than patch_size=16"),
        (lambda: dataclasses.replace(BASE, patch_size=0), "patch_size must be >= 1, got 0"),
        (lambda: dataclasses.replace(BASE, labels="ab"), "labels must be a tuple"),
        (lambda: dataclasses.replace(BASE, class_tokens=0), "pooling=cls needs a class token"),
        (lambda: dataclasses.replace(BASE, registers=-1), "registers=-1 must be >= 0"),
        (lambda: dataclasses.replace(BASE, pooling_heads=2), "pooling_heads=2 must divide embed=768 .* and be 0"),
        (lambda: dataclasses.replace(BASE, pooling=ImagePooling.ATTENTION), "pooling_heads=0 must divide embed=768"),
        (lambda: PositionGrid(side=0), "PositionGrid.side must be >= 1"),
        (lambda: dataclasses.replace(BASE, layers=0), "layers must be >= 1"),
        (lambda: PreprocessingConfig(deviation=(0.5, 0.0, 0.5)), "deviations > 0"),
        (lambda: PreprocessingConfig(mean=(0.5,)), "a number for each of red, green and blue"),
        (
            lambda: dataclasses.replace(BASE, attention=dataclasses.replace(BASE.attention, window=8)),
            "window=8 is not implemented",
        ),
        (lambda: TokenAdaptation(prompts=-1), r"TokenAdaptation.prompts must be an integer >= 0, .*, got -1"),
        (
            lambda: TokenAdaptation(merges=(1, -2)),
            r"merges must be a list, of which each is an .*, got \(1, -2\)",
        ),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()
