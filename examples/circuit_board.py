"""Inspect circuit boards with many small experts in little memory: CoServe's example (arXiv:2503.02354), scaled.

    python examples/circuit_board.py --types 24 --images 600

Each type of component has a classifier, which says "ok" or "defect". After "ok", some types go on to a detector, shared
by the types of a group, which looks for scratches and solder bridges. A third of the experts fit into memory.

The images are drawn and the experts are made from them, so that verdicts mean something: the classifiers' trunks are
random and calibrated, their heads a ridge regression; the detectors are trained. That takes minutes on the first run;
the experts are kept in `--folder`, half a gigabyte of them, and after Ctrl-C the next run makes the rest. Then the same
images go through the line twice: by CoServe with all our additions ("best"), and in the order of arrival ("samba").
"""

import argparse
import contextlib
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table

from jaxinfer.compiled.interruptible import interruptible
from jaxinfer.disk_cache import cache_folder
from jaxinfer.experts.execution.kinds import NOTHING
from jaxinfer.experts.results import Result
from jaxinfer.experts.scheduling.executor_state import ExpertStatistics
from jaxinfer.experts.system import System
from jaxinfer.models import WeightFormat
from jaxinfer.models.config import STRIDES, ResNetConfig, YoloConfig
from jaxinfer.models.files.loading import save_model
from jaxinfer.models.layers.convolution import Conv
from jaxinfer.models.presets import parameter_count
from jaxinfer.models.vision.resnet import ResNet
from jaxinfer.models.vision.yolo import Yolo
from jaxinfer.progress import LongWork, long_work

SIZE = 64
"""Height and width of an image in pixels."""

CLASSIFIER = ResNetConfig(
    labels=("ok", "defect"), widths=(64, 128, 256), depths=(1, 1, 2), bottleneck=False, image_size=SIZE
)
DETECTOR = YoloConfig(
    labels=("scratch", "bridge"), widths=(8, 16, 32, 64, 128), depths=(1, 1, 1, 1), image_size=3 * SIZE // 2
)

# --- drawings -----------------------------------------------------------------------------------------------------

SOLDER, SILK, BLACK, BOARD = (190, 195, 200), (225, 225, 215), (35, 35, 40), (30, 95, 55)
HUES = ((200, 60, 40), (60, 90, 200), (220, 180, 60), (150, 90, 170), (90, 60, 40), (230, 230, 225), (40, 150, 140))
FAULTS = ("missing", "shifted", "skewed", "turned")
FAULTY, MARKED = 0.3, 0.3
"""Shares of components with a fault, and of images with a scratch or a bridge."""

Grid = tuple[np.ndarray, np.ndarray]
"""x and y of all pixels, in the coordinates of a part."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A rectangle, or an ellipse if `round`; in pixels from a component's middle."""

    x: float
    y: float
    width: float
    height: float
    colour: tuple[int, ...]
    round: bool = False

    def paint(self, image: np.ndarray, grid: Grid) -> None:
        across, down = 2 * (grid[0] - self.x) / self.width, 2 * (grid[1] - self.y) / self.height
        distance = np.hypot(across, down) if self.round else np.maximum(abs(across), abs(down))
        cover = np.clip(0.5 + (1 - distance) * min(self.width, self.height) / 2, 0, 1)[..., None]
        image += cover * (np.array(self.colour) - image)


def resistor(rng: np.random.Generator) -> list[Part]:
    height, colours = rng.uniform(12, 18), rng.permutation(HUES)
    bands = [Part(x, 0, 3, height, tuple(colour)) for x, colour in zip((-9, -3, 3), colours[1:], strict=False)]
    return [Part(0, 0, 30, height, tuple(colours[0])), *bands]


def capacitor(rng: np.random.Generator) -> list[Part]:
    width = rng.uniform(22, 30)
    return [Part(0, 0, width, width, HUES[rng.integers(len(HUES))], round=True), Part(8, 0, 4, width / 2, SILK)]


def diode(rng: np.random.Generator) -> list[Part]:
    height = rng.uniform(12, 18)
    return [Part(0, 0, rng.uniform(26, 32), height, BLACK), Part(8, 0, 4, height, HUES[rng.integers(len(HUES))])]


def led(rng: np.random.Generator) -> list[Part]:
    width = rng.uniform(20, 26)
    lens = Part(0, 0, 0.6 * width, 0.6 * width, HUES[rng.integers(len(HUES))], round=True)
    return [Part(0, 0, width + 6, width, SILK), lens, Part(width / 2, -width / 3, 5, 5, BLACK)]


def chip(rng: np.random.Generator) -> list[Part]:
    width, height = rng.uniform(24, 34), rng.uniform(18, 24)
    rows = np.linspace(-width / 2 + 4, width / 2 - 4, rng.integers(3, 6))
    pins = [Part(x, side * (height / 2 + 2), 3, 5, SOLDER) for x in rows for side in (-1, 1)]
    return [*pins, Part(0, 0, width, height, BLACK), Part(5 - width / 2, 5 - height / 2, 4, 4, SILK, round=True)]


def connector(rng: np.random.Generator) -> list[Part]:
    width, height = rng.uniform(28, 36), rng.uniform(12, 18)
    holes = [Part(x, -2, 4, 4, SOLDER) for x in np.linspace(-width / 2 + 5, width / 2 - 5, rng.integers(3, 6))]
    return [Part(0, 0, width, height, HUES[rng.integers(len(HUES))]), *holes, Part(0, height / 2 - 2, 8, 4, BLACK)]


Families = tuple[Callable[[np.random.Generator], list[Part]], ...]
FAMILIES: Families = (resistor, capacitor, diode, led, chip, connector)
GROUPS: dict[str, Families] = {"passives": (resistor, capacitor), "diodes": (diode, led), "packages": (chip, connector)}
"""The families that share a detector."""


def detector_of(group: str) -> str:
    return f"{group}-detector"


@dataclasses.dataclass(frozen=True)
class Component:
    """A type of component: the `number`-th of its family."""

    family: Callable[[np.random.Generator], list[Part]]
    number: int

    @property
    def name(self) -> str:
        return f"{self.family.__name__}-{self.number}"

    @property
    def detector(self) -> str | None:
        """The detector after its classifier, which every other type has."""
        groups = [name for name, families in GROUPS.items() if self.family in families]
        return detector_of(groups[0]) if self.number % 2 == 0 else None

    @property
    def seed(self) -> tuple[int, int]:
        return FAMILIES.index(self.family), self.number


def components(types: int) -> list[Component]:
    return [Component(FAMILIES[place % len(FAMILIES)], place // len(FAMILIES)) for place in range(types)]


class Drawing(NamedTuple):
    """An image with the right answers.

    Attributes:
      fault: one of `FAULTS`, or None.
      mark: one of the detectors' labels, or None.
      box: the mark's centre and size in pixels; ones without a mark.
    """

    image: np.ndarray
    fault: str | None
    mark: str | None
    box: np.ndarray


def draw(component: Component, rng: np.random.Generator, *, faulty: float = FAULTY, marked: float = MARKED) -> Drawing:
    """Draw a component on its board, with random faults."""
    fault = str(rng.choice(FAULTS)) if rng.random() < faulty else None
    mark = str(rng.choice(DETECTOR.labels)) if rng.random() < marked else None
    y, x = np.mgrid[:SIZE, :SIZE] - (SIZE - 1) / 2
    image = np.full((SIZE, SIZE, 3), BOARD, float)
    for part in (Part(-20, 0, 10, 20, SOLDER), Part(20, 0, 10, 20, SOLDER), Part(26, -14, 4, 4, SILK, round=True)):
        part.paint(image, (x, y))
    if fault != "missing":
        grid = _seen_from(x, y, *_place(fault, rng))
        for part in component.family(np.random.default_rng(component.seed)):
            part.paint(image, grid)
    box = np.ones(4)
    if mark is not None:
        part, place = _mark(mark, rng)
        part.paint(image, _seen_from(x, y, *place))
        box = _box(part, *place)
    image = image * rng.uniform(0.85, 1.15) + rng.normal(0, 6, image.shape)  # light, and the camera's noise
    return Drawing(np.clip(image, 0, 255).astype(np.uint8), fault, mark, box)


def _place(fault: str | None, rng: np.random.Generator) -> tuple[float, float, float]:
    """Draw where a component lies: x, y and its angle."""
    (x, y), angle = rng.normal(0, 1, 2), rng.normal(0, 0.03)
    if fault == "shifted":
        direction, distance = rng.uniform(0, 2 * math.pi), rng.uniform(7, 12)
        x, y = x + distance * math.cos(direction), y + distance * math.sin(direction)
    turns = {"skewed": rng.choice((-1, 1)) * rng.uniform(0.3, 0.8), "turned": math.pi}
    return x, y, angle + turns.get(fault or "", 0)


def _seen_from(x: np.ndarray, y: np.ndarray, left: float, top: float, angle: float) -> Grid:
    """Transform pixels to the coordinates of something that lies there."""
    x, y, cos, sin = x - left, y - top, math.cos(angle), math.sin(angle)
    return cos * x + sin * y, cos * y - sin * x


def _mark(mark: str, rng: np.random.Generator) -> tuple[Part, tuple[float, float, float]]:
    """Draw a scratch or a bridge, and where it lies: x, y and its angle."""
    x = rng.uniform(-12, 12)
    if mark == "scratch":
        return Part(0, 0, rng.uniform(16, 30), 2, SILK), (x, rng.uniform(-12, 12), rng.uniform(0, math.pi))
    side = 17.0 if rng.random() < 0.5 else -17.0
    return Part(0, 0, rng.uniform(10, 18), rng.uniform(6, 10), SOLDER, round=True), (x, side, 0.0)


def _box(part: Part, x: float, y: float, angle: float) -> np.ndarray:
    """Compute the box around a part that lies there: its centre and size in pixels of the image."""
    cos, sin, middle = abs(math.cos(angle)), abs(math.sin(angle)), (SIZE - 1) / 2
    size = cos * part.width + sin * part.height, sin * part.width + cos * part.height
    return np.array([x + middle, y + middle, *size])


# --- experts ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def calibrating() -> Iterator[None]:
    """Make convolutions change their weights when they run, so that outputs have mean 0 and deviation 1.

    That is batch normalisation, which the models have folded into their weights.
    """
    plain = Conv.__call__

    def normalised(conv: Conv, x: jax.Array) -> jax.Array:
        y = plain(conv, x)
        mean, deviation = y.mean((0, 1, 2)), y.std((0, 1, 2)) + 1e-3
        conv.weight[...] = conv.weight[...] / deviation
        conv.bias[...] = (conv.bias[...] - mean) / deviation
        return (y - mean) / deviation

    with mock.patch.object(Conv, "__call__", normalised):
        yield


@nnx.jit
def calibrate(model: ResNet | Yolo, images: jax.Array) -> None:
    with calibrating():
        model.predictions(images) if isinstance(model, Yolo) else model.features(images)


@nnx.jit
def features(model: ResNet, images: jax.Array) -> jax.Array:
    return model.features(images)


def fit_classifier(
    cfg: ResNetConfig, component: Component, work: LongWork, *, drawings: int, batch: int = 64
) -> ResNet:
    """Fit a head on a random trunk by ridge regression, with as many faulty drawings as good ones."""
    rng = np.random.default_rng((*component.seed, 1))
    drawn, seen = [], []
    for _ in range(drawings // batch * batch):
        drawn.append(draw(component, rng, faulty=0.5))
        work.advance()
    images = np.stack([drawing.image for drawing in drawn]).reshape(-1, batch, SIZE, SIZE, 3)
    model = ResNet(cfg, WeightFormat(), rngs=nnx.Rngs(100 * component.seed[0] + component.seed[1]))
    calibrate(model, images[0])
    for some in images:
        seen.append(np.asarray(features(model, some)))
        work.advance(batch)
    weight, bias = ridge(np.concatenate(seen), np.array([1.0 if drawing.fault else -1.0 for drawing in drawn]))
    model.head.weight[...] = jnp.stack((-weight, weight))
    model.head.bias[...] = jnp.stack((-bias, bias))  # pyright: ignore[reportOptionalSubscript]
    return model


def ridge(x: np.ndarray, y: np.ndarray, *, penalty: float = 100.0) -> tuple[np.ndarray, np.ndarray]:
    """Fit a line through [N, K] and [N], with a penalty on weights for inputs of deviation 1."""
    mean, deviation = x.mean(0), x.std(0) + 1e-6
    scaled = (x - mean) / deviation
    weight = np.linalg.solve(scaled.T @ scaled + penalty * np.eye(x.shape[1]), scaled.T @ (y - y.mean())) / deviation
    return weight, y.mean() - mean @ weight


class Marks(NamedTuple):
    """The training data of a detector.

    Attributes:
      images: uint8 [N, H, W, 3].
      labels: int [N]; -1 where there is no mark.
      boxes: float32 [N, 4], centre and size in the detector's pixels.
    """

    images: np.ndarray
    labels: np.ndarray
    boxes: np.ndarray

    @classmethod
    def draw(cls, cfg: YoloConfig, families: Families, count: int, rng: np.random.Generator, work: LongWork) -> "Marks":
        chosen = [Component(families[int(rng.integers(len(families)))], 2 * int(rng.integers(4))) for _ in range(count)]
        drawn = []
        for component in chosen:
            drawn.append(draw(component, rng, faulty=0.05, marked=0.6))
            work.advance()
        labels = [cfg.labels.index(drawing.mark) if drawing.mark else -1 for drawing in drawn]
        boxes = np.stack([drawing.box for drawing in drawn]) * (cfg.image_size / SIZE)
        return cls(np.stack([drawing.image for drawing in drawn]), np.array(labels), boxes.astype(np.float32))


def candidates(cfg: YoloConfig) -> np.ndarray:
    """Compute each candidate's cell centre, stride and anchor size, [N, 5]."""
    rows = []
    for stride, anchors in zip(STRIDES, cfg.anchors, strict=True):
        cells = (np.arange(cfg.image_size // stride) + 0.5) * stride
        rows += [(x, y, stride, *anchor) for y in cells for x in cells for anchor in anchors]
    return np.array(rows, np.float32)


def detector_loss(model: Yolo, marks: Marks) -> jax.Array:
    """Compute YOLO's loss: whether there is a mark, its class, and its box.

    Candidates near a mark and of similar size should find it.
    """
    predicted, candidate = model.predictions(jnp.asarray(marks.images)), candidates(model.cfg)
    boxes = marks.boxes[:, None]
    near = (jnp.abs(boxes[..., :2] - candidate[:, :2]) < 0.75 * candidate[:, 2:3]).all(-1)
    ratio = boxes[..., 2:] / candidate[:, 3:]
    alike = jnp.maximum(ratio, 1 / ratio).max(-1) < 4
    there = near & alike & (marks.labels[:, None] >= 0)  # [B, candidates]

    def entropy(probability: jax.Array, truth: jax.Array) -> jax.Array:
        return -jnp.log(jnp.where(truth, probability, 1 - probability) + 1e-6)

    of_class = entropy(predicted[..., 5:], jax.nn.one_hot(marks.labels, len(model.cfg.labels), dtype=bool)[:, None])
    of_box = jnp.abs(predicted[..., :4] - boxes) / model.cfg.image_size
    of_positive = jnp.where(there, of_class.sum(-1) + 2 * of_box.sum(-1), 0).sum() / jnp.maximum(there.sum(), 1)
    return entropy(predicted[..., 4], there).sum(-1).mean() + of_positive


ADAM = optax.scale_by_adam()


@functools.partial(jax.jit, static_argnums=0)
def train_step(graph: nnx.GraphDef, state: tuple[nnx.State, optax.OptState], marks: Marks, rate: float):
    params, adam = state
    gradients = jax.grad(lambda params: detector_loss(nnx.merge(graph, params), marks))(params)
    updates, adam = ADAM.update(gradients, adam)
    return jax.tree.map(lambda x, update: x - rate * update, params, updates), adam


def train(model: Yolo, marks: Marks, work: LongWork, *, steps: int, rate: float, batch: int = 32) -> Yolo:
    """Train with Adam at a rate that falls to zero; return another model."""
    graph, params = nnx.split(model)
    state, rng = (params, ADAM.init(params)), np.random.default_rng(2)
    for step in range(steps):
        chosen = rng.integers(0, len(marks.labels), batch)
        state = train_step(graph, state, Marks(*(part[chosen] for part in marks)), rate * (1 - step / steps))
        jax.block_until_ready(state)
        work.advance()
    return nnx.merge(graph, state[0])


def new_detector(cfg: YoloConfig, images: np.ndarray) -> Yolo:
    """Make a calibrated detector that is sure to see nothing."""
    model = Yolo(cfg, WeightFormat(), rngs=nnx.Rngs(0))
    calibrate(model, jnp.asarray(images))
    quiet = jnp.zeros((len(cfg.anchors[0]), 5 + len(cfg.labels))).at[:, 4].set(-4.0)
    for head in model.heads:
        head.weight[...] = 0.1 * head.weight[...]
        head.bias[...] = quiet.ravel()
    return model


# --- the board ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of everything.

    Attributes:
      drawings: number of drawings per classifier; detectors get twice as many.
      steps: training steps of the detectors' common ancestor; each detector then gets a fifth as many for its group.
    """

    types: int = 24
    images: int = 600
    drawings: int = 384
    steps: int = 200
    max_batch: int = 8
    classifier: ResNetConfig = CLASSIFIER
    detector: YoloConfig = DETECTOR


def build(folder: Path, sizes: Sizes) -> list[Component]:
    """Make the experts that are missing in the folder, and `board.toml`."""
    line = components(sizes.types)
    with long_work("fitting classifiers") as work:
        for place, component in enumerate(line, 1):
            if not (folder / component.name).exists():
                what = f"fitting classifier {place} of {len(line)}, {component.name}"
                work.update(what=what, done=0, total=2 * sizes.drawings)
                fit = functools.partial(fit_classifier, sizes.classifier, component, work, drawings=sizes.drawings)
                save_model(folder / component.name, interruptible(fit), family="resnet")
    detectors = {component.detector for component in line}
    missing = [
        group for group in GROUPS if detector_of(group) in detectors and not (folder / detector_of(group)).exists()
    ]
    if missing:
        train_detectors(folder, missing, sizes)
    (folder / "board.toml").write_text(board(line, sizes))
    return line


def train_detectors(folder: Path, groups: list[str], sizes: Sizes) -> None:
    """Train one detector for all families, and from there one for each group."""
    cfg, rng, short = sizes.detector, np.random.default_rng(3), math.ceil(sizes.steps / 5)

    def trained(model: Yolo | None, name: str, families: Families, steps: int, rate: float) -> Yolo:
        def fit() -> Yolo:
            marks = Marks.draw(cfg, families, count, rng, work)
            work.update(what=f"training {name}", done=0, total=steps)
            return train(model or new_detector(cfg, marks.images[:32]), marks, work, steps=steps, rate=rate)

        count = 2 * sizes.drawings
        with long_work(f"drawing for {name}", total=count) as work:
            return interruptible(fit)

    ancestor = trained(None, "the detectors' ancestor", FAMILIES, sizes.steps, 0.005)
    for group in groups:
        detector = trained(ancestor, detector_of(group), GROUPS[group], short, 0.002)
        save_model(folder / detector_of(group), detector, family="yolo")


def board(line: list[Component], sizes: Sizes) -> str:
    """Describe the system: two executors with room for a third of the experts, a sixth in the host's memory."""
    detectors = sorted({component.detector for component in line if component.detector})
    of_classifier, of_detector = (4 * parameter_count(cfg) for cfg in (sizes.classifier, sizes.detector))
    total = len(line) * of_classifier + len(detectors) * of_detector
    tables = [f"max_batch = {sizes.max_batch}\nhost_memory = {total // 6}"]
    tables += [f"[[executors]]\ncount = 2\nexpert_memory = {max(total // 6, of_classifier, of_detector)}"]
    tables += [f'[experts.{name}]\ncheckpoint = "{name}"' for name in (component.name for component in line)]
    tables += [f'[experts.{name}]\ncheckpoint = "{name}"\nimage_size = [{SIZE}, {SIZE}]' for name in detectors]
    for component, share in zip(line, shares(len(line)), strict=True):
        tables += [f'[[inputs]]\nkind = "{component.name}"\nexpert = "{component.name}"\nshare = {share:.6f}']
        if component.detector:
            rule = f'expert = "{component.name}"\nverdict = "ok"\nnext = "{component.detector}"'
            tables += [f"[[rules]]\n{rule}\nprobability = {1 - FAULTY}"]
    return "\n\n".join(tables) + "\n"


def shares(types: int) -> np.ndarray:
    """Compute each type's frequency: some are on the board much more often than others."""
    weights = 1 / (np.arange(types) + 5)
    return weights / weights.sum()


# --- the line -----------------------------------------------------------------------------------------------------


MODES = ("best", "samba")
GOOD = ("ok", NOTHING)
"""Verdicts on an image without defects."""


@dataclasses.dataclass
class Outcome:
    """The results of the line in one mode, as far as they are there."""

    results: list[Result] = dataclasses.field(default_factory=list)
    statistics: ExpertStatistics = dataclasses.field(default_factory=ExpertStatistics)
    seconds: float = math.nan

    @property
    def throughput(self) -> float:
        """Images per second."""
        return len(self.results) / self.seconds


def inspect(folder: Path, mode: str, inputs: list[tuple[str, np.ndarray]], outcome: Outcome) -> None:
    with System.from_config(folder / "board.toml", mode=mode) as system:
        start = time.perf_counter()
        try:
            with long_work(f"inspecting ({mode})", total=len(inputs)) as work:
                for result in system.run(inputs):
                    outcome.results.append(result)
                    outcome.seconds = time.perf_counter() - start
                    work.advance()
        finally:
            outcome.statistics = system.stats()


class Score(NamedTuple):
    """The quality of verdicts.

    Attributes:
      verdicts: number of verdicts.
      accuracy: share of right verdicts.
      caught: share of defective images with an alarm.
      false_alarms: share of other images with an alarm.
    """

    verdicts: int
    accuracy: float
    caught: float
    false_alarms: float

    @classmethod
    def from_pairs(cls, pairs: list[tuple[str, str]]) -> "Score":
        """Compute the score from pairs of verdict and truth."""

        def share(flags: list[bool]) -> float:
            return sum(flags) / len(flags) if flags else math.nan

        alarms = [(said not in GOOD, true not in GOOD) for said, true in pairs]
        return cls(
            verdicts=len(pairs),
            accuracy=share([said == true for said, true in pairs]),
            caught=share([alarm for alarm, justified in alarms if justified]),
            false_alarms=share([alarm for alarm, justified in alarms if not justified]),
        )


def scores(drawn: list[tuple[Component, Drawing]], results: list[Result]) -> dict[str, Score]:
    """Score the line as a whole, and each kind of expert on its images."""
    pairs: dict[str, list[tuple[str, str]]] = {"line": [], "classifiers": [], "detectors": []}
    for (component, drawing), result in zip(drawn, results, strict=False):  # fewer results after Ctrl-C
        of_classifier, of_detector = "defect" if drawing.fault else "ok", drawing.mark or NOTHING
        for stage in result.stages:
            if stage.expert == component.name:
                pairs["classifiers"].append((stage.judgement.verdict, of_classifier))
            else:
                pairs["detectors"].append((stage.judgement.verdict, of_detector))
        last = of_detector if component.detector and not drawing.fault else of_classifier
        pairs["line"].append((result.verdict, last))
    return {who: Score.from_pairs(some) for who, some in pairs.items()}


def accuracy_table(scored: dict[str, Score]) -> Table:
    table = Table("verdicts of", "images", "right", "defects caught", "false alarms", title="Verdicts")
    for who, score in scored.items():
        table.add_row(who, str(score.verdicts), *(f"{share:.1%}" for share in score[1:]))
    return table


def speed_table(outcomes: dict[str, Outcome]) -> Table:
    columns = ("mode", "images", "images/s", "loads", "from disk", "from host", "batches")
    table = Table(*columns, title="The line")
    for mode, outcome in outcomes.items():
        statistics = outcome.statistics
        loads = statistics.switches, statistics.loads["disk"], statistics.loads["host"]
        table.add_row(
            mode, str(len(outcome.results)), f"{outcome.throughput:.1f}", *map(str, loads), str(statistics.batches)
        )
    return table


def run(folder: Path, sizes: Sizes, console: Console) -> tuple[dict[str, Outcome], dict[str, Score]]:
    line = build(folder, sizes)
    rng = np.random.default_rng(4)
    chosen = rng.choice(np.array(line), sizes.images, p=shares(len(line)))
    drawn = [(component, draw(component, rng)) for component in chosen]
    inputs = [(component.name, drawing.image) for component, drawing in drawn]
    outcomes = {mode: Outcome() for mode in MODES}
    best, samba = outcomes.values()
    try:
        for mode, outcome in outcomes.items():
            inspect(folder, mode, inputs, outcome)
    finally:  # after Ctrl-C: what is done
        verdicts = scores(drawn, best.results)
        console.print(accuracy_table(verdicts), speed_table(outcomes))
    same = sum(a.verdict == b.verdict for a, b in zip(best.results, samba.results, strict=True))
    console.print(f"{same} of {len(inputs)} verdicts are the same in both modes.")
    console.print(f"{MODES[0]} is {best.throughput / samba.throughput:.1f} times as fast as {MODES[1]}.")
    return outcomes, verdicts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=cache_folder() / "circuit-board", help="folder of the experts")
    parser.add_argument("--types", type=int, default=Sizes.types, help="component types, each with a classifier")
    parser.add_argument("--images", type=int, default=Sizes.images)
    args = parser.parse_args()
    try:
        run(args.folder, Sizes(types=args.types, images=args.images), Console())
    except KeyboardInterrupt:
        print(f"interrupted; the experts that are finished are kept in {args.folder}", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
