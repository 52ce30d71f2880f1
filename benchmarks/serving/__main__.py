"""The HTTP server: the cost of an event, its speed against other servers, and its manners under overload.

    python -m benchmarks.serving [--quick] [--only front_end,overhead] [--json benchmarks/results/KIND/serving.json]

`front_end` has a clock in place of the device, so that nothing is measured but what the host does for a stream.
`overhead` runs the model of `peers/make_model.py` with and without HTTP. `compare` serves it next to vLLM and
llama_cpp.server; a peer that is not there makes the checks invalid. `overload` sends ten times what saturates the
server, `restart` times one that starts after its predecessor was killed. `agents` runs an agent's transcript, and
measures the parsers of answers. Servers are started again for each round, and
take turns. The JSON is rewritten after every part.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import ROOT, Report, check_that_no_part_is_lost
from benchmarks.serving.agents import agents
from benchmarks.serving.compare import compare
from benchmarks.serving.front_end import front_end
from benchmarks.serving.overhead import overhead
from benchmarks.serving.overload import overload
from benchmarks.serving.restart import restart
from benchmarks.serving.settings import Settings
from benchmarks.workers import add_options, parts_reader, run_parts

PARTS: dict[str, Callable[[Report, Settings], None]] = {
    "front_end": front_end,
    "overhead": overhead,
    "compare": compare,
    "overload": overload,
    "restart": restart,
    "agents": agents,
}
read_parts = parts_reader(PARTS)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke test: the demo model, few tokens, one round")
    parser.add_argument("--rounds", type=int, default=3, help="of every server (default: 3)")
    parser.add_argument("--only", type=read_parts, metavar="PART,...", help=f"of {', '.join(PARTS)}")
    parser.add_argument(
        "--vllm-python", type=Path, default=ROOT / ".venv-vllm/bin/python", help="interpreter with vLLM (make vllm)"
    )
    add_options(parser)
    args = parser.parse_args()
    if not args.demo.exists():
        raise SystemExit(f"No model directory at {args.demo}: give one as --demo.")
    settings = Settings(
        quick=args.quick,
        rounds=1 if args.quick else args.rounds,
        folder=args.work_dir,
        demo=args.demo,
        peer_python=args.peer_python,
        vllm_python=args.vllm_python,
        threads=args.threads,
    )
    names = args.only or list(PARTS)
    check_that_no_part_is_lost(args.json, names)
    report = Report()
    report.print_header()
    report.row(figure="settings", quick=args.quick, rounds=settings.rounds, peer_threads=args.threads)
    run_parts(PARTS, names, report, settings, args.json)


if __name__ == "__main__":
    main()
