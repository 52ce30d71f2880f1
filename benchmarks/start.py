"""How long people wait for the first token, from a fresh process, against llama.cpp and transformers.

    python -m benchmarks.start [--json benchmarks/results/KIND/start.json] [--no-peers]

The demo model in float32, greedy, one prompt. Every figure is the wall time of a new process, from its start until the
first token, medians over rounds in which all take turns; files are in the page cache, as one unmeasured round comes
first. *Cold* has an empty folder of kept executables for each process, *warm* a full one. `classify` is the whole
command `jaxinfer elastic classify` of two images, cold.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import ROOT, Report
from benchmarks.workers import JAXINFER, PEERS, EngineError, find_peers
from examples.export_demo_model import export_llama

PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
VIT = ROOT / "benchmarks/data/elastic_vit_small"
FIRST_TOKEN = """
import json, sys, time
start = time.perf_counter()
from jaxinfer import LLM, SamplingParams
imported = time.perf_counter() - start
llm = LLM(sys.argv[1])
output = next(iter(llm.stream(sys.argv[2], SamplingParams(temperature=0))))
print(json.dumps({"token": output.outputs[0].token_ids[0], "import_ms": 1e3 * imported}), flush=True)
sys.stdin.read()
"""


def first_line(command: list[str | Path], **environment: str) -> tuple[float, dict]:
    """The seconds from the start of a process to the line that it prints, and the JSON object in that."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    start = time.perf_counter()
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - start
    if not line:
        raise EngineError(f"{command[0]} ended with status {process.returncode} and no token; see above.")
    return seconds, json.loads(line)


def ours(cache: Path) -> tuple[float, dict]:
    command = [sys.executable, "-c", FIRST_TOKEN, ROOT / "examples/demo_model", PROMPT]
    return first_line(command, JAXINFER_CACHE=str(cache), JAXINFER_PROGRESS="0")


def write_images(folder: Path) -> list[Path]:
    """Write two images of digits."""
    from PIL import Image
    from sklearn.datasets import load_digits

    pixels, _ = load_digits(return_X_y=True)
    files = []
    for index in (0, 1):
        digit = 255 - pixels[index].reshape(8, 8) * 15
        files.append(folder / f"digit-{index}.png")
        Image.fromarray(digit.astype("uint8")).resize((64, 64)).save(files[-1])
    return files


def classify(images: list[Path], cache: Path) -> float:
    """Measure the seconds of `jaxinfer elastic classify` for these images."""
    start = time.perf_counter()
    subprocess.run(
        [JAXINFER, "elastic", "classify", VIT, *images, "--task", "digits"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAXINFER_CACHE": str(cache)},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return time.perf_counter() - start


def peers(python: Path, work: Path) -> dict[str, Callable[[], tuple[float, dict]]]:
    """Write the demo model in the peers' formats, and return a function for each that starts it."""
    hf, gguf = work / "hf", work / "f32.gguf"
    export_llama(ROOT / "examples/demo_model", hf)
    subprocess.run([python, PEERS / "make_gguf.py", hf, gguf], check=True)
    script, tokenizer = PEERS / "first_token.py", hf / "tokenizer.json"
    return {
        engine: lambda engine=engine, model=model: first_line([python, script, engine, model, tokenizer, PROMPT])
        for engine, model in (("llama.cpp", gguf), ("transformers", hf))
    }


def measure(report: Report, engines: dict[str, Callable[[], tuple[float, dict]]], rounds: int) -> dict[str, float]:
    """Start all engines in turn, once unmeasured; return the median seconds of each. Exits if their tokens differ."""
    times: dict[str, list[float]] = {engine: [] for engine in engines}
    imports, tokens = [], {}
    for counted in [False] + [True] * rounds:
        for engine, start in engines.items():
            time.sleep(0.2)  # until the previous process has ended
            seconds, told = start()
            tokens[engine] = told["token"]
            if "version" in told:
                report.versions[engine] = told["version"]
            if counted:
                times[engine].append(seconds)
                imports += [told["import_ms"]] if "import_ms" in told else []
    if len(set(tokens.values())) != 1:
        raise SystemExit(f"The engines' first tokens differ, so no comparison would be meaningful: {tokens}")
    for engine, seconds in times.items():
        report.row(
            figure="first token",
            engine=engine,
            s=round(statistics.median(seconds), 3),
            all_s=[round(value, 3) for value in seconds],
        )
    report.row(figure="import", engine="jaxinfer", ms=round(statistics.median(imports), 1))
    return {engine: statistics.median(seconds) for engine, seconds in times.items()} | {
        "import": statistics.median(imports)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds")
    parser.add_argument("--no-peers", action="store_true", help="measure jaxinfer alone")
    parser.add_argument(
        "--peer-python", type=Path, help="interpreter with the peers (default: $JAXINFER_PEERS or make peers)"
    )
    args = parser.parse_args()

    report = Report()
    report.print_header()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        cold, warm = work / "cold", work / "warm"

        def start_cold() -> tuple[float, dict]:
            shutil.rmtree(cold, ignore_errors=True)
            return ours(cold)

        engines = {"jaxinfer, cold": start_cold, "jaxinfer, warm": lambda: ours(warm)}
        if not args.no_peers:
            engines |= peers(find_peers(args.peer_python), work)
        seconds = measure(report, engines, args.rounds)

        images, classified = write_images(work), []
        for _ in range(3):
            shutil.rmtree(cold, ignore_errors=True)
            classified.append(classify(images, cold))
        report.row(figure="classify two images, cold", engine="jaxinfer", all_s=[round(s, 2) for s in classified])

    report.check("import_ms", seconds["import"], "ms", target=1500, better="lower")
    report.check("cold_first_token_s", seconds["jaxinfer, cold"], "s", target=10, better="lower")
    report.check("warm_first_token_s", seconds["jaxinfer, warm"], "s", target=1.5, better="lower")
    report.check("classify_two_images_cold_s", statistics.median(classified), "s", target=15, better="lower")
    for peer in ("llama.cpp", "transformers"):
        if peer in seconds:
            report.check(f"warm_vs_{peer}", seconds[peer] / seconds["jaxinfer, warm"], "x", target=1.0)
    report.finish(args.json)


if __name__ == "__main__":
    main()
