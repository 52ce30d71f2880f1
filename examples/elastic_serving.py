"""Serve queries with deadlines under a bursty load, and watch the levels follow it (OTAS).

    python examples/elastic_serving.py
    python examples/elastic_serving.py --load 1.3 --seconds 60 --policies elastic pets level-8

Queries of three tasks (digits, MNIST, textures; images that nothing was trained on) arrive like calls of cloud
functions, with deadlines and different utilities. Each policy serves the same queries live: `elastic` chooses a number
of tokens for each batch, `pets` always serves the plain model. Then a report with the figures of the paper's evaluation
is written. Loads are multiples of the plain model's capacity on this machine, deadlines as many times shorter than the
paper's as batches are faster here. Needs the extras `elastic` and `bench`. On a CPU give clients and controller a core
of their own: NPROC=1 gives XLA one.
"""

import argparse
from pathlib import Path

from rich.console import Console
from rich.live import Live

from jaxinfer.elastic import Dataset, Service, load_dataset
from jaxinfer.elastic.options import PLAN_SECONDS
from jaxinfer.elastic.scheduling.policies import Policy, check_policy, make_policy
from jaxinfer.elastic.scheduling.profile import ServingProfile
from jaxinfer.elastic.scheduling.query import Query
from jaxinfer.evaluation.elastic.dashboard import Dashboard
from jaxinfer.evaluation.elastic.live import send_queries
from jaxinfer.evaluation.elastic.measurements import Measurements, measure
from jaxinfer.evaluation.elastic.report import write_report
from jaxinfer.evaluation.elastic.runs import Run, write_run
from jaxinfer.evaluation.elastic.simulator import ServedTrace
from jaxinfer.evaluation.elastic.tables import by_cell, terminal_table
from jaxinfer.evaluation.elastic.workloads import ARRIVALS, arrivals_at

BACKBONE = Path(__file__).parent / "elastic_vit"


def serve(
    args: argparse.Namespace, policy: str, measured: Measurements, queries: list[Query], tests: dict[str, Dataset]
) -> Run:
    """Send the queries to a service with this policy, and watch it."""

    def make(profile: ServingProfile) -> Policy:
        return make_policy(policy, profile, scale=measured.scale, time_limit=PLAN_SECONDS)

    options = {"merge_levels": args.merge_levels, "max_batch": args.max_batch}
    with Service.from_checkpoint(args.model, policy=make, **options) as service:
        service.measure_latency()  # nothing to do if earlier measurements could be kept
        service.start()  # compiles all programs; else the first queries are served at one level
        dashboard = Dashboard(service, f"{policy}: {args.arrivals} at {args.load:.2f}x", len(queries))
        with Live(dashboard, console=Console(), refresh_per_second=4):
            answers = send_queries(service, queries, tests, watch=dashboard.watch)
    print()
    served = ServedTrace(answers=answers, best=measured.best(queries))
    return Run.from_served(
        served, measured, policy=policy, arrivals=args.arrivals, load=args.load, seed=args.seed, clock="wall"
    )


def main(args: argparse.Namespace) -> None:
    for policy in args.policies:
        check_policy(policy)
    service = Service.from_checkpoint(args.model, merge_levels=args.merge_levels, max_batch=args.max_batch)
    size = service.config.image_size
    tests = {name: service.task(name).divide(load_dataset(name, size)).test for name in args.tasks}
    measured = measure(service, tests, samples=args.samples)
    print(f"{measured.capacity:,.0f} queries/s at level 0; a batch takes {measured.scale:.2f} of the paper's time.")
    rate = args.load * measured.capacity
    arrivals = arrivals_at(ARRIVALS[args.arrivals], rate, args.seconds, seed=args.seed, scale=measured.scale)
    queries, runs = measured.queries(arrivals, seed=args.seed), []
    for policy in args.policies:
        runs.append(serve(args, policy, measured, queries, tests))
        write_run(args.out, runs[-1])
    for cell, cell_runs in by_cell(runs).items():
        Console().print(terminal_table(cell, cell_runs))
    write_report(args.out / "report.html", runs)
    print(f"Wrote {args.out / 'report.html'}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=BACKBONE, help="a model directory with registered tasks")
    parser.add_argument("--tasks", nargs="+", default=["digits", "mnist", "textures"], help="tasks to query")
    parser.add_argument("--arrivals", choices=ARRIVALS, default="bursty", help="arrival process of queries")
    parser.add_argument("--load", type=float, default=0.8, help="mean rate, relative to the capacity at level 0")
    parser.add_argument("--seconds", type=float, default=20, help="seconds that each policy serves")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    parser.add_argument("--policies", nargs="+", default=["elastic", "paper", "pets", "level-8"], help="to compare")
    parser.add_argument("--samples", type=int, default=10, help="batches of each size to time first, at least 5")
    parser.add_argument("--merge-levels", nargs="*", type=int, help="levels below 0 (default: five)")
    parser.add_argument("--max-batch", type=int, default=64, help="largest number of images in a batch")
    parser.add_argument("--out", type=Path, default=Path("elastic_runs"), help="the folder of runs and the report")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse())
