"""Traces of inputs: their arrivals and experts; drawn from a config's expectations, or read from a file."""

import dataclasses
import os

import numpy as np

from jaxinfer.evaluation import traces
from jaxinfer.experts.errors import ConfigError
from jaxinfer.experts.scheduling.experts import ExpertGraph


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceRequest:
    """An input of a trace.

    Attributes:
      arrival: in seconds from the start, not before the previous input's.
      experts: the experts that judge it, one after the other: their verdicts are known.
    """

    arrival: float
    experts: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.experts:
            raise ConfigError("an input needs an expert.")


def draw_kinds(graph: ExpertGraph, count: int, *, seed: int = 0) -> list[str]:
    """Draw kinds of inputs by their shares."""
    kinds, shares = list(graph.shares), np.array(list(graph.shares.values()))
    return [kinds[place] for place in np.random.default_rng(seed).choice(len(kinds), count, p=shares / shares.sum())]


def draw_trace(graph: ExpertGraph, count: int, *, interval: float = 0.0, seed: int = 0) -> list[TraceRequest]:
    """Draw inputs, kinds by their shares and verdicts by the rules' probabilities.

    Equal seeds give equal traces, and the kinds of `draw_kinds`.

    Args:
      count: number of inputs.
      interval: seconds between their arrivals.
    """
    if not interval >= 0:
        raise ConfigError(f"interval must be at least 0 s, got {interval}.")
    rng = np.random.default_rng((seed, 1))
    return [
        TraceRequest(arrival=place * interval, experts=_draw_route(graph, graph.first(kind), rng))
        for place, kind in enumerate(draw_kinds(graph, count, seed=seed))
    ]


def _draw_route(graph: ExpertGraph, first: str, rng: np.random.Generator) -> tuple[str, ...]:
    """Draw the experts that judge an input."""
    route = [first]
    while rules := graph.rules_of(route[-1]):
        bounds = np.cumsum(np.array([rule.probability for rule in rules], float))
        place = int(np.searchsorted(bounds, rng.random(), side="right"))
        if place == len(rules):
            break
        route.append(rules[place].next)
    return tuple(route)


def read_trace(file: str | os.PathLike[str], graph: ExpertGraph) -> list[TraceRequest]:
    """Read a trace of inputs (see `evaluation.traces`).

    Raises ValueError that names file and line, RoutingError for experts that are not in the graph.
    """
    trace = traces.read_trace(file, TraceRequest, name="an input")
    for name in {name: None for item in trace for name in item.experts}:
        graph.require(name)
    return trace
