"""Experts and elastic tasks over HTTP, against the same work in one process.

JPEGs of 224 pixels, 8 a request, as many requests at a time as keep the server busy. Both sides decode them. The server
is a process of its own, and its client is on the same machine; the other side calls `System.submit` or `Service.submit`
from threads. Rounds take turns, and a ratio is the median of rounds. Weights are random: nothing depends on verdicts.
"""

import asyncio
import base64
import dataclasses
import functools
import io
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import jax.numpy as jnp
import numpy as np
import psutil
from flax import nnx
from PIL import Image

from benchmarks.serving.processes import Server, free_port
from examples.circuit_board import CLASSIFIER, DETECTOR
from jaxinfer.elastic import Dataset, Service
from jaxinfer.experts import System
from jaxinfer.models import ResNet, ViT, WeightFormat, Yolo
from jaxinfer.models.config import ResNetConfig, ViTConfig, YoloConfig
from jaxinfer.models.files.loading import save_model
from jaxinfer.models.presets import vision_preset
from jaxinfer.models.vision.image_files import fitted, read_image

PIXELS, IMAGES = 224, 8
"""Height and width of an image, and images of a request."""
CONCURRENCY = 4
"""Requests at a time."""
TYPES = 3
"""Types of components, of which the first goes on to a detector."""
CANDIDATES = 20
"""Boxes of an image that the detector's confidence lets through, of which some overlap: as many as a trained one finds.
Random weights find 300 in any image."""
LATENCY = 600.0
"""Seconds that a query has: none is shed."""


class Load(NamedTuple):
    """The size of a measurement: requests of a round, and rounds."""

    requests: int
    rounds: int


FULL, QUICK = Load(requests=40, rounds=9), Load(requests=4, rounds=1)


class Sides(NamedTuple):
    """The two ways to do the same work, each from the number of a request.

    Attributes:
      body: makes a request's body for the server.
      direct: does the work of a request in this process, and waits for it.
    """

    body: Callable[[int], dict[str, Any]]
    direct: Callable[[int], None]


def experts_over_http(folder: Path, load: Load) -> dict[str, Any]:
    """Measure a system of experts; returns inputs a second of both sides, and their ratio.

    folder: where the experts are made, if they are not there.
    """
    board = make_board(folder)
    tables = f'[experts.board]\nconfig = "{board.relative_to(folder)}"\n'
    photos = jpegs()
    with System.from_config(board) as system:

        def direct(number: int) -> None:
            kind = f"type-{number % TYPES}"
            _wait([system.submit(kind, system.load_image(kind, read_image(photo))) for photo in _some(photos, number)])

        def body(number: int) -> dict[str, Any]:
            kind = f"type-{number % TYPES}"
            return {"inputs": [{"kind": kind, "image": _base64(photo)} for photo in _some(photos, number)]}

        return compare(folder / "experts-serve.toml", tables, "/v1/experts/infer", Sides(body, direct), load)


def elastic_over_http(folder: Path, load: Load) -> dict[str, Any]:
    """Measure an elastic service at level 0, so that both sides do the same; returns as `experts_over_http`."""
    model = make_service(folder)
    tables = f'[elastic.vit]\npath = "{model.relative_to(folder)}"\nmerge_levels = []\nmax_batch = 8\n'
    photos = jpegs()
    with Service.from_checkpoint(model, merge_levels=[], max_batch=8) as service:
        service.measure_latency()
        service.start()
        fit = functools.partial(fitted, size=service.config.image_size, cfg=service.config.preprocessing)

        def direct(number: int) -> None:
            images = (fit(read_image(photo)) for photo in _some(photos, number))
            _wait([service.submit(image, "noise", deadline=LATENCY) for image in images])

        def body(number: int) -> dict[str, Any]:
            images = [_base64(photo) for photo in _some(photos, number)]
            return {"task": "noise", "images": images, "latency": LATENCY}

        return compare(folder / "elastic-serve.toml", tables, "/v1/elastic/query", Sides(body, direct), load)


def compare(config: Path, tables: str, path: str, sides: Sides, load: Load) -> dict[str, Any]:
    """Start a server, and have both sides do the same work in turns.

    Args:
      config: the server's file, which is written.
      tables: its tables.
      path: the endpoint.
      sides: the work.
      load: how much of it.
    """
    port, served, direct = free_port(), list[float](), list[float]()
    config.write_text(f"port = {port}\n{tables}")
    command = [sys.executable, "-m", "jaxinfer", "serve", str(config)]
    with Server("jaxinfer", command, JAXINFER_PROGRESS="0") as server:
        server.port = port
        server.wait()
        url = f"http://127.0.0.1:{server.port}{path}"
        contents = [json.dumps(sides.body(number)).encode() for number in range(load.requests)]
        asyncio.run(_ask(url, contents))  # warm
        _call(sides.direct, load.requests)
        own, cpu = psutil.Process(), {"server": 0.0, "direct": 0.0}

        def ask() -> None:
            before = server.cpu()
            served.append(load.requests * IMAGES / asyncio.run(_ask(url, contents)))
            cpu["server"] += (server.cpu() - before).total

        def call() -> None:
            before = sum(own.cpu_times()[:2])
            direct.append(load.requests * IMAGES / _call(sides.direct, load.requests))
            cpu["direct"] += sum(own.cpu_times()[:2]) - before

        for number in range(load.rounds):
            for measure in (ask, call) if number % 2 else (call, ask):
                measure()
    inputs = load.rounds * load.requests * IMAGES
    ratios = [a / b for a, b in zip(served, direct, strict=True)]
    return {
        "http_inputs_per_s": round(statistics.median(served), 2),
        "direct_inputs_per_s": round(statistics.median(direct), 2),
        "ratio": round(statistics.median(ratios), 4),
        "server_cpu_ms_per_input": round(1e3 * cpu["server"] / inputs, 3),
        "direct_cpu_ms_per_input": round(1e3 * cpu["direct"] / inputs, 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "requests": load.requests,
        "images": IMAGES,
        "concurrency": CONCURRENCY,
    }


async def _ask(url: str, contents: Sequence[bytes]) -> float:
    """Send requests, some at a time; returns the seconds until all are answered."""
    waiting = iter(contents)
    async with httpx2.AsyncClient(timeout=600, trust_env=False) as client:

        async def send() -> None:
            for content in waiting:
                answer = await client.post(url, content=content)
                answer.raise_for_status()
                if any("error" in result for result in answer.json()["results"]):
                    raise RuntimeError(f"{url}: {answer.text[:500]}")

        begun = time.perf_counter()
        await asyncio.gather(*(send() for _ in range(CONCURRENCY)))
        return time.perf_counter() - begun


def _call(work: Callable[[int], None], requests: int) -> float:
    """Do the work of requests in threads; returns the seconds until all is done."""
    with ThreadPoolExecutor(CONCURRENCY) as threads:
        begun = time.perf_counter()
        for done in [threads.submit(work, number) for number in range(requests)]:
            done.result()
        return time.perf_counter() - begun


def _wait(futures: Sequence[Future[Any]]) -> None:
    for future in futures:
        future.result()


# What is sent


@functools.cache
def jpegs(count: int = 32) -> list[bytes]:
    """Draw images and encode them, as cameras do."""
    rng, made = np.random.default_rng(0), list[bytes]()
    for _ in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (14, 14, 3), np.uint8)).resize((PIXELS, PIXELS))
        noisy = np.asarray(coarse, int) + rng.normal(0, 6, (PIXELS, PIXELS, 3)).astype(int)
        file = io.BytesIO()
        Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
        made.append(file.getvalue())
    return made


def _some(photos: Sequence[bytes], number: int) -> list[bytes]:
    """The images of a request."""
    return [photos[(number * IMAGES + place) % len(photos)] for place in range(IMAGES)]


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


# What serves


def make_board(folder: Path) -> Path:
    """Write the circuit board's experts for images of 224 pixels, which all fit, and their file; returns the file."""
    board, sizes = folder / f"board-{CANDIDATES}", {"image_size": PIXELS}
    for number in range(TYPES):
        if not (path := board / f"type-{number}").exists():
            cfg = dataclasses.replace(CLASSIFIER, **sizes)
            assert isinstance(cfg, ResNetConfig)
            model = ResNet(cfg, WeightFormat(), rngs=nnx.Rngs(number))
            assert model.head.bias is not None
            model.head.weight[...] = jnp.zeros_like(model.head.weight[...])
            model.head.bias[...] = jnp.array([10.0, -10.0])  # all are ok
            save_model(path, model, family="resnet")
    if not (path := board / "detector").exists():
        save_model(path, make_detector(dataclasses.replace(DETECTOR, **sizes)), family="yolo")
    tables = ["max_batch = 8", '[[executors]]\nexpert_memory = "1GiB"', '[experts.detector]\ncheckpoint = "detector"']
    for kind in (f"type-{number}" for number in range(TYPES)):
        tables.append(f'[experts.{kind}]\ncheckpoint = "{kind}"\n[[inputs]]\nkind = "{kind}"\nexpert = "{kind}"')
    tables.append('[[rules]]\nexpert = "type-0"\nverdict = "ok"\nnext = "detector"\nprobability = 1.0')
    (board / "board.toml").write_text("\n".join(tables) + "\n")
    return board / "board.toml"


def make_detector(cfg: YoloConfig) -> Yolo:
    """Make a detector whose confidence lets few candidates through."""
    model = Yolo(cfg, WeightFormat(), rngs=nnx.Rngs(9))
    candidates = np.asarray(model.predictions(jnp.array([read_image(photo) for photo in jpegs()])))
    scores = np.sort(candidates[..., 4] * candidates[..., 5:].max(-1))
    model.cfg = dataclasses.replace(cfg, confidence=float(np.median(scores[:, -CANDIDATES])))
    return model


def make_service(folder: Path) -> Path:
    """Write a ViT-Ti/16 and register a task of noise; returns the model directory."""
    model = folder / "vit"
    if not model.exists():
        cfg = vision_preset("vit-ti", labels=("any",), image_size=PIXELS)
        assert isinstance(cfg, ViTConfig)
        save_model(model, ViT(cfg, WeightFormat(), rngs=nnx.Rngs(0)), family="vit")
    if not (model / "tasks" / "noise").exists():
        images = np.random.default_rng(0).integers(0, 256, (24, PIXELS, PIXELS, 3), np.uint8)
        dataset = Dataset(images, np.arange(24) % 2, ("one", "other"))
        with Service.from_checkpoint(model, merge_levels=[], max_batch=8) as service:
            service.register_task("noise", dataset)
    return model
