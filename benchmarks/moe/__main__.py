"""Mixtures of experts, measured.

    python -m benchmarks.moe [--part NAME ...] [--json benchmarks/results/KIND/moe.json]

Parts, in processes of their own where engines are compared: `kernels` has gating by tables against one-hot masks, and
an MLP of experts against dense ones and against a loop over all experts; `models` has decode steps of a mixture against
dense models of the active size and as large as the experts touched, and a random Qwen3-MoE against transformers and
llama.cpp; `streaming` has a mixture whose experts come from disk, in an eighth of its memory; `meshes` has the bytes
that devices exchange, the tokens of every family on meshes, and two lanes against one. The JSON is rewritten after
every figure.
"""

import argparse

from benchmarks.report import run_parts
from benchmarks.workers import add_options

PARTS = ("kernels", "models", "streaming", "meshes")
"""The modules that measure, each by its `run`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="measure this part alone; may be repeated")
    parser.add_argument("--rounds", type=int, default=7, help="rounds in which all take turns")
    add_options(parser)
    args = parser.parse_args()
    args.work_dir = args.work_dir.with_name("moe")
    run_parts("benchmarks.moe", args.part or PARTS, args)


if __name__ == "__main__":
    main()
