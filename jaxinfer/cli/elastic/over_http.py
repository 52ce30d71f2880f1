"""`jaxinfer elastic run URL`: queries sent to a server."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import httpx2
import numpy as np
import typer

from jaxinfer.cli.common import api_key, server_of
from jaxinfer.cli.elastic.runs import check_options, draw_workload, record, sources_of
from jaxinfer.elastic import Dataset, load_dataset
from jaxinfer.elastic.scheduling.profile import ServingProfile
from jaxinfer.evaluation.elastic.client import QueryClient
from jaxinfer.evaluation.elastic.measurements import PAPER_BATCH_SECONDS, Measurements
from jaxinfer.evaluation.elastic.runs import Run
from jaxinfer.evaluation.elastic.simulator import ServedTrace
from jaxinfer.evaluation.image_requests import headers_of, list_at
from jaxinfer.progress import long_work


def run(url: str, params: Mapping[str, Any]) -> None:
    """Send queries of the server's tasks when they are due, and show and record how they ended.

    Args:
      url: the server.
      params: the command's options by name.

    Raises ValueError for a server that cannot be asked, and for what it does not have.
    """
    trace, server = check_options(params, []), server_of(url)
    with httpx2.Client(base_url=server, headers=headers_of(api_key()), timeout=60.0, trust_env=False) as http:
        tasks = _chosen(list_at(http, server, "/v1/elastic/tasks"), params)
    sources = sources_of(params)
    if unknown := ({query.task for query in trace} | sources.keys()) - tasks.keys():
        raise ValueError(f"the task {min(unknown)!r} is not queried; queried tasks: {', '.join(tasks)}.")
    with long_work("reading images"):
        tests = {name: load_dataset(sources.get(name, name), task["image_size"]) for name, task in tasks.items()}
    measured = _measurements(tasks, tests)
    workload = draw_workload(params, trace, measured)
    typer.echo(f"{measured.capacity:,.0f} queries/s at level 0; deadlines are {measured.scale:.3f} times the paper's.")
    client = QueryClient(server, model=next(iter(tasks.values()))["model"], api_key=api_key())
    with long_work("sending queries", total=len(workload.queries)) as work:
        answers = asyncio.run(client.send(workload.queries, tests, work.advance))
    served = ServedTrace(answers=answers, best=measured.best([answer.query for answer in answers]))
    made = Run.from_served(
        served,
        measured,
        policy="server",
        arrivals=workload.arrivals,
        load=workload.load,
        seed=workload.seed,
        clock="wall",
    )
    record([made], workload, params["out"])


def _chosen(listed: Sequence[dict[str, Any]], params: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The tasks that are queried, by name. Raises ValueError."""
    models = dict.fromkeys(task["model"] for task in listed if params["name"] in (None, task["model"]))
    if len(models) != 1:
        names = ", ".join(dict.fromkeys(task["model"] for task in listed)) or "none"
        raise ValueError(f"name one elastic service with --name; services with tasks: {names}.")
    tasks = {task["id"]: task for task in listed if task["model"] in models}
    named = params["task"] or list(tasks)
    if unknown := set(named) - tasks.keys():
        raise ValueError(f"the server has no task {min(unknown)!r}; tasks: {', '.join(tasks)}.")
    return {name: tasks[name] for name in named}


def _measurements(tasks: Mapping[str, dict[str, Any]], tests: Mapping[str, Dataset]) -> Measurements:
    """Make measurements of what the server tells, at the levels that its tasks share. Raises ValueError.

    Which images are classified rightly is not known: of each task and level, as many are taken to be as it measured.
    """
    shared = [{level["level"]: level for level in task["levels"]} for task in tasks.values()]
    levels = sorted(set.intersection(*(set(each) for each in shared)))
    known, right = {}, {}
    for name, by_level in zip(tasks, shared, strict=True):
        for level in levels:
            if (accuracy := by_level[level]["accuracy"]) is None:
                raise ValueError(f"the server has not measured the accuracy of task {name!r} at level {level}.")
            known[name, level] = accuracy
            right[name, level] = np.arange(len(tests[name])) < round(accuracy * len(tests[name]))
    times = {level: shared[0][level]["batch_seconds"] for level in levels}
    sizes = sorted(map(int, times[0]))
    if any(seconds is None for each in times.values() for seconds in each.values()):
        raise ValueError("the server has not timed all batches.")
    usual = times[0][str(sizes[-1])]["p50"]
    profile = ServingProfile(
        levels=tuple(levels),
        sizes=tuple(sizes),
        seconds={(level, size): times[level][str(size)]["p95"] for level in levels for size in sizes},
        accuracy=known,
    )
    return Measurements(
        profile=profile, samples={}, right=right, capacity=sizes[-1] / usual, scale=usual / PAPER_BATCH_SECONDS
    )
