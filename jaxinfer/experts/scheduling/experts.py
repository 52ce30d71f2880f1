"""The experts of a system, and which one follows which."""

import dataclasses
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

from jaxinfer.experts.errors import ConfigError, RoutingError
from jaxinfer.fields import AtLeast1, NotNegative, Share, check_fields

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertInfo:
    """The scheduler's description of an expert.

    Attributes:
      name: its unique name.
      architecture: its architecture; experts of one architecture cost the same (paper section 4.5).
      bytes: bytes of its weights on a device, or on each one of a mesh.
      pinned: whether it stays once it is loaded.
    """

    name: str
    architecture: str
    bytes: AtLeast1
    pinned: bool = False

    def __post_init__(self) -> None:
        check_fields(self, where=f"experts.{self.name}", error=ConfigError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule: the expert that follows a verdict.

    Attributes:
      expert: the expert that has judged.
      verdict: its verdict.
      next: the expert that gets the input next.
      probability: share of this verdict among the expert's; None: an equal part of the rest.
    """

    expert: str
    verdict: str
    next: str
    probability: Share | None = None

    def __post_init__(self) -> None:
        check_fields(self, where=f"rules.{self.expert}.{self.verdict}", error=ConfigError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputKind:
    """Inputs that begin with the same expert.

    Attributes:
      name: the kind's name, such as a component's type.
      expert: the first expert.
      share: relative frequency, in any unit; None: an equal part of the rest.
    """

    name: str
    expert: str
    share: NotNegative | None = None

    def __post_init__(self) -> None:
        check_fields(self, where=f"inputs.{self.name}", error=ConfigError)


class ExpertGraph:
    """Experts, inputs and rules, checked: no unknown expert, no cycle, valid probabilities.

    Attributes:
      experts: the experts by name.
      usage: share of all inputs that reaches each expert, in [0, 1].
      predecessors: the experts before each. One without any is preliminary, the others subsequent (paper section 2.1).
      successors: the experts after each.
    """

    def __init__(
        self,
        experts: Iterable[ExpertInfo],
        inputs: Iterable[InputKind],
        rules: Iterable[Rule] = (),
        *,
        usage: Mapping[str, float] | None = None,
    ):
        experts, inputs, rules = list(experts), list(inputs), list(rules)
        self.experts = {expert.name: expert for expert in experts}
        self._inputs = {kind.name: kind for kind in inputs}
        _require_unique("expert", [expert.name for expert in experts])
        _require_unique("input", [kind.name for kind in inputs])
        _require_unique("rule", [(rule.expert, rule.verdict) for rule in rules])
        if not self.experts:
            raise ConfigError("there are no experts.")
        for kind in inputs:
            self._require_expert(kind.expert, f"input {kind.name!r}")
        for rule in rules:
            for name in (rule.expert, rule.next):
                self._require_expert(name, f"rule {rule.expert!r} with verdict {rule.verdict!r}")
        self._rules = {(rule.expert, rule.verdict): rule for rule in _with_probabilities(rules)}
        self.predecessors = {name: frozenset(r.expert for r in rules if r.next == name) for name in self.experts}
        self.successors = {name: frozenset(r.next for r in rules if r.expert == name) for name in self.experts}
        self._order = self._topological_order()
        self.usage = self._usage(usage or {})

    def first(self, kind: str) -> str:
        """The first expert of inputs of this kind. Raises RoutingError."""
        if kind not in self._inputs:
            raise RoutingError(f"unknown kind of input {kind!r}; known: {_some(self._inputs)}.")
        return self._inputs[kind].expert

    def next(self, expert: str, verdict: str) -> str | None:
        """The expert that follows a verdict; None: the verdict is the result."""
        rule = self._rules.get((expert, verdict))
        return None if rule is None else rule.next

    @cached_property
    def shares(self) -> dict[str, float]:
        """The share of each kind among all inputs."""
        return dict(zip(self._inputs, _shares(list(self._inputs.values())), strict=True))

    def rules_of(self, expert: str) -> list[Rule]:
        """The rules that follow an expert."""
        return [rule for rule in self._rules.values() if rule.expert == expert]

    def require(self, name: str) -> ExpertInfo:
        """The expert. Raises RoutingError if the name is unknown."""
        if name not in self.experts:
            raise RoutingError(f"there is no expert {name!r}; known: {_some(self.experts)}.")
        return self.experts[name]

    @cached_property
    def by_usage(self) -> list[str]:
        """All experts, the most used first; ties by name."""
        return sorted(self.experts, key=lambda name: (-self.usage[name], name))

    def _require_expert(self, name: str, where: str) -> None:
        if name not in self.experts:
            raise RoutingError(f"{where} leads to {name!r}, which is no expert; known: {_some(self.experts)}.")

    def _topological_order(self) -> list[str]:
        try:
            return list(TopologicalSorter(self.predecessors).static_order())
        except CycleError as error:
            cycle = " -> ".join(error.args[1])
            raise ConfigError(f"the rules make a cycle: {cycle}; an input would never have a result.") from error

    def _usage(self, given: Mapping[str, float]) -> dict[str, float]:
        """Compute each expert's usage: inputs by their shares, passed on along the rules (paper section 4.5).

        Args:
          given: the usage of experts for which it is known.
        """
        for name, value in given.items():
            self.require(name)
            if not math.isfinite(value) or value < 0:
                raise ConfigError(f"the usage of expert {name!r} must be at least 0, got {value}.")
        usage = dict.fromkeys(self.experts, 0.0)
        for kind, share in self.shares.items():
            usage[self._inputs[kind].expert] += share
        for name in self._order:
            usage[name] = given.get(name, usage[name])
            for rule in self.rules_of(name):
                assert rule.probability is not None, "see _with_probabilities"
                usage[rule.next] += usage[name] * rule.probability
        return usage


def _with_probabilities(rules: list[Rule]) -> list[Rule]:
    """Fill in the rules' probabilities: rules without one share the rest of their expert's."""
    left, without = defaultdict[str, float](lambda: 1.0), Counter[str]()
    for rule in rules:
        if rule.probability is None:
            without[rule.expert] += 1
        else:
            left[rule.expert] -= rule.probability
    for name, rest in left.items():
        if rest < -1e-6:
            raise ConfigError(f"the probabilities of {name!r}'s verdicts are more than 1 together.")
    return [
        dataclasses.replace(rule, probability=max(left[rule.expert], 0.0) / without[rule.expert])
        if rule.probability is None
        else rule
        for rule in rules
    ]


def _shares(inputs: list[InputKind]) -> list[float]:
    """Scale the kinds' shares to a sum of 1, with a warning if they differ from it."""
    given = [kind.share for kind in inputs]
    known = [share for share in given if share is not None]
    unknown = len(given) - len(known)
    if not unknown and not any(known):
        return [1 / len(inputs) for _ in inputs]
    rest = max(1 - sum(known), 0.0) / unknown if unknown else 0.0
    shares = [rest if share is None else share for share in given]
    total = sum(shares)
    if abs(total - 1) > 1e-6:
        log.warning("The inputs' shares are %g together; they are taken as parts of that.", total)
    return [share / total for share in shares]


def _require_unique(what: str, names: list) -> None:
    seen = set()
    for name in names:
        if name in seen:
            raise ConfigError(f"there are two of {what} {name!r}; names must be unique.")
        seen.add(name)


def _some(names: Iterable[str], limit: int = 8) -> str:
    """Join some of the names, for an error."""
    names = sorted(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "") or "none"
