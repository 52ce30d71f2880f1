"""The work of `jaxinfer elastic serve` and `simulate`."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import typer
from rich.console import Console
from rich.live import Live

from jaxinfer.cli.display import show, show_progress
from jaxinfer.elastic import Dataset, Service, load_dataset
from jaxinfer.elastic.scheduling.policies import make_policy
from jaxinfer.elastic.scheduling.query import Query
from jaxinfer.elastic.service import PLAN_SECONDS
from jaxinfer.evaluation.elastic.dashboard import Dashboard
from jaxinfer.evaluation.elastic.live import send_queries
from jaxinfer.evaluation.elastic.measurements import Measurements, measure
from jaxinfer.evaluation.elastic.runs import Run, write_run
from jaxinfer.evaluation.elastic.simulator import Served
from jaxinfer.evaluation.elastic.tables import by_cell, terminal_table
from jaxinfer.evaluation.elastic.workloads import ARRIVALS, arrivals_at, burstiness, read_trace
from jaxinfer.evaluation.traces import write_trace

SAMPLES = 10
"""Batches of each level and size that are timed."""


class Workload(NamedTuple):
    """The queries that come, as the commands' options describe them."""

    arrivals: str
    load: float
    seconds: float
    seed: int
    trace: Path | None

    @property
    def name(self) -> str:
        """The name to show to users."""
        return self.arrivals if self.trace is None else self.trace.name


class Setting(NamedTuple):
    """The model and tasks served, and the measurements of them."""

    model: Path
    options: Mapping[str, Any]
    tests: Mapping[str, Dataset]
    measured: Measurements

    def queries(self, workload: Workload) -> tuple[list[Query], float]:
        """Return the queries of a workload, and its load."""
        measured, capacity = self.measured, self.measured.capacity
        if workload.trace is not None:
            given = read_trace(workload.trace)
            if unknown := {query.task for query in given} - set(self.tests):
                raise ValueError(f"{workload.trace}: has queries of {', '.join(sorted(unknown))}, which is not served.")
            queries = measured.with_images(given, seed=workload.seed)
            return queries, len(queries) / max(queries[-1].arrival, 1e-9) / capacity if queries else 0.0
        if workload.arrivals not in ARRIVALS:
            raise ValueError(f"--arrivals must be one of {', '.join(ARRIVALS)}, got {workload.arrivals!r}.")
        for name in ("load", "seconds"):
            if not getattr(workload, name) > 0:
                raise ValueError(f"--{name} must be > 0, got {getattr(workload, name)}.")
        arrivals = arrivals_at(
            ARRIVALS[workload.arrivals],
            workload.load * capacity,
            workload.seconds,
            seed=workload.seed,
            scale=measured.scale,
        )
        return measured.queries(arrivals, seed=workload.seed), workload.load


def read_options(params: Mapping[str, Any]) -> tuple[Setting, Workload]:
    """Read the options of both commands, given by name."""
    workload = Workload(*(params[name] for name in Workload._fields))
    names = ("repository", "prompt_mode", "max_batch", "device_memory")
    options = {name: params[name] for name in names}
    return prepare(params["model"], params["task"] or [], params["data"] or [], options), workload


def prepare(model: Path, tasks: Sequence[str], data: Sequence[str], options: Mapping[str, Any]) -> Setting:
    """Open a service, load its tasks' images, and measure what batches take and which images are right.

    Args:
      model: the model directory.
      tasks: the queried tasks; none: all.
      data: TASK=DATA for each task whose images are not the data set of its name.
      options: the service's options.
    """
    service = Service.from_checkpoint(model, **options)
    if not service.tasks:
        raise ValueError(f"{model} has no tasks: register some with `jaxinfer elastic register`.")
    sources = dict(_source(given) for given in data)
    for name in (*tasks, *sources):
        service.task(name)
    tests = {
        name: service.task(name).divide(load_dataset(sources.get(name, name), service.config.image_size)).test
        for name in (tasks or service.tasks)
    }
    with show_progress() as progress:
        measured = measure(service, tests, samples=SAMPLES, progress=progress)
    typer.echo(f"{measured.capacity:,.0f} queries/s at level 0; deadlines are {measured.scale:.3f} of the paper's.")
    return Setting(model, options, tests, measured)


def _source(given: str) -> tuple[str, str]:
    task, equals, source = given.partition("=")
    if not (task and equals and source):
        raise ValueError(f"--data must be TASK=DATA, got {given!r}.")
    return task, source


def serve(setting: Setting, workload: Workload, policy: str) -> Run:
    """Serve a workload live, with a dashboard where output goes to a terminal."""
    queries, load = setting.queries(workload)
    measured = setting.measured
    make_policy(policy, measured.profile, scale=measured.scale)  # raises its errors before anything is loaded
    with Service.from_checkpoint(
        setting.model,
        policy=lambda profile: make_policy(policy, profile, scale=measured.scale, time_limit=PLAN_SECONDS),
        **setting.options,
    ) as service:
        service.measure_latency()  # does nothing if earlier measurements could be kept
        dashboard = Dashboard(service, f"{policy}: {workload.name} at {load:.2f}x", len(queries))
        with Live(dashboard, console=Console(), refresh_per_second=4):
            answers = send_queries(service, queries, setting.tests, watch=dashboard.watch)
    typer.echo()
    served = Served(answers=answers, best=measured.best(queries))
    name, seed = workload.name, workload.seed
    return Run.from_served(served, measured, policy=policy, arrivals=name, load=load, seed=seed, clock="wall")


def simulate(setting: Setting, workload: Workload, policy: str) -> Run:
    """Serve a workload on a simulated clock."""
    queries, load = setting.queries(workload)
    measured, name, seed = setting.measured, workload.name, workload.seed
    served = measured.simulate(queries, make_policy(policy, measured.profile, scale=measured.scale), seed=seed)
    return Run.from_served(served, measured, policy=policy, arrivals=name, load=load, seed=seed, clock="simulated")


def record(run: Run, folder: Path) -> None:
    """Write a run and its trace, and print what it earned."""
    file = write_run(folder, run)
    queries = [dataclasses.replace(answer.query, payload=None) for answer in run.served.answers]
    traces = folder / "traces"
    traces.mkdir(exist_ok=True)
    trace = traces / f"{Path(run.header.arrivals).stem}-{run.header.load:.2f}x-{run.header.seed}.jsonl"
    write_trace(trace, queries)
    statistics = burstiness(np.sort([query.arrival for query in queries]))
    ((cell, runs),) = by_cell([run]).items()
    show(terminal_table(cell, runs))
    typer.echo("arrivals: " + ", ".join(f"{name} {value:.2f}" for name, value in statistics.items()))
    typer.echo(f"Wrote {file} and {trace}")
