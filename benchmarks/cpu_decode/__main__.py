"""Prefill and decode on a CPU against other engines, and against what the memory delivers.

    python -m benchmarks.cpu_decode [--quick] [--part NAME ...] [--json benchmarks/results/KIND/cpu_decode.json]
    python -m benchmarks.cpu_decode --model qwen3-0.6b [--json benchmarks/results/KIND/cpu_decode-qwen3-0.6b.json]

Parts: `peers` has CTranslate2, llama.cpp, ik_llama.cpp and transformers on a random Llama shape, or with `--model` that
of Qwen3 0.6B or Gemma 3 1B; `steps` has whole decode steps of 1B parameters against the read bandwidth, also with 8192
tokens of context; `products` has their products alone; `mixture` has 64 experts top-2 against a dense model of the
active size; `host` has the host's part of a step, and a warm start. Unless parts are named, `--quick` has `peers` and
`host`; `--model` has `peers` alone. The JSON is rewritten after every figure.

`python -m benchmarks.cpu_decode.profile` prints where a decode step's time goes.
"""

import argparse
from typing import Any

from benchmarks.report import run_parts
from benchmarks.workers import MODELS, OWN_MODEL, add_options
from jaxinfer.compiled.cpu_library import library_state

PARTS = ("peers", "steps", "products", "mixture", "host")
"""The modules that measure, each by its `run`; `shares` checks what they have read, at last."""
QUICK = ("peers", "host")


def parts_of(args: argparse.Namespace) -> tuple[str, ...]:
    """The parts to run. Exits if parts that have a model of their own are asked for with another."""
    if args.model != OWN_MODEL:
        if set(args.part or ()) - {"peers"}:
            raise SystemExit(f"--model {args.model} is for the part peers; the others have models of their own.")
        return ("peers",)
    return tuple(args.part or (QUICK if args.quick else PARTS))


def kernels_row() -> dict[str, Any]:
    """Return which library of CPU kernels runs, compiled if need be, or why none does, as a row."""
    state = library_state()
    if state.library is None:
        return {"figure": "CPU kernels", "library": "none", "reason": state.reason}
    return {
        "figure": "CPU kernels",
        "library": state.library.digest[:12],
        "level": state.library.level,
        "limits": dict(state.library.limits),
        "compiler": state.compiler,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu_decode",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", choices=PARTS, action="append", help="measure this part alone; may be repeated")
    parser.add_argument("--model", choices=MODELS, default=OWN_MODEL, help="the model's shape in the part peers")
    parser.add_argument("--quick", action="store_true", help="two rounds instead of seven, fewer parts, no bfloat16")
    parser.add_argument("--context", type=int, default=352, help="tokens before the first timed decode step")
    add_options(parser)
    args = parser.parse_args()
    args.rounds, args.steps = (2, 8) if args.quick else (7, 16)
    parts = parts_of(args)
    if "host" in parts and not args.demo.exists():
        raise SystemExit(f"No model directory at {args.demo}: give one as --demo.")
    run_parts("benchmarks.cpu_decode", (*parts, "shares"), args, about=kernels_row())


if __name__ == "__main__":
    main()
