"""The paper's four tasks: images of circuit boards' components, each for the expert of its type.

A board has more types than a task's images show. 65 switches with about 35 experts in memory need a task that touches
about a hundred of them, so that many are active here, by a law under which the first few are used most.
"""

import dataclasses
import random
from collections import deque
from collections.abc import Iterable, Mapping

from benchmarks.coserve.machines import ARCHITECTURES
from jaxinfer.evaluation.experts.workloads import TraceRequest
from jaxinfer.experts.scheduling.experts import ExpertGraph, ExpertInfo, InputKind, Rule

ACTIVE, OFFSET = 100, 20
"""Number of active types, and the offset in their weights: type i has a weight of 1 / (i + OFFSET)."""
DETECTORS = ("yolov5m",) * 4 + ("yolov5l",) * 4
WITH_DETECTOR, WELL = 0.10, 0.97
"""Share of types whose images go on to a detector, and share of these images that do: those without a defect."""
RECENT = 20
INTERVAL = 0.004
"""Seconds between images."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A board's images.

    Attributes:
      gpus: number of GPU executors that the paper found fastest, together with one on the CPU.
      active: number of active types.
    """

    name: str
    images: int
    gpus: int
    active: int = ACTIVE

    @property
    def board(self) -> str:
        return self.name[0]


TASKS = (
    Task(name="A1", images=2500, gpus=3),
    Task(name="A2", images=3500, gpus=3),
    Task(name="B1", images=2500, gpus=4),
    Task(name="B2", images=3500, gpus=4),
)


def make_task(task: Task, seed: int, *, repeats: float = 0.0) -> tuple[ExpertGraph, list[TraceRequest]]:
    """Make the experts and the images.

    Args:
      task: the task.
      seed: draws the types with detectors, and the images.
      repeats: share of images whose type is that of one of the last `RECENT`: locality in time.
    """
    rng = random.Random(f"{task.board}{seed}")
    types = [f"type{place:03}" for place in range(task.active)]
    experts = [expert(name, "resnet101") for name in types]
    detectors = [expert(f"detector{place}", architecture) for place, architecture in enumerate(DETECTORS)]
    weights = [1 / (place + OFFSET) for place in range(task.active)]
    follows = {name: rng.choice(detectors).name for name in rng.sample(types, round(WITH_DETECTOR * task.active))}
    graph = make_graph(experts + detectors, dict(zip(types, weights, strict=True)), follows, well=WELL)
    rng = random.Random(f"{task.name}{seed}")
    trace, recent = list[TraceRequest](), deque[str](maxlen=RECENT)
    for place in range(task.images):
        again = place and rng.random() < repeats
        (name,) = [rng.choice(recent)] if again else rng.choices(types, weights)
        recent.append(name)
        goes_on = name in follows and rng.random() < WELL
        trace.append(TraceRequest(arrival=place * INTERVAL, experts=(name, follows[name]) if goes_on else (name,)))
    return graph, trace


def make_graph(
    experts: Iterable[ExpertInfo], weights: Mapping[str, float], follows: Mapping[str, str], *, well: float = 1.0
) -> ExpertGraph:
    """Make the graph of a board.

    Args:
      experts: the experts of the types, and the detectors.
      weights: the weight of each type among the inputs.
      follows: the detectors of the types that have one.
      well: share of a type's inputs that go on to its detector.
    """
    total = sum(weights.values())
    return ExpertGraph(
        experts,
        [InputKind(name=name, expert=name, share=weight / total) for name, weight in weights.items()],
        [Rule(expert=name, verdict="ok", next=next_, probability=well) for name, next_ in follows.items()],
    )


def expert(name: str, architecture: str) -> ExpertInfo:
    return ExpertInfo(name=name, architecture=architecture, bytes=ARCHITECTURES[architecture].bytes)
