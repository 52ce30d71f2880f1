"""Runs that were recorded: what a policy did with a trace, live or simulated, for reports."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

import msgspec

from jaxinfer.elastic.scheduling.profile import ServingProfile
from jaxinfer.evaluation.elastic.measurements import Measurements
from jaxinfer.evaluation.elastic.simulator import Served, ServedQuery
from jaxinfer.evaluation.traces import read_lines, write_lines

FORMAT = 2


class RecordedProfile(msgspec.Struct, forbid_unknown_fields=True):
    """A `ServingProfile`, as lists."""

    levels: list[int]
    sizes: list[int]
    seconds: list[tuple[int, int, float]]
    accuracy: list[tuple[str, int, float]]


class RunHeader(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The first line of a run's file.

    Attributes:
      policy: its name.
      arrivals: what they are like, or the trace's file.
      load: as a multiple of the capacity at level 0.
      capacity: queries a second at level 0.
      seed: of what was drawn.
      clock: of the wall, or simulated.
      best: see `Served`.
      profile: of the levels.
      format: of the file.
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
    """A header, and how each query ended."""

    header: RunHeader
    served: Served

    @classmethod
    def of(
        cls,
        served: Served,
        measured: Measurements,
        *,
        policy: str,
        arrivals: str,
        load: float,
        seed: int,
        clock: Literal["wall", "simulated"],
    ) -> Self:
        """What a policy earned with what was measured; arguments as of `RunHeader`."""
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
        """Of its file, without a suffix."""
        header = self.header
        return f"{header.clock}-{Path(header.arrivals).stem}-{header.load:.2f}x-{header.policy}-{header.seed}"

    @property
    def profile(self) -> ServingProfile:
        """Of the levels."""
        found = self.header.profile
        return ServingProfile(
            levels=tuple(found.levels),
            sizes=tuple(found.sizes),
            seconds={(level, size): seconds for level, size, seconds in found.seconds},
            accuracy={(task, level): accuracy for task, level, accuracy in found.accuracy},
        )


def _record_profile(profile: ServingProfile) -> RecordedProfile:
    """A profile as a run's file has it."""
    return RecordedProfile(
        levels=list(profile.levels),
        sizes=list(profile.sizes),
        seconds=[(*key, seconds) for key, seconds in profile.seconds.items()],
        accuracy=[(*key, accuracy) for key, accuracy in profile.accuracy.items()],
    )


def write_run(folder: Path, run: Run) -> Path:
    """Write a run into a folder, in place of one of the same name: a header, then a query a line; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{run.name}.jsonl"
    write_lines(file, [run.header, *run.served.answers])
    return file


def read_run(file: Path) -> Run:
    """Read what `write_run` has written. Raises ValueError that names the line."""
    header, *lines = file.read_bytes().splitlines() or [b""]
    try:
        found = msgspec.json.decode(header, type=RunHeader)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{file}:1: not a recorded run ({error}); record it again.") from error
    if found.format != FORMAT:
        raise ValueError(f"{file}: has format {found.format}, and this version reads {FORMAT}; record it again.")
    answers = read_lines(file, lines, ServedQuery, name="a served query", first=2)
    return Run(found, Served(answers=answers, best=found.best))


def read_runs(folder: Path) -> list[Run]:
    """All runs in a folder, by name. Raises ValueError if there is none."""
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise ValueError(f"{folder}: no runs (*.jsonl); record some with `jaxinfer elastic serve` or `simulate`.")
    return [read_run(file) for file in files]


def batches_of(answers: Sequence[ServedQuery]) -> dict[int, list[ServedQuery]]:
    """The queries that ran, by their batches."""
    found: dict[int, list[ServedQuery]] = {}
    for answer in answers:
        if answer.batch is not None:
            found.setdefault(answer.batch, []).append(answer)
    return found
