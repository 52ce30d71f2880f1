"""Recorded runs: what a policy did with a trace, live or simulated, for reports."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

import msgspec

from jaxinfer.elastic.scheduling.profile import ServingProfile
from jaxinfer.evaluation.elastic.measurements import Measurements
from jaxinfer.evaluation.elastic.simulator import ServedQuery, ServedTrace
from jaxinfer.evaluation.traces import read_lines, write_lines

FORMAT = 2


class RecordedProfile(msgspec.Struct, forbid_unknown_fields=True):
    """A `ServingProfile` as lists."""

    levels: list[int]
    sizes: list[int]
    seconds: list[tuple[int, int, float]]
    accuracy: list[tuple[str, int, float]]


class RunHeader(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The first line of a run's file.

    Attributes:
      policy: the policy's name.
      arrivals: the kind of arrivals, or the trace's file.
      load: arrival rate as a multiple of the capacity at level 0.
      capacity: queries a second at level 0.
      seed: seed of what was drawn.
      clock: "wall" or "simulated".
      best: see `ServedTrace`.
      profile: the profile of the levels.
      format: the file's format.
    """

    policy: str
    arrivals: str
    load: float
    capacity: float
    seed: int
    clock: Literal["wall", "simulated"]
    best: float
    profile: RecordedProfile
    format: int = FORMAT


class Run(msgspec.Struct, frozen=True):
    """A header, and each query's outcome."""

    header: RunHeader
    served: ServedTrace

    @classmethod
    def from_served(
        cls,
        served: ServedTrace,
        measured: Measurements,
        *,
        policy: str,
        arrivals: str,
        load: float,
        seed: int,
        clock: Literal["wall", "simulated"],
    ) -> Self:
        """Make a run from a policy's results and the measurements; for other arguments see `RunHeader`."""
        header = RunHeader(
            policy=policy,
            arrivals=arrivals,
            load=load,
            capacity=measured.capacity,
            seed=seed,
            clock=clock,
            best=served.best,
            profile=_record_profile(measured.profile),
        )
        return cls(header, served)

    @property
    def name(self) -> str:
        """The name of its file, without a suffix."""
        header = self.header
        return f"{header.clock}-{Path(header.arrivals).stem}-{header.load:.2f}x-{header.policy}-{header.seed}"

    @property
    def profile(self) -> ServingProfile:
        """The profile of the levels."""
        recorded = self.header.profile
        return ServingProfile(
            levels=tuple(recorded.levels),
            sizes=tuple(recorded.sizes),
            seconds={(level, size): seconds for level, size, seconds in recorded.seconds},
            accuracy={(task, level): accuracy for task, level, accuracy in recorded.accuracy},
        )


def _record_profile(profile: ServingProfile) -> RecordedProfile:
    """Convert a profile to its form in a run's file."""
    return RecordedProfile(
        levels=list(profile.levels),
        sizes=list(profile.sizes),
        seconds=[(*key, seconds) for key, seconds in profile.seconds.items()],
        accuracy=[(*key, accuracy) for key, accuracy in profile.accuracy.items()],
    )


def write_run(folder: Path, run: Run) -> Path:
    """Write a run to a folder, replacing one of the same name: a header, then a query a line; return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{run.name}.jsonl"
    write_lines(file, [run.header, *run.served.answers])
    return file


def read_run(file: Path) -> Run:
    """Read a file of `write_run`. Raises ValueError that names the line."""
    header, *lines = file.read_bytes().splitlines() or [b""]
    try:
        described = msgspec.json.decode(header, type=RunHeader)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{file}:1: not a recorded run ({error}); record it again.") from error
    if described.format != FORMAT:
        raise ValueError(f"{file}: has format {described.format}, and this version reads {FORMAT}; record it again.")
    answers = read_lines(file, lines, ServedQuery, name="a served query", first=2)
    return Run(described, ServedTrace(answers=answers, best=described.best))


def read_runs(folder: Path) -> list[Run]:
    """Read all runs in a folder, by name. Raises ValueError if there are none."""
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise ValueError(f"{folder}: no runs (*.jsonl); record some with `jaxinfer elastic run` or `simulate`.")
    return [read_run(file) for file in files]


def batches_of(answers: Sequence[ServedQuery]) -> dict[int, list[ServedQuery]]:
    """Group the queries that ran by their batches."""
    batches: dict[int, list[ServedQuery]] = {}
    for answer in answers:
        if answer.batch is not None:
            batches.setdefault(answer.batch, []).append(answer)
    return batches
