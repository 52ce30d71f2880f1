"""Times of operations on a GPU with a cold L2 cache, so that weights come from memory.

One program is a loop whose body calls the operation many times with different arguments. Large arguments (weights,
caches) rotate through sets that together exceed the L2 cache; small ones (activations) differ in every call, and wait
for the result of the call before: otherwise XLA merges products that share weights, and reads these once for several
calls. The program is one CUDA graph whose kernels run serially, and it is launched several times before the host waits.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.kernel_cases import Case
from jaxinfer.compiled import compiler_options

LARGE = 1 << 20
"""Bytes from which arrays rotate."""
SETS_BYTES = 512 << 20
"""Total bytes of the sets of rotating arrays: ten times the L2 cache of an H200."""
BODY_SECONDS = 1e-3
"""Target seconds of one pass through the loop's body, against which the loop's own time is small."""
PROGRAM_SECONDS = 5e-3
"""Minimum seconds of a launch, so that the host stays ahead of the GPU: it handles hundreds of arguments."""
ROUND_SECONDS = 15e-3
"""Target seconds of a round."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
    """The amount of work of a measurement.

    Attributes:
      rounds: interleaved rounds. calls: the maximum number of calls in a program. warm_up: executions before the first
        round.
      dry: only run the code, with tiny sizes; timings are meaningless.
    """

    rounds: int
    calls: int = 64
    warm_up: int = 2
    dry: bool = False


FULL, DRY = Effort(rounds=5), Effort(rounds=1, calls=1, warm_up=0, dry=True)

Round = Callable[[], float]
"""Function that runs something repeatedly and returns the seconds per call."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds per call, in each round."""

    rounds: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """The range of the rounds, relative to their median."""
        return (max(self.rounds) - min(self.rounds)) / self.seconds


def interleave(ways: Mapping[str, Round], rounds: int) -> dict[str, Timing]:
    """Time several implementations in interleaved rounds."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            times[name].append(way())
    return {name: Timing(tuple(seconds)) for name, seconds in times.items()}


def steady_state(launch: Callable[[], Any], calls: int, effort: Effort) -> Round:
    """Prepare rounds of ROUND_SECONDS of a program that makes `calls` calls, after warming it up.

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
        run(effort.warm_up)  # the first executions of a CUDA graph are slower
    launches = 1 if effort.dry else max(1, round(ROUND_SECONDS / run(2)))
    return lambda: run(launches) / calls


@dataclasses.dataclass(frozen=True)
class Plan:
    """The repetition of a case: `loops` times `calls`, rotating through `sets` of the `large` argument leaves."""

    calls: int
    sets: int
    large: tuple[bool, ...]
    loops: int = 1

    @classmethod
    def from_case(cls, case: Case, call_seconds: float, effort: Effort) -> "Plan":
        """Plan a case whose call is expected to take `call_seconds`."""
        sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(case.args)]
        large = tuple(size >= LARGE for size in sizes)
        total = sum(size for size, rotates in zip(sizes, large, strict=True) if rotates)
        sets = min(-(-SETS_BYTES // total), effort.calls) if total else 1
        calls = min(max(sets, round(BODY_SECONDS / call_seconds)), effort.calls)
        if all(large):
            calls = sets  # calls with only large arguments must differ in these
        return cls(calls, sets, large, 1 if effort.dry else max(1, round(PROGRAM_SECONDS / (calls * call_seconds))))

    def split(self, args: Any) -> tuple[list[Any], list[Any]]:
        """Split the arguments into small and large leaves."""
        pairs = list(zip(jax.tree.leaves(args), self.large, strict=True))
        return [x for x, large in pairs if not large], [x for x, large in pairs if large]

    def join(self, small: Sequence[Any], large: Sequence[Any], like: Any) -> Any:
        """Invert `split`; `like`: arguments of the same structure."""
        sources = iter(small), iter(large)
        return jax.tree.unflatten(jax.tree.structure(like), [next(sources[is_large]) for is_large in self.large])


@dataclasses.dataclass
class Arguments:
    """The arguments of a plan's calls: call i uses `small[i]` and `large[i % sets]`."""

    small: list[list[jax.Array]]
    large: list[list[jax.Array]]

    @classmethod
    def make(cls, case: Case, plan: Plan) -> "Arguments":
        """Make random arguments on the device."""
        both = jax.jit(lambda key: plan.split(case.make(key)))
        small = jax.jit(lambda key: plan.split(case.make(key))[0])
        keys = jax.random.split(jax.random.key(0), plan.calls)
        made = [both(key) for key in keys[: plan.sets]]
        return cls([some for some, _ in made] + [small(key) for key in keys[plan.sets :]], [some for _, some in made])


class Repeated:
    """The program that makes a plan's calls of a case (`repeated`), lowered and compiled."""

    def __init__(self, case: Case, plan: Plan, call: Callable[..., Any]):
        program, args = repeated(case, plan, call)
        self.plan, self.case = plan, case
        self._lowered = jax.jit(program, donate_argnums=1).lower(*args)
        self._executable: jax.stages.Compiled | None = None

    def compile(self) -> None:
        """Compile the program with the options of the engine's."""
        self._executable = self._lowered.compile(
            serial_options(jax.default_backend(), rows=self.case.rows, dtype=self.case.weight_dtype)
        )

    @property
    def has_kernel(self) -> bool:
        """Whether the program contains a kernel, not the operation's fallback. Always True in a dry run."""
        return jax.default_backend() != "gpu" or "mosaic_gpu" in self._lowered.as_text()

    def round(self, arguments: Arguments, effort: Effort) -> Round:
        """Prepare rounds of this program. Several programs of one plan can use the same arguments."""
        executable = self._executable
        assert executable is not None

        def launch() -> list[Any]:
            results, arguments.large = executable(arguments.small, arguments.large)
            return results

        return steady_state(launch, self.plan.calls * self.plan.loops, effort)


def repeated(case: Case, plan: Plan, call: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """Combine a plan's calls into a function of small and large (donated) arguments.

    Args:
      call: the function to call. If the case has a state, it returns a result and the new state.

    Returns:
      A function that returns the last loop's results and the large arguments, with the state updated; and its
      arguments' shapes.
    """

    def program(small: list[list[Any]], large: list[list[Any]]) -> tuple[list[Any], list[list[Any]]]:
        def body(_: jax.Array, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            small, large, results = (list(part) for part in carry)
            for index in range(plan.calls):
                args = list(plan.join(small[index], large[index % plan.sets], case.args))
                result = call(*args)
                if case.state is not None:
                    result, args[case.state] = result
                    large[index % plan.sets] = plan.split(args)[1]
                following = (index + 1) % plan.calls
                held, place = (small, following) if small[following] else (large, following % plan.sets)
                held[place], results[index] = lax.optimization_barrier((held[place], result))
            return small, large, results

        shapes = jax.eval_shape(call, *case.args)
        shapes = shapes if case.state is None else shapes[0]
        empty = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
        _, large, results = lax.fori_loop(0, plan.loops, body, (small, large, [empty] * plan.calls))
        return results, large

    small, large = plan.split(case.args)
    return program, ([small] * plan.calls, [large] * plan.sets)


def serial_options(platform: str, *, rows: int, dtype: np.dtype) -> dict[str, Any]:
    """The compiler options of the engine's programs, with serial execution of a CUDA graph's kernels."""
    options: dict[str, Any] = dict(compiler_options(platform, rows=rows, dtype=dtype))
    if platform == "gpu":
        options["xla_gpu_command_buffer_scheduling_mode"] = "SERIALIZE"
    return options


def compile_all(programs: Sequence[Repeated]) -> dict[Repeated, str]:
    """Compile several programs in parallel. Returns the errors of those that failed."""

    def compile_one(program: Repeated) -> str:
        try:
            program.compile()
        except jax.errors.JaxRuntimeError as error:  # the GPU lacks some resource
            return str(error).splitlines()[0]
        return ""

    with ThreadPoolExecutor() as pool:
        reasons = pool.map(compile_one, programs)
        return {program: reason for program, reason in zip(programs, reasons, strict=True) if reason}
