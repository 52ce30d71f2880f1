"""The tiers of the KV cache: what they gain where the device's pages are few, and cost where they are not needed.

    python -m benchmarks.kv_tier [--quick] [--only resume,chat] [--json benchmarks/results/KIND/kv_tier.json]

`resume` times the next token of a preempted sequence whose pages were overwritten, restored and computed again. `chat`
times the first tokens of sessions that take turns, of which the device has room for a quarter. `idle` compares the
throughput on prompts that never come again. `restart` times the next turn of sessions of a process that was killed,
from disk and computed again. `both_ends` times a prompt whose copies are slowed: copied, computed, and from both ends.
`sliced` streams the model from disk, with four times the rows that the device has pages for. All run a model of 246M
random weights. The JSON is rewritten after every part.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks.kv_tier.both_ends import both_ends
from benchmarks.kv_tier.chat import chat
from benchmarks.kv_tier.idle import idle
from benchmarks.kv_tier.restart import restart
from benchmarks.kv_tier.resume import resume
from benchmarks.kv_tier.settings import Settings
from benchmarks.kv_tier.sliced import sliced
from benchmarks.report import Report, check_that_no_part_is_lost
from benchmarks.workers import parts_reader, run_parts
from jaxinfer.compiled import cache_folder

PARTS: dict[str, Callable[[Report, Settings], None]] = {
    "resume": resume,
    "chat": chat,
    "idle": idle,
    "restart": restart,
    "both_ends": both_ends,
    "sliced": sliced,
}
read_parts = parts_reader(PARTS)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kv_tier",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a smoke test: a small model, few rounds")
    parser.add_argument("--only", type=read_parts, metavar="PART,...", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    parser.add_argument("--work-dir", type=Path, default=cache_folder() / "benchmarks" / "kv_tier")
    args = parser.parse_args()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    settings, names = Settings(args.quick, args.work_dir), args.only or list(PARTS)
    check_that_no_part_is_lost(args.json, names)
    report = Report()
    report.print_header()
    report.row(figure="settings", quick=args.quick)
    run_parts(PARTS, names, report, settings, args.json)


if __name__ == "__main__":
    main()
