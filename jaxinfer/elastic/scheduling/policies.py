"""Policies that choose the next batch and its level: OTAS exact and as printed, and others to compare with."""

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from jaxinfer.elastic.scheduling.batching import Batch, BatchingConfig
from jaxinfer.elastic.scheduling.planner import POINTS, Job, Option, PlanTimeoutError, plan_exact, plan_paper
from jaxinfer.elastic.scheduling.profile import ServingProfile

NEARLY_ALL = 0.9
"""Share of the capacity at the best level beyond which plans leave time for queries to come."""
BORNE = 0.9
"""Share of a level's capacity that `RateRule` lets queries take."""
MAX_JOBS = 40
"""Number of batches that `Elastic` plans, those with the earliest deadlines."""
LEAST_UTILITY = 1e-9
"""Utility of a batch whose time is worth more to others, and the least of a query: both run where there is time."""


class Decision(NamedTuple):
    """A choice of the next batch.

    Attributes:
      batch: the batch.
      level: the level it runs at.
      setup: seconds before it can run, such as for loading another model.
      fell_back: whether a simpler rule decided because planning took too long.
    """

    batch: Batch
    level: int
    setup: float = 0.0
    fell_back: bool = False


class Policy(Protocol):
    """The choice of a batch whenever the device becomes free.

    Attributes:
      batching: the rules by which queries share batches.
      profile: the present profile.
    """

    batching: BatchingConfig
    profile: ServingProfile

    def choose(self, batches: Sequence[Batch], start: float, rate: float) -> Decision | None:
        """Choose the next batch; return None if no batch can end in time.

        Args:
          batches: the waiting batches in the order of arrival; at least one.
          start: when the device is free.
          rate: queries a second that arrived lately.
        """
        ...

    def least_seconds(self, count: int) -> float:
        """The least seconds in which it can answer `count` queries."""
        ...

    def use(self, profile: ServingProfile) -> None:
        """Use another profile from now on, in any thread. Raises ValueError for one that it cannot use."""
        ...


def job_of(batch: Batch, profile: ServingProfile) -> Job:
    """Convert a batch to a job for planners."""
    count = len(batch)
    utilities: dict[str, float] = {}
    for query in batch.queries:
        utilities[query.task] = utilities.get(query.task, 0.0) + max(query.utility, LEAST_UTILITY)
    return Job(
        batch.deadline,
        tuple(
            Option(
                level,
                profile.batch_seconds(level, count),
                sum(utility * profile.accuracy_at(task, level) for task, utility in utilities.items()),
            )
            for level in profile.levels
        ),
    )


def highest_level(profile: ServingProfile, rate: float, share: float) -> int:
    """Find the highest level at which `share` of the capacity bears the rate, else the lowest level."""
    enough = [level for level in profile.levels if share * profile.capacity(level) >= rate]
    return max(enough, default=profile.levels[0])


def with_price(jobs: Sequence[Job], price: float) -> list[Job]:
    """Charge `price` for each second. A batch that earns nothing then keeps its best option."""
    priced = []
    for job in jobs:
        options = [option._replace(utility=option.utility - price * option.seconds) for option in job.options]
        best = max(options, key=lambda option: option.utility)
        pays = [option for option in options if option.utility > 0]
        priced.append(job._replace(options=tuple(pays or [best._replace(utility=LEAST_UTILITY)])))
    return priced


def by_deadline(batches: Sequence[Batch]) -> list[Batch]:
    """Sort batches by deadline, then by arrival."""
    return sorted(batches, key=lambda batch: (batch.deadline, batch.arrival))


class _ByProfile:
    """Base of policies that use one profile.

    Args:
      profile: the profile of the levels.
      batching: the rules by which queries share batches; None: the paper's, up to the largest size.
    """

    def __init__(self, profile: ServingProfile, batching: BatchingConfig | None = None):
        self.batching = batching or BatchingConfig(max_batch=profile.sizes[-1])
        self.use(profile)

    def least_seconds(self, count: int) -> float:
        return self.profile.fastest(count)

    def use(self, profile: ServingProfile) -> None:
        self.profile = profile


class Elastic(_ByProfile):
    """Policy that plans the levels of all batches exactly, anew each time.

    Near the device's capacity, queries to come count as well: a second then costs as much as the least valuable waiting
    query would earn in it.

    Args:
      profile: the profile of the levels.
      batching: the rules by which queries share batches; None: by worth, up to the largest size.
      time_limit: seconds that a plan may take before `LargestThatFits` decides. None: any.
    """

    def __init__(
        self,
        profile: ServingProfile,
        batching: BatchingConfig | None = None,
        *,
        time_limit: float | None = None,
    ):
        batching = batching or BatchingConfig(max_batch=profile.sizes[-1]).by_worth()
        self._time_limit = time_limit
        self._fallback = LargestThatFits(profile, batching)
        super().__init__(profile, batching)

    def use(self, profile: ServingProfile) -> None:
        super().use(profile)
        self._fallback.use(profile)
        earns = {
            n: profile.capacity(n) * sum(profile.accuracy_at(task, n) for task in profile.tasks) for n in profile.levels
        }
        self._most = profile.capacity(max(earns, key=earns.__getitem__))

    def choose(self, batches: Sequence[Batch], start: float, rate: float) -> Decision | None:
        planned = by_deadline(batches)[:MAX_JOBS]
        jobs = [job_of(batch, self.profile) for batch in planned]
        if rate > NEARLY_ALL * self._most:
            jobs = with_price(jobs, self._price(planned, jobs))
        try:
            levels = plan_exact(jobs, start, points=POINTS, time_limit=self._time_limit).levels
        except PlanTimeoutError:
            decision = self._fallback.choose(batches, start, rate)
            return None if decision is None else decision._replace(fell_back=True)
        chosen = zip(planned, levels, strict=True)
        return next((Decision(batch, level) for batch, level in chosen if level is not None), None)

    def _price(self, batches: Sequence[Batch], jobs: Sequence[Job]) -> float:
        """Compute the utility a second of full batches of the least valuable waiting queries."""
        return min(
            max(option.utility / len(batch) * self.profile.capacity(option.level) for option in job.options)
            for batch, job in zip(batches, jobs, strict=True)
        )


class FixedLevel(_ByProfile):
    """Policy with one level for all batches, earliest deadline first: PetS at level 0, ToMe below it, VPT above."""

    def __init__(self, profile: ServingProfile, level: int, batching: BatchingConfig | None = None):
        self._level = level
        super().__init__(profile, batching)

    def use(self, profile: ServingProfile) -> None:
        if self._level not in profile.levels:
            levels = ", ".join(map(str, profile.levels))
            raise ValueError(f"level {self._level} is not in the profile, which has {levels}.")
        super().use(profile)

    def choose(self, batches: Sequence[Batch], start: float, rate: float) -> Decision | None:
        del rate
        for batch in by_deadline(batches):
            if start + self.profile.batch_seconds(self._level, len(batch)) < batch.deadline:
                return Decision(batch, self._level)
        return None

    def least_seconds(self, count: int) -> float:
        return self.profile.batch_seconds(self._level, count)


class LargestThatFits(_ByProfile):
    """The slack rule: the most urgent batch at the most accurate level with which it ends in time."""

    def choose(self, batches: Sequence[Batch], start: float, rate: float) -> Decision | None:
        del rate
        for batch in by_deadline(batches):
            options = [o for o in job_of(batch, self.profile).options if start + o.seconds < batch.deadline]
            if options:
                return Decision(batch, max(options, key=lambda option: (option.utility, -option.seconds)).level)
        return None


class RateRule(_ByProfile):
    """The rule of a script: the highest level whose capacity bears the rate of arrivals, for all waiting batches.

    A level is taken to bear `BORNE` times its capacity. The most urgent batch that ends in time at the level runs.
    """

    def choose(self, batches: Sequence[Batch], start: float, rate: float) -> Decision | None:
        level = highest_level(self.profile, rate, BORNE)
        for batch in by_deadline(batches):
            if start + self.profile.batch_seconds(level, len(batch)) < batch.deadline:
                return Decision(batch, level)
        return None


class SlackFit(_ByProfile):
    """SuperServe's policy (arXiv:2312.16733): the slack of the most urgent query selects a latency, and that a tuple.

    The (level, batch size) tuples that are Pareto-optimal in seconds and accuracy fall into 16 buckets of latency.
    The slack selects a bucket; take its largest batch that the queue can fill, then the most accurate level.
    """

    def use(self, profile: ServingProfile) -> None:
        tasks = profile.tasks
        accuracy = {n: sum(profile.accuracy_at(task, n) for task in tasks) / len(tasks) for n in profile.levels}
        tuples = [(profile.seconds[n, size], size, accuracy[n], n) for n in profile.levels for size in profile.sizes]
        tuples = [
            entry
            for entry in tuples
            if not any(o != entry and o[0] <= entry[0] and o[1] >= entry[1] and o[2] >= entry[2] for o in tuples)
        ]
        least, most = min(entry[0] for entry in tuples), max(entry[0] for entry in tuples)
        self._tuples, self._width = sorted(tuples), (most - least) / 16 or 1.0
        super().use(profile)

    def choose(self, batches: Sequence[Batch], start: float, rate: float) -> Decision | None:
        del rate
        for batch in by_deadline(batches):
            slack = batch.deadline - start
            fits = [entry for entry in self._tuples if entry[0] < slack]
            if not fits:
                continue
            bucket = [entry for entry in fits if entry[0] > fits[-1][0] - self._width]
            chosen = max(bucket, key=lambda entry: (min(entry[1], len(batch)), entry[2]))
            if start + self.profile.batch_seconds(chosen[3], len(batch)) < batch.deadline:
                return Decision(batch, chosen[3])
            quickest = min(self.profile.levels, key=lambda n: self.profile.batch_seconds(n, len(batch)))
            if start + self.profile.batch_seconds(quickest, len(batch)) < batch.deadline:
                return Decision(batch, quickest)
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperConfig:
    """OTAS's parameters (section V).

    Attributes:
      min_jobs: number of batches up to which Algorithm 3 decides (beta).
      initial: seconds from the start during which it decides, too.
      high_utility: mean utility above which a batch gets the highest level in Algorithm 3 (kappa).
    """

    min_jobs: int = 5
    initial: float = 2.0
    high_utility: float = 0.8


PAPER_RATES = (
    (1000 / 580, -20),
    (520 / 580, -15),
    (450 / 580, -10),
    (380 / 580, -5),
    (350 / 580, 0),
    (320 / 580, 2),
    (280 / 580, 4),
    (0.0, 8),
)
"""Table I: levels by their lowest rate, as a multiple of the paper's capacity at level 0 (580 a second)."""
UTILISATION = 0.8
"""Share of its throughput that a level is given. Table I: 0.61 (level -10) to 1.0 (-15) of Fig. 4b's."""


class Paper(_ByProfile):
    """OTAS as printed: Algorithm 2, and Algorithm 3 where few batches wait.

    Args:
      profile: the profile of the levels.
      batching: the rules by which queries share batches.
      config: the paper's parameters.
      profiled: whether Algorithm 3's function from rates to levels (f) comes from the profile's throughput, as the
        paper says of its own; otherwise it is Table I, with the nearest levels of the profile.
    """

    def __init__(
        self,
        profile: ServingProfile,
        batching: BatchingConfig | None = None,
        config: PaperConfig | None = None,
        *,
        profiled: bool = False,
    ):
        super().__init__(profile, batching or BatchingConfig(max_batch=profile.sizes[-1], paper=True))
        self._config, self._profiled = config or PaperConfig(), profiled
        self._begun: float | None = None

    def choose(self, batches: Sequence[Batch], start: float, rate: float) -> Decision | None:
        self._begun = start if self._begun is None else self._begun
        waiting = by_deadline(batches)
        jobs = [job_of(batch, self.profile) for batch in waiting]
        if len(jobs) <= self._config.min_jobs or start - self._begun < self._config.initial:
            levels = self._by_rate(waiting, start, rate)
        else:
            levels = plan_paper(jobs, start).levels
        chosen = zip(waiting, levels, strict=True)
        return next((Decision(batch, level) for batch, level in chosen if level is not None), None)

    def _by_rate(self, batches: Sequence[Batch], start: float, rate: float) -> list[int | None]:
        """Choose levels by Algorithm 3."""
        profile, levels, clock = self.profile, list[int | None](), start
        usual = self._level_for(rate)
        for batch in batches:
            level = usual
            mean = sum(query.utility for query in batch.queries) / len(batch)
            if clock + profile.batch_seconds(usual, len(batch)) >= batch.deadline:
                level = profile.levels[0]
            elif mean > self._config.high_utility:
                level = profile.levels[-1]
            levels.append(level)
            clock += profile.batch_seconds(level, len(batch))
        return levels

    def _level_for(self, rate: float) -> int:
        """Choose the level for a rate: Algorithm 3's f."""
        profile = self.profile
        if self._profiled:
            return highest_level(profile, rate, UTILISATION)
        printed = next(level for least, level in PAPER_RATES if rate / profile.capacity(0) >= least)
        return min(profile.levels, key=lambda level: abs(level - printed))


def make_policy(
    name: str,
    profile: ServingProfile,
    *,
    scale: float = 1.0,
    time_limit: float | None = None,
    by_worth: bool = False,
) -> Policy:
    """Make a policy by name: one of `POLICIES`, or "level-8", "level+2" and so on for a fixed level.

    Args:
      name: the policy's name.
      profile: the profile of the levels.
      scale: factor on the paper's thresholds in seconds, which decide what queries share a batch.
      time_limit: seconds that a plan may take; see `Elastic`.
      by_worth: whether any policy batches as `Elastic` does; otherwise the others batch as the paper does.

    Raises ValueError for an unknown name, or a level that the profile does not have.
    """
    is_paper = name in ("paper", "paper_profiled")
    batching = BatchingConfig(max_batch=profile.sizes[-1], paper=is_paper and not by_worth).scaled(scale)
    if by_worth or name == "elastic":
        batching = batching.by_worth()
    if name == "elastic":
        return Elastic(profile, batching, time_limit=time_limit)
    if is_paper:
        config = PaperConfig(initial=scale * PaperConfig().initial)
        return Paper(profile, batching, config, profiled=name == "paper_profiled")
    if name in _SIMPLE:
        return _SIMPLE[name](profile, batching)
    return FixedLevel(profile, _fixed_level(name), batching)


def check_policy(name: str, levels: Collection[int] | None = None) -> None:
    """Check a policy's name, and that a fixed level is one of these.

    Raises ValueError for an unknown name or level.
    """
    level = 0 if name in POLICIES else _fixed_level(name)
    if levels is not None and level not in levels:
        raise ValueError(f"policy {name!r}: there is no such level; levels: {', '.join(map(str, levels))}.")


def _fixed_level(name: str) -> int:
    if match := re.fullmatch(r"level([+-]\d+)", name):
        return int(match[1])
    raise ValueError(f"no policy {name!r}; known: {', '.join(POLICIES)}, or a fixed level such as level-8 or level+2.")


_SIMPLE: Mapping[str, Callable[[ServingProfile, BatchingConfig], Policy]] = {
    "pets": lambda profile, batching: FixedLevel(profile, 0, batching),
    "slack": LargestThatFits,
    "slackfit": SlackFit,
    "rate": RateRule,
}
POLICIES = ("elastic", "paper", "paper_profiled", *_SIMPLE)
"""Names of the policies that choose levels, and of PetS, which always takes level 0."""


class ModelSwitching(_ByProfile):
    """INFaaS's policy: the most accurate model with enough throughput, loaded when the choice changes.

    Args:
      profile: a profile whose levels are the models, the smallest first; the largest is loaded at the start.
      load_seconds: seconds to load a model.
      batching: the rules by which queries share batches.
    """

    def __init__(
        self, profile: ServingProfile, load_seconds: Mapping[int, float], batching: BatchingConfig | None = None
    ):
        super().__init__(profile, batching)
        self._loads, self._model = load_seconds, profile.levels[-1]

    def choose(self, batches: Sequence[Batch], start: float, rate: float) -> Decision | None:
        profile = self.profile
        model = highest_level(profile, rate, 1.0)
        setup = self._setup(model)
        for batch in by_deadline(batches):
            if start + setup + profile.batch_seconds(model, len(batch)) < batch.deadline:
                self._model = model
                return Decision(batch, model, setup)
        return None

    def least_seconds(self, count: int) -> float:
        return min(self._setup(n) + self.profile.batch_seconds(n, count) for n in self.profile.levels)

    def _setup(self, model: int) -> float:
        return 0.0 if model == self._model else self._loads[model]
