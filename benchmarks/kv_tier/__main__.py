"""The tiers of the KV cache: what they gain where the device's pages are few, and cost where they are not needed.

    python -m benchmarks.kv_tier [--quick] [--only resume,chat] [--json benchmarks/results/KIND/kv_tier.json]

`resume` times the next token of a preempted sequence whose pages were overwritten, restored and computed again. `chat`
times the first tokens of sessions that take turns, of which the device has room for a quarter. `idle` compares the
throughput on prompts that never come again. `restart` times the next turn of sessions of a process that was killed,
from disk and computed again. `both_ends` times a prompt whose copies are slowed: copied, computed, and from both ends.
`sliced` streams the model from disk, with four times the rows that the device has pages for. All run a model of 246M
random weights. The JSON is rewritten after every part.
"""

from collections.abc import Callable

from benchmarks.kv_tier.both_ends import both_ends
from benchmarks.kv_tier.chat import chat
from benchmarks.kv_tier.idle import idle
from benchmarks.kv_tier.restart import restart
from benchmarks.kv_tier.resume import resume
from benchmarks.kv_tier.settings import Settings
from benchmarks.kv_tier.sliced import sliced
from benchmarks.report import Report
from benchmarks.workers import part_parser, run_chosen_parts

PARTS: dict[str, Callable[[Report, Settings], None]] = {
    "resume": resume,
    "chat": chat,
    "idle": idle,
    "restart": restart,
    "both_ends": both_ends,
    "sliced": sliced,
}


def main() -> None:
    args = part_parser("kv_tier", PARTS, __doc__, quick="a small model, few rounds").parse_args()
    run_chosen_parts(PARTS, args, Settings(args.quick, args.work_dir))


if __name__ == "__main__":
    main()
