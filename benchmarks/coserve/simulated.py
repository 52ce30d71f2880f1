"""The paper's figures 13 to 19 on a simulated clock, against its numbers and ranking; and our policy."""

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Iterable, Mapping
from typing import Literal

from benchmarks.coserve.decisions import decision_latencies
from benchmarks.coserve.machines import (
    EFFICIENT,
    NUMA,
    UMA,
    Layout,
    Machine,
    best_layout,
    casual,
    largest_pool,
    system,
)
from benchmarks.coserve.tables import BASELINES, GROUPING
from benchmarks.coserve.workload import TASKS, Task, make_task
from benchmarks.report import Report
from jaxinfer.evaluation.experts.forecast import compulsory_loads
from jaxinfer.evaluation.experts.memory_search import MemoryChoice, search_memory
from jaxinfer.evaluation.experts.simulator import Simulator
from jaxinfer.experts.scheduling.policy import POLICIES, Policy

ABLATION = ("none", "em", "em_ra", "paper")
SWEEP = (10, 15, 20, 25, 28, 32, 35, 39, 42, 45, 48)
"""Number of ResNet101 experts in the GPU executors' pools."""
SAMPLE = 2500
"""Number of images in the sample of the memory search: a task's.

With fewer, most of the time goes into the first loads, and more experts always look better.
"""
FLAGS = {
    "queue_aware": {"evict": "queue_aware"},
    "host_cache": {"host_cache": True},
    "share_pools": {"share_pools": True},
    "prefetch": {"prefetch": 4},
    "resident_first": {"resident_first": True},
    "counts_batches": {"counts_batches": True},
    "avoids_padding": {"avoids_padding": True},
    "max_age": {"max_age": 30.0},
    "learns_usage": {"learns_usage": True},
}
"""The changes of each of our flags."""
BATCHES = (1, 2, 4, 8)
"""Compiled batch sizes where `avoids_padding` is measured: a batch takes as long as the next of them."""


@dataclasses.dataclass(frozen=True)
class Run:
    """The result of a task.

    Attributes:
      throughput: images with a result per second.
      switches: number of loads after the start. disk: number of loads from files.
      bound: the minimum number of loads from files.
      seconds: the task's seconds. deciding: real seconds of all the scheduler's decisions.
    """

    throughput: float
    switches: int
    disk: int
    bound: int
    seconds: float
    deciding: float


@functools.cache
def run(machine: Machine, layout: Layout, policy: Policy, task: Task, seed: int, repeats: float = 0.0) -> Run:
    """Run a task once."""
    graph, trace = make_task(task, seed, repeats=repeats)
    scheduler, hardware = system(machine, layout, policy, graph)
    resident = set[str]().union(*(pool.resident for pool in scheduler.manager.pools))
    outcome = Simulator(scheduler, hardware).run(trace)
    assert outcome.finished == len(trace)
    return Run(
        throughput=outcome.throughput,
        switches=outcome.statistics.switches,
        disk=outcome.statistics.loads["disk"],
        bound=compulsory_loads({name for item in trace for name in item.experts}, resident),
        seconds=outcome.seconds,
        deciding=float(outcome.decision_seconds.sum()),
    )


class Simulation:
    """The common part of all figures.

    Args:
      report: collects the results.
      quick: one seed and fewer points.
    """

    def __init__(self, report: Report, *, quick: bool):
        self.report = report
        self.seeds = range(1 if quick else 5)
        self.tasks = TASKS[:: len(TASKS) - 1] if quick else TASKS
        self.sweep = SWEEP[::3] if quick else SWEEP

    def mean(self, machine: Machine, layout: Layout, policy: Policy, task: Task, *, repeats: float = 0.0) -> Run:
        """Average the runs of all seeds."""
        runs = [run(machine, layout, policy, task, seed, repeats) for seed in self.seeds]
        means = [statistics.fmean(getattr(each, field.name) for each in runs) for field in dataclasses.fields(Run)]
        return Run(*means)  # pyright: ignore[reportArgumentType]

    def row(self, figure: str, mean: Run, **fields: object) -> None:
        """Add a row with a mean."""
        self.report.row(
            figure=figure,
            **fields,
            img_per_s=round(mean.throughput, 2),
            switches=round(mean.switches, 1),
            disk_loads=round(mean.disk, 1),
            bound=round(mean.bound, 1),
        )

    def run_all(self) -> None:
        """Make all figures and checks."""
        for figure in (
            self.compare,
            self.ablate,
            self.sweep_executors,
            self.sweep_memory,
            self.measure_decisions,
            self.vary,
            self.ours,
            self.flags,
        ):
            figure()

    def compare(self) -> None:
        """Make figures 13 and 14: throughput and switches of CoServe in both layouts, and of Samba-CoE's."""
        self._check_numa(self._compare_on(NUMA))
        self._check_uma(self._compare_on(UMA))

    def _compare_on(self, machine: Machine) -> list[dict[str, Run]]:
        """Run all systems on each task."""
        tasks = []
        for task in self.tasks:
            layout, modes = best_layout(machine, task.board, task.gpus), (*BASELINES, *GROUPING, "paper")
            results = {mode: self.mean(machine, layout, POLICIES[mode], task) for mode in modes}
            results["casual"] = self.mean(machine, casual(machine), POLICIES["paper"], task)
            for name, each in results.items():
                self.row("compare", each, machine=machine.name, task=task.name, system=name)
            tasks.append(results)
        return tasks

    def _check_numa(self, tasks: list[dict[str, Run]]) -> None:
        check, speedups = self.report.check, [_speedups(results) for results in tasks]
        check("worst_speedup", min(map(min, speedups)), "x a baseline", target=3.5)
        check("best_speedup_least", min(map(max, speedups)), "x a baseline", target=9)
        check("best_speedup_most", max(map(max, speedups)), "x a baseline", target=14, better="lower")
        check("switches_saved_vs_samba", _least_cut(tasks, "samba"), "of its switches", target=0.85)
        check("switches_saved_vs_parallel", _least_cut(tasks, "parallel"), "of its switches", target=0.92)
        untuned = min(results["casual"].throughput / results["paper"].throughput for results in tasks)
        check("casual_vs_best", untuned, "x of the throughput", target=0.75)
        check("switches_saved_vs_casual", _least_cut(tasks, "casual"), "of its switches", target=0.0128)
        grouping = [max(results[mode].throughput for mode in GROUPING) for results in tasks]
        gain = min(results["paper"].throughput / best for results, best in zip(tasks, grouping, strict=True))
        check("paper_vs_grouping_baseline", gain, "x the better one", target=1.0)

    def _check_uma(self, tasks: list[dict[str, Run]]) -> None:
        check, speedups = self.report.check, [_speedups(results) for results in tasks]
        check("uma_worst_speedup", min(map(min, speedups)), "x a baseline", target=4.6)
        check("uma_best_speedup_most", max(map(max, speedups)), "x a baseline", target=14, better="lower")
        check("uma_switch_cut", _least_cut(tasks, "samba"), "of Samba-CoE's switches", target=0.78)
        check("uma_switches_saved_vs_casual", _least_cut(tasks, "casual"), "of its switches", target=0.1648)

    def ablate(self) -> None:
        """Make figures 15 and 16: expert management, request arranging and request assignment, added one by one."""
        steps = []
        for task in self.tasks:
            layout = best_layout(NUMA, task.board, task.gpus)
            results = [self.mean(NUMA, layout, POLICIES[mode], task) for mode in ABLATION]
            for mode, each in zip(ABLATION, results, strict=True):
                self.row("ablation", each, task=task.name, system=mode)
            for before, after in itertools.pairwise(results):
                steps += [after.throughput / before.throughput, before.switches / after.switches]
        self.report.check("least_step_of_ablation", min(steps), "x the one before", target=1.001)

    def sweep_executors(self) -> None:
        """Make figure 17: throughput by the number of executors."""
        best = []
        for task in self.tasks:
            rates = {}
            for cpus in (0, 1):
                for gpus in range(1, 7):
                    layout = best_layout(NUMA, task.board, gpus, cpus)
                    each = self.mean(NUMA, layout, POLICIES["paper"], task)
                    self.row("executors", each, task=task.name, gpus=gpus, cpus=cpus)
                    rates[gpus, cpus] = each.throughput
            best.append(max(range(1, 7), key=lambda gpus: rates[gpus, 1]))
        self.report.check("best_executors_least", min(best), "on the GPU, 1 on the CPU", target=3)
        self.report.check("best_executors_most", max(best), "on the GPU, 1 on the CPU", target=5, better="lower")

    def sweep_memory(self) -> None:
        """Make figures 11 and 18: throughput by the number of experts that fit the GPU, and the search's choice."""
        above_ends, chosen = [], {"random": [], "argmax": []}
        for task in self.tasks:

            def rate(experts: int, task: Task = task) -> float:
                layout = Layout(gpus=task.gpus, cpus=1, experts=experts)
                return self.mean(NUMA, layout, POLICIES["paper"], task).throughput

            limit = largest_pool(NUMA, task.gpus)
            rates = {experts: rate(experts) for experts in (*(n for n in self.sweep if n < limit), limit)}
            for experts, value in rates.items():
                self.report.row(figure="memory", task=task.name, experts=experts, img_per_s=round(value, 2))
            best = max(rates.values())
            above_ends.append(best / max(rates[min(rates)], rates[max(rates)]))
            for choose in ("random", "argmax"):
                searches = [search(task, seed, choose) for seed in self.seeds]
                for seed, choice in zip(self.seeds, searches, strict=True):
                    self.report.row(
                        figure="search",
                        task=task.name,
                        choose=choose,
                        seed=seed,
                        window=choice.windows[-1].experts,
                        error=round(choice.error, 4),
                        experts=choice.experts,
                        img_per_s=round(rate(choice.experts), 2),
                    )
                chosen[choose].append(statistics.fmean(rate(each.experts) for each in searches) / best)
        self.report.check("memory_optimum_above_ends", min(above_ends), "x the better end of the sweep", target=1.001)
        self.report.check("search_vs_sweep", min(chosen["random"]), "x the best of the sweep", target=0.95)
        self.report.check("search_of_better_end", min(chosen["argmax"]), "x the best of the sweep", target=0.95)

    def measure_decisions(self) -> None:
        """Make figure 19: a thread's time for decisions, with 350 experts and 3,500 waiting requests."""
        worst = 0.0
        for mode in ("paper", "best"):
            latencies = decision_latencies(POLICIES[mode])
            for what, each in latencies.items():
                self.report.row(figure="decisions", system=mode, call=what, **each.ms())
                worst = max(worst, each.p99) if mode == "best" else worst
        self.report.check("decision_p99_ms", 1e3 * worst, "ms", target=1, better="lower")
        shares = []
        for task in self.tasks:
            each = self.mean(NUMA, best_layout(NUMA, task.board, task.gpus), POLICIES["paper"], task)
            shares.append(each.deciding / each.seconds)
            self.report.row(figure="overhead", task=task.name, of_task=round(shares[-1], 5))
        self.report.check("scheduling_overhead", max(shares), "of a task's time", target=0.03, better="lower")

    def vary(self) -> None:
        """Vary the conditions of the headline: no CPU executor, cheaper loads, and types that come in runs."""
        task = self.tasks[0]
        layout = best_layout(NUMA, task.board, task.gpus)
        modes = (*BASELINES, *ABLATION, "best")
        for what, machine, where, repeats in (
            ("without the CPU executor", NUMA, dataclasses.replace(layout, cpus=0), 0.0),
            ("efficient loader", EFFICIENT, layout, 0.0),
            ("40% repeats", NUMA, layout, 0.4),
        ):
            for mode in modes:
                each = self.mean(machine, where, POLICIES[mode], task, repeats=repeats)
                self.row("variant", each, what=what, task=task.name, system=mode)

    def ours(self) -> None:
        """Compare our policy with the paper's, and with the minimum number of loads."""
        gains, loads = [], []
        for machine in (NUMA, UMA):
            for task in self.tasks:
                layout = best_layout(machine, task.board, task.gpus)
                paper, best = (self.mean(machine, layout, POLICIES[mode], task) for mode in ("paper", "best"))
                self.row("ours", best, machine=machine.name, task=task.name, system="best", what="the paper's layout")
                if machine is NUMA:
                    gains.append(best.throughput / paper.throughput)
                    loads.append(best.disk / best.bound)
                    cached = dataclasses.replace(layout, cpus=0, host_experts=33)
                    each = self.mean(machine, cached, POLICIES["best"], task)
                    what = "the CPU's memory as cache"
                    self.row("ours", each, machine=machine.name, task=task.name, system="best", what=what)
        self.report.check("best_vs_paper_mode", min(gains), "x of the throughput", target=1.3)
        self.report.check("switches_vs_bound", max(loads), "x the least loads", target=1.5, better="lower")

    def flags(self) -> None:
        """Measure each of our flags alone, added to the paper's policy, and removed from ours."""
        for name, changes in FLAGS.items():
            undone = {field: getattr(POLICIES["paper"], field) for field in changes}
            toggled = undone if all(getattr(POLICIES["best"], k) == v for k, v in changes.items()) else changes
            self.flag(name, "added", POLICIES["paper"], changes)
            self.flag(name, "taken" if toggled is undone else "added to best", POLICIES["best"], toggled)

    def flag(self, name: str, how: str, policy: Policy, changes: dict) -> None:
        machine = dataclasses.replace(NUMA, batches=BATCHES) if name == "avoids_padding" else NUMA
        for task in self.tasks[:: len(self.tasks) - 1]:
            layout = best_layout(NUMA, task.board, task.gpus)
            before = self.mean(machine, layout, policy, task)
            after = self.mean(machine, layout, dataclasses.replace(policy, **changes), task)
            gain = round(after.throughput / before.throughput, 4)
            self.row("flag", after, flag=name, how=how, task=task.name, gain=gain)


def _speedups(results: Mapping[str, Run]) -> list[float]:
    """Compare the paper's policy with each baseline of the paper."""
    return [results["paper"].throughput / results[mode].throughput for mode in BASELINES]


def _least_cut(tasks: Iterable[Mapping[str, Run]], other: str) -> float:
    """The share of another system's switches that the paper's policy saves, in the task with the least."""
    return min(1 - results["paper"].switches / results[other].switches for results in tasks)


def search(task: Task, seed: int, choose: Literal["random", "argmax"]) -> MemoryChoice:
    """Run the paper's search of section 4.4, on a sample of images that are not the task's."""
    sample = dataclasses.replace(task, name=f"{task.name}-sample", images=SAMPLE)
    graph, _ = make_task(sample, seed)

    def measure(experts: int) -> float:
        layout = Layout(gpus=task.gpus, cpus=1, experts=experts)
        return run(NUMA, layout, POLICIES["paper"], sample, seed).throughput

    return search_memory(graph.usage.values(), measure, limit=largest_pool(NUMA, task.gpus), choose=choose, seed=seed)
