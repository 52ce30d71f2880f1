"""`jaxinfer plan --devices --trace`: how many replicas of which mesh keep a latency objective, and their bill."""

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from jaxinfer.cli.bench.files import write_file
from jaxinfer.cli.plan.devices import DeviceOptions, mesh_file, planned, say_price
from jaxinfer.progress import long_work

if TYPE_CHECKING:
    from jaxinfer.evaluation.generation.fleet import Fleet, Replica, Traffic
    from jaxinfer.evaluation.serving.figures import Objective

UNITS = {"ms": 1.0, "s": 1000.0}
"""Milliseconds of the units of times."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """The options of a fleet, checked.

    Attributes:
      trace: a file of `read_arrivals`.
      slo: the latency that requests must keep, such as "ttft=500ms,tpot=50ms".
      rate: requests a second; None: the trace's.
      lengths: which options of lengths were given.
    """

    EXAMPLES: ClassVar = {"trace": "--trace conv.csv", "slo": "--slo ttft=500ms,tpot=50ms"}

    trace: Path
    slo: str
    rate: float | None = None
    lengths: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rate is not None and not 0 < self.rate < 1e7:
            raise ValueError(f"--rate must be requests a second, > 0, got {self.rate}.")
        parse_slo(self.slo)


def parse_slo(text: str) -> dict[str, float]:
    """Parse the milliseconds of each latency.

    >>> parse_slo("ttft=0.5s, tpot=50ms")
    {'ttft': 500.0, 'tpot': 50.0}
    """
    limits: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"(ttft|tpot)=(\d+(?:\.\d+)?)(ms|s)", part.strip())
        if match is None or match[1] in limits or not float(match[2]):
            raise ValueError(f'--slo must be times such as "ttft=500ms,tpot=50ms", each once, got {text!r}.')
        limits[match[1]] = float(match[2]) * UNITS[match[3]]
    return limits


def plan_fleet(devices: DeviceOptions, options: FleetOptions) -> None:
    """Print the fleets of the best meshes; write the cheapest one's mesh if asked to."""
    with long_work(f"reading {options.trace}"):
        from jaxinfer.cli.display import say, show
        from jaxinfer.evaluation.generation.fleet import PlannedModel, finalists, ranked
        from jaxinfer.evaluation.serving.figures import Objective

        model, device, system, form = planned(devices)
        traffic = _traffic(devices, options)
        limits = parse_slo(options.slo)
        objective = Objective(ttft_ms=limits.get("ttft"), tpot_ms=limits.get("tpot"))
        target = PlannedModel(model=model, device=device, system=system, form=form)
    order = ranked(target, devices.count, traffic, objective)
    best = finalists(order)
    with long_work("simulating fleets", total=len(best)) as work:
        fleets = _sized(best, traffic, objective, work.advance)
    show(_table(fleets, traffic, options.slo))
    say(
        f"{len(order):,} configurations are predicted to keep it; the best meshes were simulated. Times are predicted "
        f"with constants of {system.name}. Errors of predictions and simulations: docs/benchmarks/planner.md."
    )
    say_price(device)
    if devices.write is not None:
        cheapest = fleets[0].replica
        workload = dataclasses.replace(traffic.workload, batch=cheapest.batch * cheapest.made.plan.ways.data)
        write_file(devices.write, mesh_file(cheapest.made, cheapest.runner, workload).encode())


def _traffic(devices: DeviceOptions, options: FleetOptions) -> "Traffic":
    """Read the trace, at the fleet's rate."""
    from jaxinfer.evaluation.generation.fleet import Traffic
    from jaxinfer.evaluation.serving.arrivals import read_arrivals

    trace = read_arrivals(options.trace)
    seconds = trace[-1].arrival - trace[0].arrival
    if not seconds:
        raise ValueError(f"{options.trace}: all requests arrive at once; a fleet needs a trace that takes time.")
    if all(item.prompt_tokens and item.output_tokens for item in trace):
        for name in options.lengths:
            raise ValueError(f"--{name}: {options.trace} has the lengths of its requests; leave --{name} out.")
    rate = options.rate or (len(trace) - 1) / seconds
    return Traffic.from_trace(trace, rate, prompt=devices.prompt, generate=devices.generate)


def _sized(
    replicas: "list[Replica]", traffic: "Traffic", objective: "Objective", done: Callable[[], None]
) -> "list[Fleet]":
    """Compute the fleets of configurations, the cheapest first.

    done: called after each.

    Raises NothingFitsError if none keeps the objective.
    """
    from jaxinfer.evaluation.generation.fleet import size_fleet
    from jaxinfer.sharding.planner import NothingFitsError

    fleets, problem = [], None
    for replica in replicas:
        try:
            fleets.append(size_fleet(replica, traffic, objective))
        except NothingFitsError as error:
            problem = problem or error
        done()
    if not fleets:
        assert problem is not None
        raise problem
    return sorted(fleets, key=lambda fleet: fleet.devices)


def _table(fleets: "list[Fleet]", traffic: "Traffic", slo: str) -> Any:
    from jaxinfer.cli.display import figure, table

    target, work = fleets[0].replica.target, traffic.workload
    price = target.device.price
    title = (
        f"{target.model.name} ({target.model.params / 1e9:.1f}B, {target.form.weight_bytes * 8:g} bits) on "
        f"{target.device.name} for {traffic.rate:,.4g} requests/s of {work.prompt} + {work.generate} tokens (means), "
        f"99% within {slo}"
    )
    costs = () if price is None else ("$/M",)
    names = ("replicas", "devices", "batch", "TTFT ms", "TPOT ms", "kept", *costs)
    rows = table("mesh", *names, figures=len(names), title=title)
    for fleet in fleets:
        p50, p99 = (
            {name: figure(values[rank], 3) for name, values in fleet.percentiles.items()} for rank in ("p50", "p99")
        )
        bill = () if price is None else (figure(fleet.dollars(traffic, price), 3),)
        rows.add_row(
            str(fleet.replica.made.plan.ways).replace(",", ", "),
            f"{fleet.count:,} + {fleet.spares:,}",
            f"{fleet.devices:,}",
            f"{fleet.replica.batch}, {fleet.replica.made.plan.chunk}",
            f"{p50['ttft_ms']}, {p99['ttft_ms']}",
            f"{p50['tpot_ms']}, {p99['tpot_ms']}",
            f"{math.floor(1000 * fleet.kept) / 10:g}%",
            *bill,
        )
    return rows
