"""The paper's measurements, and what the planner predicts for each."""

import dataclasses
import functools
import tomllib
from collections.abc import Iterator
from typing import Any

from benchmarks.report import ROOT
from jaxinfer.sharding.planner import Catalogue, Plan, System, Ways, Workload, predict
from jaxinfer.sharding.planner.search import FORMATS

FILE = ROOT / "benchmarks/data/deepspeed_inference.toml"
AXES = ("data", "pipeline", "expert", "tensor")
TOLERANCES = {"deepspeed-fp16": 0.10, "deepspeed-int8": 0.10, "deepspeed-moe": 0.20}
"""Largest errors of DeepSpeed's own points; those of its baselines are only reported."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """A measurement.

    Attributes:
      batch: requests of each lane.
      seconds: what was measured: of a whole batch in Fig. 6, between two tokens in Fig. 7.
    """

    figure: str
    system: str
    model: str
    device: str
    ways: Ways
    batch: int
    prompt: int
    generate: int
    seconds: float

    @property
    def label(self) -> str:
        """What the point is of."""
        devices = self.ways.size
        return f"{self.model}, {devices} GPU{'s' if devices > 1 else ''}, batch {self.batch}"

    def predicted(self, system: System) -> float:
        """What a system's constants predict, in seconds."""
        catalogue = Catalogue.read()
        made = predict(
            catalogue.model(self.model),
            catalogue.device(self.device),
            system,
            FORMATS["int8" if self.system == "deepspeed-int8" else None],
            Plan(ways=self.ways),
            Workload(batch=self.batch * self.ways.data, prompt=self.prompt, generate=self.generate),
        )
        return made.each.total if self.figure == "fig7" else made.seconds

    def error(self, system: System) -> float:
        """How far off that is, relative to what was measured."""
        return self.predicted(system) / self.seconds - 1


@functools.cache
def read() -> dict[str, Any]:
    """Read the data file."""
    return tomllib.loads(FILE.read_text())


def points(system: str) -> list[Point]:
    """Return all points of a system."""
    return [point for figure in ("fig6", "fig7") for point in _points(figure, read()[figure]) if point.system == system]


def share_within_tolerance() -> float:
    """Compute the share of DeepSpeed's own points that are predicted within their tolerances."""
    within = [
        abs(point.error(Catalogue.read().systems[name])) <= tolerance
        for name, tolerance in TOLERANCES.items()
        for point in points(name)
    ]
    return sum(within) / len(within)


def _points(figure: str, table: dict[str, Any]) -> Iterator[Point]:
    sizes = table["device"], table["prompt"], table["generate"]
    for row in table["rows"]:
        fields = dict(zip(table["columns"], row, strict=True))
        ways = Ways(**{axis: fields.pop(axis) for axis in AXES if axis in fields})
        model, batch = fields.pop("model"), fields.pop("batch")
        for system, ms in fields.items():
            yield Point(
                figure=figure,
                system=system,
                model=model,
                ways=ways,
                batch=batch,
                seconds=ms / 1e3,
                **dict(zip(("device", "prompt", "generate"), sizes, strict=True)),
            )
