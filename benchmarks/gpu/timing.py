"""How long an operation takes on a GPU when its weights come from memory rather than from a cache.

One program calls the operation many times over, each time on other arguments: large ones (weights, caches) in turn
from sets that the L2 cache cannot hold together, small ones (activations) each once, so that no two calls are equal
and none is computed for another. The program is one CUDA graph whose kernels run one after another, and it is launched
several times before the host waits.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from benchmarks.gpu.cases import Case
from jaxinfer.compiled import compiler_options

LARGE = 1 << 20
"""Bytes from which on an array is one of those that take turns."""
SETS_BYTES = 512 << 20
"""Bytes of all the arrays that take turns: ten times the L2 cache of an H200."""
PROGRAM_SECONDS = 1e-3
"""How long one launch should take at least, so that the host stays ahead."""
ROUND_SECONDS = 15e-3
"""How long a round should take."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is done for a figure.

    Attributes:
      rounds: of all ways in turns. calls: of an operation in a program, at most. warm_up: executions before the first
        round.
      dry: nothing is measured, only run; sizes are tiny.
    """

    rounds: int
    calls: int = 64
    warm_up: int = 2
    dry: bool = False


FULL, QUICK, DRY = Effort(rounds=5), Effort(rounds=3), Effort(rounds=1, calls=1, warm_up=0, dry=True)

Round = Callable[[], float]
"""Runs something for a while; returns the seconds of one call."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call, in each round."""

    rounds: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """How far the rounds lie apart, as a part of their median."""
        return (max(self.rounds) - min(self.rounds)) / self.seconds


def take_turns(ways: Mapping[str, Round], rounds: int) -> dict[str, Timing]:
    """Times of several ways to do one thing, in rounds of them all."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            found[name].append(way())
    return {name: Timing(tuple(times)) for name, times in found.items()}


def steady(launch: Callable[[], Any], calls: int, effort: Effort) -> Round:
    """Rounds of ROUND_SECONDS of a program that makes so many calls; it has warmed up by then.

    Args:
      launch: dispatches the program and returns an array to wait for.
    """

    def run(launches: int) -> float:
        start = time.perf_counter()
        for _ in range(launches - 1):
            launch()
        jax.block_until_ready(launch())
        return (time.perf_counter() - start) / launches

    if effort.warm_up:
        run(effort.warm_up)  # the first executions of a CUDA graph are not what later ones are
    launches = 1 if effort.dry else max(1, round(ROUND_SECONDS / run(2)))
    return lambda: run(launches) / calls


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a case is repeated: `calls` in a program, on `sets` of those leaves of its arguments that are `large`."""

    calls: int
    sets: int
    large: tuple[bool, ...]

    @classmethod
    def of(cls, case: Case, call_seconds: float, effort: Effort) -> "Plan":
        """For a case whose call is expected to take so long."""
        sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(case.shapes)]
        large = tuple(size >= LARGE for size in sizes)
        total = sum(size for size, one in zip(sizes, large, strict=True) if one)
        sets = min(-(-SETS_BYTES // total), effort.calls) if total else 1
        calls = min(max(sets, round(PROGRAM_SECONDS / call_seconds)), effort.calls)
        return cls(sets if all(large) else calls, sets, large)  # nothing tells two calls on one large set apart

    def split(self, args: Any) -> tuple[list[Any], list[Any]]:
        """The small and the large leaves of the arguments."""
        pairs = list(zip(jax.tree.leaves(args), self.large, strict=True))
        return [x for x, large in pairs if not large], [x for x, large in pairs if large]

    def join(self, small: Sequence[Any], large: Sequence[Any], like: Any) -> Any:
        """The inverse of `split`; `like`: arguments of this form."""
        sources = iter(small), iter(large)
        return jax.tree.unflatten(jax.tree.structure(like), [next(sources[one]) for one in self.large])


@dataclasses.dataclass
class Arguments:
    """What the calls of a plan run on: call i on `small[i]` and `large[i % sets]`."""

    small: list[list[jax.Array]]
    large: list[list[jax.Array]]

    @classmethod
    def make(cls, case: Case, plan: Plan) -> "Arguments":
        """Random ones, made on the device."""
        both = jax.jit(lambda key: plan.split(case.make(key)))
        small = jax.jit(lambda key: plan.split(case.make(key))[0])
        keys = jax.random.split(jax.random.key(0), plan.calls)
        made = [both(key) for key in keys[: plan.sets]]
        return cls([one for one, _ in made] + [small(key) for key in keys[plan.sets :]], [one for _, one in made])


class Repeated:
    """The program that makes a plan's calls of a case; see `repeated`."""

    def __init__(self, case: Case, plan: Plan, call: Callable[..., Any]):
        program, args = repeated(case, plan, call)
        self.plan, self.case = plan, case
        self._lowered = jax.jit(program, donate_argnums=1).lower(*args)
        self._executable: jax.stages.Compiled | None = None

    def compile(self) -> None:
        self._executable = self._lowered.compile(
            serial_options(jax.default_backend(), rows=self.case.rows, dtype=self.case.weight_dtype)
        )

    @property
    def has_kernel(self) -> bool:
        """Whether a kernel is in it: an operation whose kernel refuses runs its definition. In a dry run: True."""
        return jax.default_backend() != "gpu" or "mosaic_gpu" in self._lowered.as_text()

    def round(self, arguments: Arguments, effort: Effort) -> Round:
        """Rounds of it. The arguments serve several programs of one plan."""
        executable = self._executable
        assert executable is not None

        def launch() -> list[Any]:
            results, arguments.large = executable(arguments.small, arguments.large)
            return results

        return steady(launch, self.plan.calls, effort)


def repeated(case: Case, plan: Plan, call: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """A plan's calls as a function of small and large arguments, the latter to be donated; and their shapes.

    Args:
      call: what it calls. If the case has a state, that returns a result and the argument's new value.
    Returns: all results, and the large arguments, new where they are the state.
    """

    def program(small: list[list[Any]], large: list[list[Any]]) -> tuple[list[Any], list[list[Any]]]:
        large, results = list(large), []
        for index in range(plan.calls):
            args = list(plan.join(small[index], large[index % plan.sets], case.shapes))
            result = call(*args)
            if case.state is not None:
                result, args[case.state] = result
                large[index % plan.sets] = plan.split(args)[1]
            results.append(result)
        return results, large

    small, large = plan.split(case.shapes)
    return program, ([small] * plan.calls, [large] * plan.sets)


def serial_options(platform: str, *, rows: int, dtype: np.dtype) -> dict[str, Any]:
    """The compiler options of the engine's programs; a CUDA graph runs one kernel after another."""
    options: dict[str, Any] = dict(compiler_options(platform, rows=rows, dtype=dtype))
    if platform == "gpu":
        options["xla_gpu_command_buffer_scheduling_mode"] = "SERIALIZE"
    return options


def compile_all(programs: Sequence[Repeated]) -> dict[Repeated, str]:
    """Compile several at once. Returns why those that failed did."""

    def one(program: Repeated) -> str:
        try:
            program.compile()
        except jax.errors.JaxRuntimeError as error:  # more than the GPU has, of something
            return str(error).splitlines()[0]
        return ""

    with ThreadPoolExecutor() as pool:
        reasons = pool.map(one, programs)
        return {program: reason for program, reason in zip(programs, reasons, strict=True) if reason}
