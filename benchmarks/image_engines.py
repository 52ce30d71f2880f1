"""Image models in our engine and in those of peers, timed in turn: the common part of image benchmarks."""

import argparse
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import rich
from rich.table import Table

from benchmarks.report import Report
from benchmarks.workers import JAXINFER, PEERS, REMEDY, EngineError, Worker
from jaxinfer.compiled import cache_folder

TOLERANCE = 1e-3
"""Maximum difference relative to the largest logit, or to a column's largest prediction.

Pixels and probabilities differ in size.
"""

MODULES = ("torch", "safetensors", "onnx", "onnxscript", "onnxruntime")
"""The peers' modules."""


def add_options(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the options of a benchmark of this name."""
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--rounds", type=int, default=5, help="of each figure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    parser.add_argument("--work-dir", type=Path, default=cache_folder() / "benchmarks" / name)
    parser.add_argument(
        "--peer-python", type=Path, help="interpreter with the peers (default: $JAXINFER_PEERS or make peers)"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of every engine")


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the options, `--quick` as rounds. Call it before JAX looks for devices: XLA then reads its threads."""
    args = parser.parse_args()
    os.environ["NPROC"] = str(args.threads)
    args.rounds = 2 if args.quick else args.rounds
    return args


def make_models(names: Iterable[str], folder: Path, peer_python: Path) -> None:
    """Write each model as a state dict and as a model directory, unless it exists. Raises EngineError if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if (folder / name).exists():
            continue
        state_dict = folder / f"{name}.safetensors"
        if status := subprocess.run([peer_python, PEERS / "run_vision.py", "make", name, state_dict]).returncode:
            raise EngineError(f"The peers could not write {name} (status {status}; see above): {REMEDY}")
        subprocess.run([JAXINFER, "convert", state_dict, folder / name], check=True)


class Ours:
    """Our engine's model, with its programs by shape."""

    def __init__(self, folder: Path, output: str):
        import jax

        from jaxinfer.models.abstract import merge_model
        from jaxinfer.models.files.loading import load_model

        self.model = load_model(folder)
        config, weights = self.model.config, self.model.weights
        self.leaves = list(self.model.leaves.values())
        self.jitted = jax.jit(lambda leaves, images: getattr(merge_model(config, weights, leaves), output)(images))

    def __call__(self, images: np.ndarray) -> np.ndarray:
        return np.asarray(self.jitted(self.leaves, images))


@contextmanager
def workers(name: str, folder: Path, peer_python: Path, threads: int) -> Iterator[list[Worker]]:
    """Run the peers' processes; they end on exit."""
    processes = []
    try:
        for engine in ("torch", "onnxruntime"):
            script, state_dict = str(PEERS / "run_vision.py"), str(folder / f"{name}.safetensors")
            command = [str(peer_python), script, engine, name, state_dict, str(threads)]
            processes.append(Worker(engine, "float32", command))
        yield processes
    finally:
        for worker in processes:
            worker.close()


def compare(
    report: Report,
    name: str,
    output: str,
    batches: Iterable[int],
    args: argparse.Namespace,
    peer_python: Path,
    *,
    after: Callable[[int, np.ndarray], None] = lambda batch, outputs: None,
) -> None:
    """Add the rows of one model: ours against the peers.

    Args:
      output: the method of our model that computes what the peers do.
      after: called after each batch with its size and our outputs.
    """
    ours = Ours(args.work_dir / name, output)
    size = ours.model.config.image_size  # type: ignore[union-attr]  # all of these models read images
    with workers(name, args.work_dir, peer_python, args.threads) as peers:
        report.versions |= {worker.engine: worker.version for worker in peers}
        for batch in batches:
            images = np.random.default_rng(batch).integers(0, 256, (batch, size, size, 3), dtype=np.uint8)
            file, to = str(args.work_dir / "images.npy"), str(args.work_dir / "outputs.npy")
            np.save(file, images)
            outputs = {"jaxinfer": ours(images)}
            for worker in peers:
                worker.ask(do="outputs", images=file, to=to)
                outputs[worker.engine] = np.load(to)
            worst = check_agreement(outputs)
            figure = f"{name} batch {batch}"
            rich.print(f"{figure}: outputs agree within {worst:.1g}; {args.rounds} rounds of {', '.join(outputs)}")
            engines: dict[str, Callable[[], float]] = {"jaxinfer": lambda images=images: timed(lambda: ours(images))}
            for worker in peers:
                engines[worker.engine] = lambda worker=worker, file=file: worker.ask(do="run", images=file)["seconds"]
            for engine, seconds in take_turns(engines, args.rounds).items():
                add_row(report, figure, engine, seconds)
            after(batch, outputs["jaxinfer"])
            report.save(args.json)


def check_agreement(outputs: Mapping[str, np.ndarray]) -> float:
    """Check the largest difference from ours, relative as above; exits if it is not small."""
    ours, worst = outputs["jaxinfer"], 0.0
    columns = (0, 1)  # all of logits [B, classes]; of predictions [B, candidates, columns] each column by itself
    for engine, theirs in outputs.items():
        difference = float((np.abs(theirs - ours).max(columns) / np.abs(ours).max(columns)).max())
        if not difference <= TOLERANCE:
            raise SystemExit(f"The outputs of {engine} differ by {difference:.2g}, so no comparison is meaningful.")
        worst = max(worst, difference)
    return worst


def take_turns(engines: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Time every engine in every round, in seconds, after one unmeasured round."""
    times: dict[str, list[float]] = {engine: [] for engine in engines}
    for counted in [False] + [True] * rounds:
        for engine, seconds_of in engines.items():
            time.sleep(0.2)  # until the previous engine's threads are idle
            seconds = seconds_of()
            if counted:
                times[engine].append(seconds)
    return times


def timed(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def add_row(report: Report, figure: str, engine: str, seconds: list[float], **fields: Any) -> float:
    """Add a row with all milliseconds and further fields; return the median."""
    all_ms = [round(1e3 * value, 2) for value in seconds]
    ms = round(statistics.median(all_ms), 2)
    report.row(figure=figure, engine=engine, ms=ms, all_ms=all_ms, **fields)
    return ms


def of_peer(report: Report, name: str, batches: Iterable[int], peer: str = "torch") -> float:
    """Compute a peer's time relative to ours, in the worst of the batches."""
    all_ms = {(row["figure"], row["engine"]): row["all_ms"] for row in report.rows if "ms" in row}
    figures = [f"{name} batch {batch}" for batch in batches]
    return min(ratio(all_ms[figure, peer], all_ms[figure, "jaxinfer"]) for figure in figures)


def ratio(times: Iterable[float], others: Iterable[float]) -> float:
    """Compute the median over rounds of one time relative to the other: slowdowns of whole rounds cancel."""
    return statistics.median(time / other for time, other in zip(times, others, strict=True))


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print a row per figure, a column per engine."""
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    table = Table("", *engines, title="milliseconds, median (minimum)")
    for figure in dict.fromkeys(row["figure"] for row in rows):
        cells = {r["engine"]: f"{r['ms']:.1f} ({min(r['all_ms']):.1f})" for r in rows if r["figure"] == figure}
        table.add_row(figure, *(cells.get(engine, "") for engine in engines))
    rich.print(table)
