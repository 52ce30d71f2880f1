"""The work of `jaxinfer elastic run` and `simulate`."""

import contextlib
import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import typer
from rich.console import Console
from rich.live import Live

from jaxinfer.cli.display import show
from jaxinfer.cli.elastic.opening import check_profiled, images_of, read_tasks
from jaxinfer.elastic import Dataset, Service, load_dataset
from jaxinfer.elastic.options import PLAN_SECONDS
from jaxinfer.elastic.scheduling.policies import check_policy, make_policy
from jaxinfer.elastic.scheduling.query import Query
from jaxinfer.evaluation.elastic.dashboard import Dashboard
from jaxinfer.evaluation.elastic.live import send_queries
from jaxinfer.evaluation.elastic.measurements import Measurements, measure
from jaxinfer.evaluation.elastic.runs import Run, write_run
from jaxinfer.evaluation.elastic.simulator import ServedTrace
from jaxinfer.evaluation.elastic.tables import by_cell, terminal_table
from jaxinfer.evaluation.elastic.workloads import ARRIVALS, arrivals_at, burstiness, read_trace
from jaxinfer.evaluation.traces import write_trace
from jaxinfer.progress import long_work

SAMPLES = 10
"""Batches of each level and size that are timed."""


class Workload(NamedTuple):
    """The queries that come.

    Attributes:
      arrivals: the kind of arrivals, or the trace's file.
      load: arrival rate as a multiple of the capacity at level 0.
      seed: seed of what was drawn.
      queries: the queries, with images.
    """

    arrivals: str
    load: float
    seed: int
    queries: list[Query]


class Setting(NamedTuple):
    """The model and tasks served, the measurements of them, and the queries."""

    model: Path
    options: Mapping[str, Any]
    tests: Mapping[str, Dataset]
    measured: Measurements
    workload: Workload

    def run_of(self, served: ServedTrace, policy: str, *, live: bool) -> Run:
        """Make the run of a policy."""
        arrivals, load, seed, _ = self.workload
        clock = "wall" if live else "simulated"
        return Run.from_served(
            served, self.measured, policy=policy, arrivals=arrivals, load=load, seed=seed, clock=clock
        )


class Opened(NamedTuple):
    """A service whose tasks, images and options are checked, before anything is measured."""

    service: Service
    params: Mapping[str, Any]
    options: Mapping[str, Any]
    tests: Mapping[str, Dataset]
    trace: list[Query]


def open_tasks(params: Mapping[str, Any], policies: Sequence[str]) -> Opened:
    """Check all that can be refused, load the tasks' images, and open the model.

    Args:
      params: the command's options by name.
      policies: the policies' names.
    """
    trace = check_options(params, policies)
    model, repository = params["model"], params["repository"]
    sources = sources_of(params)
    size, tasks = images_of(model), read_tasks(model, repository, params["task"] or [])
    for what, named in (("--data", set(sources)), (f"{params['trace']}: a query", {query.task for query in trace})):
        if unknown := named - tasks.keys():
            raise ValueError(
                f"{what} names the task {min(unknown)!r}, which is not queried; queried tasks: {', '.join(tasks)}."
            )
    tests = {name: task.divide(load_dataset(sources.get(name, name), *size)).test for name, task in tasks.items()}
    options = {name: params[name] for name in ("repository", "prompt_mode", "max_batch", "device_memory")}
    service = Service.from_checkpoint(model, **options)
    for policy in policies:
        check_policy(policy, service.shared_levels)
    for name in service.tasks:
        check_profiled(service, model, name)
    return Opened(service, params, options, tests, trace)


def compare(opened: Opened, policies: Sequence[str], serve: Callable[[Setting, str, list[Run]], None]) -> None:
    """Have policies serve the same queries, record their runs, and show all in one table: after Ctrl-C, what is done.

    Args:
      opened: the service and its tasks.
      policies: the policies' names.
      serve: serves the queries by a policy, and appends the run, even if Ctrl-C then ends it.
    """
    setting, runs = _measured(opened), list[Run]()
    try:
        for policy in policies:
            serve(setting, policy, runs)
    finally:
        if runs:
            record(runs, setting.workload, opened.params["out"])


def _measured(opened: Opened) -> Setting:
    """Measure what batches take and which images are right, and draw the queries."""
    service, params, options, tests, trace = opened
    with service:
        measured = measure(service, tests, samples=SAMPLES)
    typer.echo(f"{measured.capacity:,.0f} queries/s at level 0; deadlines are {measured.scale:.3f} times the paper's.")
    return Setting(params["model"], options, tests, measured, draw_workload(params, trace, measured))


def check_options(params: Mapping[str, Any], policies: Sequence[str]) -> list[Query]:
    """Check what needs no model; return the queries of the trace, if there is one."""
    for policy in policies:
        check_policy(policy)
    if params["arrivals"] not in ARRIVALS:
        raise ValueError(f"--arrivals must be one of {', '.join(ARRIVALS)}, got {params['arrivals']!r}.")
    for name in ("load", "seconds"):
        if not 0 < params[name] < float("inf"):
            raise ValueError(f"--{name} must be > 0, got {params[name]}.")
    out = existing = params["out"]
    while not existing.exists():
        existing = existing.parent
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise ValueError(f"--out {out}: {existing} is not a writable folder; name another one.")
    return [] if params["trace"] is None else read_trace(params["trace"])


def sources_of(params: Mapping[str, Any]) -> dict[str, str]:
    """Read `--data`: the data set of each task that it names."""
    return dict(_source(option) for option in params["data"] or [])


def _source(given: str) -> tuple[str, str]:
    task, equals, source = given.partition("=")
    if not (task and equals and source):
        raise ValueError(f"--data must be TASK=DATA, got {given!r}.")
    return task, source


def draw_workload(params: Mapping[str, Any], given: Sequence[Query], measured: Measurements) -> Workload:
    """Draw the queries, or take those of a trace; each gets an image."""
    seed, capacity = params["seed"], measured.capacity
    if (trace := params["trace"]) is not None:
        queries = measured.with_images(given, seed=seed)
        load = len(queries) / max(queries[-1].arrival, 1e-9) / capacity if queries else 0.0
        return Workload(trace.name, load, seed, queries)
    kind, load, seconds = params["arrivals"], params["load"], params["seconds"]
    arrivals = arrivals_at(ARRIVALS[kind], load * capacity, seconds, seed=seed, scale=measured.scale)
    return Workload(kind, load, seed, measured.queries(arrivals, seed=seed))


def run_live(setting: Setting, policy: str, runs: list[Run]) -> None:
    """Serve the queries live, with a dashboard where output goes to a terminal."""
    measured, (arrivals, load, _, queries) = setting.measured, setting.workload
    with Service.from_checkpoint(
        setting.model,
        policy=lambda profile: make_policy(policy, profile, scale=measured.scale, time_limit=PLAN_SECONDS),
        **setting.options,
    ) as service:
        service.measure_latency()  # does nothing if earlier measurements could be kept
        service.start()
        dashboard = Dashboard(service, f"{policy}: {arrivals} at {load:.2f}x", len(queries))
        with _stopped_by_interrupt() as stop:
            with Live(dashboard, console=Console(), refresh_per_second=4):
                answers = send_queries(service, queries, setting.tests, watch=dashboard.watch, stop=stop)
            service.close(drain=not stop.is_set())
    served = ServedTrace(answers=answers, best=measured.best([answer.query for answer in answers]))
    runs.append(setting.run_of(served, policy, live=True))
    if stop.is_set():
        raise KeyboardInterrupt


@contextlib.contextmanager
def _stopped_by_interrupt() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C sets, in place of raising KeyboardInterrupt; a second Ctrl-C raises it."""
    stop = threading.Event()

    def interrupt(*_: object) -> None:
        stop.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def simulate(setting: Setting, policy: str, runs: list[Run]) -> None:
    """Serve the queries on a simulated clock."""
    measured, (_, _, seed, queries) = setting.measured, setting.workload
    with long_work(f"simulating {policy}"):
        served = measured.simulate(queries, make_policy(policy, measured.profile, scale=measured.scale), seed=seed)
    runs.append(setting.run_of(served, policy, live=False))


def record(runs: Sequence[Run], workload: Workload, folder: Path) -> None:
    """Write runs and their trace, and print what they earned, in one table."""
    before = set(folder.glob("*.jsonl"))
    files = [write_run(folder, run) for run in runs]
    traces = folder / "traces"
    traces.mkdir(exist_ok=True)
    trace = traces / f"{Path(workload.arrivals).stem}-{workload.load:.2f}x-{workload.seed}.jsonl"
    queries = sorted(
        (dataclasses.replace(query, payload=None) for query in workload.queries), key=lambda query: query.arrival
    )
    write_trace(trace, queries)
    statistics = burstiness(np.array([query.arrival for query in queries]))
    show(*(terminal_table(cell, group) for cell, group in by_cell(runs).items()))
    typer.echo("arrivals: " + ", ".join(f"{name} {value:.2f}" for name, value in statistics.items()))
    for run, file in zip(runs, files, strict=True):
        answered = len(run.served.answers)
        part = "" if answered == len(queries) else f", {answered} of {len(queries)} queries"
        typer.echo(f"{'Replaced' if file in before else 'Wrote'} {file}{part}")
    typer.echo(f"Wrote {trace}")
