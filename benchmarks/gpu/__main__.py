"""Our kernels and our generation against the limits of a GPU.

    python -m benchmarks.gpu [--quick] [--only kernels,end_to_end] [--json FILE] [--dry-run]

Parts: `numerics` compares every kernel with float64 on the CPU; `ceilings` (always) measures bandwidth and matmul
throughput; `autotune` searches tile sizes and writes this device's table; `kernels` times every kernel against XLA and
other libraries; `end_to_end` generates with whole models of random weights, against transformers; `streaming` brings
layers from the host's memory. A part stops when its
fraction of --minutes is used up, and the report lists what was left out. `--dry-run` runs all of the code on a CPU,
with tiny shapes and interpreted kernels; its timings are meaningless.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

TIME_WEIGHTS = {"numerics": 1.0, "autotune": 2.0, "kernels": 2.0, "end_to_end": 5.0, "streaming": 1.0}
"""Weights by which --minutes is divided among the parts."""
MINUTES = 7.5


def read_parts(text: str) -> list[str]:
    """Parse the part names of `--only`."""
    names = text.split(",")
    if unknown := set(names) - TIME_WEIGHTS.keys():
        raise argparse.ArgumentTypeError(f"unknown {', '.join(sorted(unknown))}; there are {', '.join(TIME_WEIGHTS)}")
    return [name for name in TIME_WEIGHTS if name in names]


def options() -> argparse.Namespace:
    """Read the options of the command line, with the defaults that depend on others."""
    results = Path(__file__).parents[1] / "results" / "gpu"
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="under three minutes: one model, no tuning")
    parser.add_argument("--dry-run", action="store_true", help="run all code on a CPU, with tiny shapes")
    parser.add_argument("--only", type=read_parts, metavar="PART,...", help=f"any of {', '.join(TIME_WEIGHTS)}")
    parser.add_argument("--minutes", type=float, help="approximate time limit (default: 7.5; 2.5 with --quick)")
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"the result (default: {results}/gpu.json)")
    parser.add_argument(
        "--peer-python", type=Path, default=Path(sys.executable), help="interpreter with torch and transformers"
    )
    args = parser.parse_args(namespace=argparse.Namespace(time_weights=TIME_WEIGHTS))
    args.minutes = args.minutes or (60 if args.dry_run else 2.5 if args.quick else MINUTES)
    args.only = args.only or [part for part in TIME_WEIGHTS if part != "autotune" or not args.quick]
    if args.json is None:
        args.json = (Path(tempfile.mkdtemp(prefix="gpu-dry-run-")) if args.dry_run else results) / "gpu.json"
    return args


def main() -> None:
    """Run the benchmark, with the environment that JAX must find at import."""
    args = options()
    if args.dry_run:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["NPROC"] = "64"  # XLA:CPU threads, in which the threads of an interpreted kernel wait for each other
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the peer uses the same GPU
    from benchmarks.gpu.run import run  # imports JAX, which reads the environment at import

    run(args)


if __name__ == "__main__":
    main()
