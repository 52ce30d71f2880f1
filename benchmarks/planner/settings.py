"""The settings of all parts of the benchmark: models, and the cells in which they are measured."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.kv_tier.settings import make_config
from benchmarks.random_models import save_random
from benchmarks.report import ROOT
from jaxinfer.evaluation.generation.replay import TokenRequest
from jaxinfer.evaluation.serving.arrivals import TracedRequest, at_rate, poisson, read_arrivals

LAYERS, WIDTH = 8, 512
"""Of the model of random weights, which has 39M parameters."""
CONTEXT = 512
SPREAD = 0.5
"""Lengths are drawn uniformly from 1 - SPREAD to 1 + SPREAD times their mean."""
FEW_PAGES, HOST_KV = 16 << 20, 256 << 20
"""Bytes for pages of an engine with a host tier: the device has room for 125 pages of the demo model."""
TOKENS = 250
"""Token ids of prompts, which every model has."""
AT_ONCE = "at once"
NEAR_SATURATION = 0.95


class Settings(NamedTuple):
    """Options of the command.

    Attributes:
      quick: a smoke test: few cells, short runs.
      folder: folder of the model of random weights.
      aisimulate_python: interpreter with AISimulate.
    """

    quick: bool
    folder: Path
    aisimulate_python: Path = ROOT / ".venv-aisimulate/bin/python"

    @property
    def seconds(self) -> float:
        """Seconds in which the requests of a cell arrive."""
        return 1.0 if self.quick else 3.0

    @property
    def rounds(self) -> int:
        """How often a cell is run."""
        return 1 if self.quick else 3

    @property
    def engines(self) -> "tuple[EngineCells, ...]":
        """The engines, each with its cells."""
        return (ENGINES[0]._replace(groups=ENGINES[0].groups[:1]),) if self.quick else ENGINES

    def model(self, name: str) -> Path:
        """The directory of a model, written if it is of random weights and does not exist."""
        if name != "random":
            return ROOT / "examples" / f"{name}_model"
        folder = self.folder / f"planner-{LAYERS}x{WIDTH}"
        if not folder.exists():
            save_random(folder, make_config(LAYERS, WIDTH))
        return folder


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Mean tokens of prompts and outputs."""

    prompt: int
    output: int

    def draw(self, rng: np.random.Generator) -> tuple[int, int]:
        """Draw the lengths of one request; each has two tokens at least."""
        prompt, output = (
            max(2, round(mean * rng.uniform(1 - SPREAD, 1 + SPREAD))) for mean in (self.prompt, self.output)
        )
        return prompt, output


@dataclasses.dataclass(frozen=True)
class Load:
    """Requests of a cell.

    Attributes:
      lengths: of its requests.
      arrivals: "poisson", a trace of `benchmarks/data`, or all at once.
      load: the rate as a share of the capacity.
      shared: the share of a mean prompt with which prompts begin.
      documents: how many such beginnings there are.
    """

    lengths: Lengths
    arrivals: str = AT_ONCE
    load: float = 1.0
    shared: float = 0.0
    documents: int = 1

    def __str__(self) -> str:
        """What a table calls it."""
        rate = "" if self.arrivals == AT_ONCE else f" at {self.load:.0%}"
        shared = f", {self.shared:.0%} shared" if self.shared else ""
        shared += f" in {self.documents} ways" if self.documents > 1 else ""
        return f"{self.lengths.prompt} + {self.lengths.output} tokens, {self.arrivals}{rate}{shared}"

    def requests(self, count: int, capacity: float, rng: np.random.Generator) -> list[TokenRequest]:
        """Draw requests. capacity: requests a second."""
        beginnings = rng.integers(1, TOKENS, (self.documents, round(self.shared * self.lengths.prompt))).tolist()
        made = []
        for item in self._arrivals(count, self.load * capacity, rng):
            beginning = beginnings[rng.integers(self.documents)]
            prompt, output = self.lengths.draw(rng)
            own = rng.integers(1, TOKENS, max(2, prompt - len(beginning))).tolist()
            made.append(TokenRequest(arrival=item.arrival, prompt=beginning + own, output_tokens=output))
        return made

    def _arrivals(self, count: int, rate: float, rng: np.random.Generator) -> list[TracedRequest]:
        if self.arrivals == AT_ONCE:
            return [TracedRequest(arrival=0.0)] * count
        if self.arrivals == "poisson":
            return poisson(rate, count, rng)
        items = read_arrivals(ROOT / "benchmarks" / "data" / f"azure_llm_2023_{self.arrivals}.txt.gz")
        first = int(rng.integers(len(items) - count))
        return at_rate(items[first : first + count], rate)


class EngineCells(NamedTuple):
    """An engine, and the loads of each group: those of equal lengths, for which it is calibrated.

    Attributes:
      model: `demo`, `moe_demo` or `random`.
      batch: requests that run at once.
      groups: the loads by their lengths.
      tiered: whether the device has few pages, and the host's memory many.
    """

    model: str
    batch: int
    groups: tuple[tuple[Load, ...], ...]
    tiered: bool = False

    def __str__(self) -> str:
        """What a table calls it."""
        return f"{self.model}, batch {self.batch}{', pages on the host' if self.tiered else ''}"

    @property
    def options(self) -> dict[str, Any]:
        """The options of `LLM`."""
        tier = {"cache_bytes": FEW_PAGES, "host_kv": HOST_KV} if self.tiered else {}
        return {"max_batch": self.batch, "context": CONTEXT, **tier}


def _groups(*lengths: Lengths, traces: tuple[str, ...]) -> tuple[tuple[Load, ...], ...]:
    """Make three loads for each of these lengths: quiet, of a trace with shared beginnings, near saturation."""
    return tuple(
        (
            Load(each, "poisson", 0.4),
            Load(each, trace, 0.6, 0.5),
            Load(each, "poisson", NEAR_SATURATION),
        )
        for each, trace in zip(lengths, itertools.cycle(traces))
    )


TIERED = Load(Lengths(300, 20), "poisson", 0.4, shared=0.8, documents=16)
"""Its beginnings have 240 pages."""
ENGINES = (
    EngineCells("demo", 8, _groups(Lengths(100, 60), Lengths(300, 40), traces=("conv", "code"))),
    EngineCells("demo", 32, _groups(Lengths(100, 60), traces=("code",))),
    EngineCells("moe_demo", 8, _groups(Lengths(100, 60), Lengths(200, 30), traces=("conv", "code"))),
    EngineCells("demo", 8, ((TIERED, dataclasses.replace(TIERED, load=0.8)),), tiered=True),
    EngineCells("random", 8, _groups(Lengths(60, 40), Lengths(200, 20), traces=("code", "conv"))),
)
