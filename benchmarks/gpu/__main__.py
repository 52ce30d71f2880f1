"""What a GPU could do, and what our kernels and our decoding do of it.

    python -m benchmarks.gpu [--quick] [--only kernels,end_to_end] [--json FILE] [--dry-run]

Parts: `numerics` compares every kernel with float64 on the CPU; `ceilings` (always) measures bandwidth and products;
`autotune` tries tile sizes and writes this device's table; `kernels` times every kernel against XLA's code and other
libraries'; `end_to_end` generates with whole models of random weights, against transformers. A part stops when its
share of --minutes is spent, and the report names what it left out. `--dry-run` runs every line on a CPU, with tiny
shapes and kernels interpreted; its figures mean nothing.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

SHARES = {"numerics": 1.0, "autotune": 2.0, "kernels": 2.0, "end_to_end": 5.0}
MINUTES = 7.5


def read_parts(text: str) -> list[str]:
    """The parts named in `--only`."""
    names = text.split(",")
    if unknown := set(names) - SHARES.keys():
        raise argparse.ArgumentTypeError(f"unknown {', '.join(sorted(unknown))}; there are {', '.join(SHARES)}")
    return [name for name in SHARES if name in names]


def options() -> argparse.Namespace:
    results = Path(__file__).parents[1] / "results" / "gpu"
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="under three minutes: one model, no tuning")
    parser.add_argument("--dry-run", action="store_true", help="every line, on a CPU, of tiny shapes")
    parser.add_argument("--only", type=read_parts, metavar="PART,...", help=f"of {', '.join(SHARES)}")
    parser.add_argument("--minutes", type=float, help="how long it may take, nearly (default: 7.5; 2.5 with --quick)")
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"the result (default: {results}/gpu.json)")
    parser.add_argument(
        "--peer-python", type=Path, default=Path(sys.executable), help="interpreter with torch and transformers"
    )
    args = parser.parse_args(namespace=argparse.Namespace(shares=SHARES))
    args.minutes = args.minutes or (60 if args.dry_run else 2.5 if args.quick else MINUTES)
    args.only = args.only or [part for part in SHARES if part != "autotune" or not args.quick]
    if args.json is None:
        args.json = (Path(tempfile.mkdtemp(prefix="gpu-dry-run-")) if args.dry_run else results) / "gpu.json"
    return args


def main() -> None:
    args = options()
    if args.dry_run:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["NPROC"] = "64"  # the threads of an interpreted kernel wait for one another in those of XLA:CPU
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the peer is on the same GPU
    from benchmarks.gpu.run import run  # JAX reads the environment when it is imported

    run(args)


if __name__ == "__main__":
    main()
