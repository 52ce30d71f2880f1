"""Systems of tiny experts that run: classifiers c0 to c4, a ViT v0, a detector d0, an encoder e0. Costs are given."""

import functools

import jax
import numpy as np
from flax import nnx

from jaxinfer.experts.config import ExecutorOptions, ExpertConfig, SystemConfig
from jaxinfer.experts.execution.architectures import Architecture
from jaxinfer.experts.execution.kinds import kind_of
from jaxinfer.experts.scheduling.experts import InputKind, Rule
from jaxinfer.experts.scheduling.policy import Policy, policy_of
from jaxinfer.experts.scheduling.profile import Profile
from jaxinfer.models import WeightFormat
from jaxinfer.models.config import (
    Activation,
    AttentionConfig,
    EncoderConfig,
    LearnedPositions,
    MlpConfig,
    NormConfig,
    NormKind,
    ResNetConfig,
    ViTConfig,
    YoloConfig,
)
from jaxinfer.models.files.loading import load_model, open_model, save_model
from jaxinfer.models.text.encoder import Encoder
from jaxinfer.models.vision.resnet import ResNet
from jaxinfer.models.vision.vit import ViT
from jaxinfer.models.vision.yolo import Yolo
from tests.tiny import byte_tokenizer

CLASSIFIERS = tuple(f"c{number}" for number in range(5))
SIZE = 32
COSTS = Profile(k=1e-3, b=1e-3, max_batch=2, load={"disk": 5e-3, "host": 1e-3}, latency={1: 2e-3, 2: 3e-3})


LAYOUTS = ("orbax", "single-file")
"""Of classifiers in turn: experts do not know which they come from."""


def save_classifiers(folders, size=SIZE):
    config = ResNetConfig(labels=("ok", "defect"), widths=(4,), depths=(1,), stem=4, bottleneck=False, image_size=size)
    for seed, folder in enumerate(folders):
        save(folder, ResNet, config, "resnet", seed, layout=LAYOUTS[seed % 2])


def save_board(folder):
    """Write all experts; returns the folder."""
    save_classifiers([folder / name for name in CLASSIFIERS])
    config = YoloConfig(labels=("scratch", "hole"), widths=(4, 4, 4, 4, 4), depths=(1, 1, 1, 1), image_size=SIZE)
    save(folder / "d0", Yolo, config, "yolo", 9)
    config = ViTConfig(
        labels=("good", "bad", "ugly"),
        embed=16,
        layers=1,
        attention=AttentionConfig(q_heads=2, kv_heads=2, head_dim=8, qkv_bias=True, out_bias=True),
        mlp=MlpConfig(hidden=16, activation=Activation.GELU, bias=True),
        norm=NormConfig(kind=NormKind.LAYER),
        image_size=SIZE,
        patch_size=8,
    )
    save(folder / "v0", ViT, config, "vit", 7)
    save_encoder(folder / "e0", tokenizer={"tokenizer.json": byte_tokenizer().to_str().encode()})
    return folder


def save_encoder(folder, vocab=257, **options):
    config = EncoderConfig(
        vocab=vocab,
        embed=16,
        layers=1,
        context=12,
        attention=AttentionConfig(q_heads=2, kv_heads=2, head_dim=8),
        learned_positions=LearnedPositions(),
        mlp=MlpConfig(hidden=16, activation=Activation.GELU, gated=False),
        norm=NormConfig(kind=NormKind.LAYER),
    )
    save(folder, Encoder, config, "tiny", 8, **options)


def save(folder, model, config, family, seed, **options):
    """Write a model whose matrices are far from uniform, so that mistakes show."""
    rng = np.random.default_rng(seed)

    def value(leaf):
        drawn = rng.normal(0, 0.2, leaf.shape) if leaf.ndim > 1 else rng.uniform(0.5, 1.5, leaf.shape)
        return jax.device_put(drawn.astype(leaf.dtype), jax.devices()[0])  # compiles nothing

    graphdef, state = nnx.split(nnx.eval_shape(lambda: model(config, WeightFormat(), rngs=nnx.Rngs(0))))
    save_model(folder, nnx.merge(graphdef, jax.tree.map(value, state)), family=family, **options)


def image(seed, size=SIZE):
    return np.random.default_rng(seed).integers(0, 256, (size, size, 3), np.uint8)


@functools.cache
def architecture(folder):
    opened = open_model(folder)
    return Architecture.from_kind(kind_of(opened), opened.weights)


@functools.cache
def expert_bytes(folder):
    return open_model(folder).bytes_per_device()


@functools.cache
def _model(folder):
    return load_model(folder)


@functools.cache
def _call(graphdef):
    return jax.jit(lambda state, images: nnx.merge(graphdef, state)(images))


def answers(folder, value):
    """What a model answers when it is called directly."""
    model = _model(folder)
    return _call(model.graphdef)(model.state, value[None])


def probabilities(folder, value):
    return np.asarray(answers(folder, value))[0]


def config(folder, names=CLASSIFIERS, *, slots=2, host=0, executors=1, mode="best", rules=(), **changes):
    """A system of these experts, each with an input of its own name; memory for so many classifiers."""
    unit = 1 if "memory" in changes else expert_bytes(folder / CLASSIFIERS[0])
    policy = changes.pop("policy", {})
    memory, activation = changes.pop("memory", slots * unit), changes.pop("activation", None)
    options = {
        "experts": tuple(ExpertConfig(name=name, checkpoint=folder / name) for name in names),
        "inputs": tuple(InputKind(name=name, expert=name) for name in names),
        "rules": tuple(Rule(expert=a, verdict=verdict, next=b, probability=0.5) for a, verdict, b in rules),
        "executors": tuple(
            ExecutorOptions(name=f"x{number}", expert_memory=memory, activation_memory=activation)
            for number in range(executors)
        ),
        "policy": policy if isinstance(policy, Policy) else policy_of(mode, **policy),
        "host_memory": host * unit,
        "max_batch": 2,
    }
    if "executors_given" in changes:
        changes["executors"] = changes.pop("executors_given")
    return SystemConfig(**{**options, **changes})


class AnyProfiles(dict):
    """The same costs for all architectures."""

    def __init__(self, costs=COSTS):
        self.costs = costs

    def __missing__(self, key):
        return self.costs

    def get(self, key, default=None):
        return self.costs

    def __contains__(self, key):
        return True
