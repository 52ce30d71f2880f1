"""The real evaluation's experts on disk, its systems, and its inputs.

36 classifiers of ResNet-101's size, one for each type of component, and 2 detectors (YOLOv5m) for every tenth type.
Weights are random, except the heads, by which every classifier says "ok": measurements do not depend on verdicts, and
inputs take the same way in every run.
"""

import itertools
import random
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxinfer.evaluation.experts.workloads import TraceRequest
from jaxinfer.experts.config import ExecutorOptions, ExpertConfig, SystemConfig
from jaxinfer.experts.scheduling.experts import InputKind, Rule
from jaxinfer.experts.scheduling.policy import policy_of
from jaxinfer.models import WeightFormat
from jaxinfer.models.config import ResNetConfig, YoloConfig
from jaxinfer.models.files.loading import save_model
from jaxinfer.models.presets import vision_preset
from jaxinfer.models.vision.resnet import ResNet
from jaxinfer.models.vision.yolo import Yolo

TYPES, DETECTORS = 36, 2
EXPERT_BYTES = 170 << 20
"""The unit of pools and caches: a little more than a classifier takes."""
LABELS = ("ok", "defect")
INTERVAL = 0.004
"""Seconds between inputs, the paper's: all arrive before a tenth is judged."""


def names() -> tuple[list[str], list[str]]:
    """The names of the classifiers and of the detectors."""
    return [f"classifier-{i:02}" for i in range(TYPES)], [f"detector-{i}" for i in range(DETECTORS)]


def following() -> dict[str, str]:
    """The detectors of the classifiers that have one."""
    classifiers, detectors = names()
    return {name: detectors[place % DETECTORS] for place, name in enumerate(classifiers[5::10])}


def experts_folder(folder: Path, pixels: int) -> Path:
    """The folder of experts for images of a size: a model resizes images to its own."""
    return folder / f"experts-{pixels}"


def make_experts(folder: Path, pixels: int) -> None:
    """Write the missing experts."""
    classifiers, detectors = names()
    for seed, name in enumerate([*classifiers, *detectors]):
        path = experts_folder(folder, pixels) / name
        if path.exists():
            continue
        print(f"making {path.name} ({seed + 1} of {TYPES + DETECTORS}, {pixels} pixels)", flush=True)
        rngs = nnx.Rngs(seed)
        if name in classifiers:
            cfg = vision_preset("resnet101", labels=LABELS, image_size=pixels)
            assert isinstance(cfg, ResNetConfig)
            model = ResNet(cfg, WeightFormat(), rngs=rngs)
            assert model.head.bias is not None
            model.head.weight[...] = jnp.zeros_like(model.head.weight[...])
            model.head.bias[...] = jnp.array([10.0, -10.0])
            save_model(path, model, family="resnet")
        else:
            cfg = vision_preset("yolov5m", labels=LABELS, image_size=pixels)
            assert isinstance(cfg, YoloConfig)
            save_model(path, Yolo(cfg, WeightFormat(), rngs=rngs), family="yolov5")


def config(folder: Path, options: dict[str, Any]) -> SystemConfig:
    """Make the config of a run's system, whose memory is counted in experts; for the options see `run_system`."""
    classifiers, detectors = names()
    weights, experts = [1 / (place + 20) for place in range(TYPES)], experts_folder(folder, options["pixels"])
    return SystemConfig(
        experts=tuple(ExpertConfig(name=name, checkpoint=experts / name) for name in [*classifiers, *detectors]),
        inputs=tuple(
            InputKind(name=name, expert=name, share=weight / sum(weights))
            for name, weight in zip(classifiers, weights, strict=True)
        ),
        rules=tuple(Rule(expert=name, verdict="ok", next=detector) for name, detector in following().items()),
        executors=tuple(
            ExecutorOptions(
                name=f"executor-{place}", expert_memory=options["pool"] * EXPERT_BYTES // options["executors"]
            )
            for place in range(options["executors"])
        ),
        policy=policy_of(options["mode"]),
        host_memory=options["host"] * EXPERT_BYTES,
    )


def inputs_of(requests: int, seed: int, *, rate: float | None = None) -> list[TraceRequest]:
    """Draw inputs by the shares of types: `INTERVAL` apart, or a Poisson process of this rate."""
    chosen, (classifiers, _), then = random.Random(seed), names(), following()
    weights = [1 / (place + 20) for place in range(TYPES)]
    drawn = chosen.choices(classifiers, weights, k=requests)
    pauses = [chosen.expovariate(rate) for _ in drawn] if rate else [0.0, *[INTERVAL] * (requests - 1)]
    return [
        TraceRequest(arrival=arrival, experts=(name, then[name]) if name in then else (name,))
        for arrival, name in zip(itertools.accumulate(pauses), drawn, strict=True)
    ]
