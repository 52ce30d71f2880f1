"""Bits per byte of the demo model in GGUF's types, as jaxinfer and llama.cpp read the same files, on held-out source.

    python -m benchmarks.gguf_quality [--quick] [--json FILE]

The text is the eight smallest modules of `benchmarks.quality`. llama.cpp quantises the files; jaxinfer reads them as
`LLM("FILE.gguf")` does (quantised matrices are stored in bfloat16), and once more with the exact values (`--dtype
float32`).
"""

import argparse
import json
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from benchmarks.quality import bits, windows
from benchmarks.report import ROOT, Report
from benchmarks.workers import PEERS, find_peers
from examples.export_demo_model import export_llama
from examples.train_demo_model import read_corpus
from jaxinfer import LLM
from jaxinfer.models.files.conversion import convert

TYPES = ("F32", "Q8_0", "Q4_K")
TARGET = 0.01
MODULES = 8


def measure(report: Report, python: Path, work: Path, texts: list[str]) -> None:
    """Have both engines read the demo model in every type, and compare the bits that they need."""
    size = sum(len(text.encode()) for text in texts)
    export_llama(ROOT / "examples/demo_model", work / "hf")
    source, cut = work / "source.gguf", work / "windows.json"
    subprocess.run([python, PEERS / "make_gguf.py", work / "hf", source], check=True)
    with LLM(ROOT / "examples/demo_model", max_batch=1) as llm:
        windowed = windows(llm, texts)
    cut.write_text(json.dumps(windowed))
    done = subprocess.run(
        [python, PEERS / "gguf_quality.py", source, cut, *TYPES], check=True, text=True, stdout=subprocess.PIPE
    )
    for told in map(json.loads, done.stdout.splitlines()):
        type_, theirs = told["type"], told["bits"] / size
        report.versions["llama.cpp"] = told["version"]
        ours = {}
        for stored in (None, "float32"):
            convert(work / f"{type_}.gguf", model := work / f"{type_}-{stored}", dtype=stored)
            with LLM(model, max_batch=4, dtype="float32") as llm:
                ours[stored] = bits(llm, windowed) / size
        figures = {"llama.cpp": theirs, "jaxinfer": ours[None], "jaxinfer, exact values": ours["float32"]}
        report.row(type=type_, bytes=size, **{name: round(value, 4) for name, value in figures.items()})
        print(f"{type_:5}", *(f"{name} {value:.5f}" for name, value in figures.items()), "bits/byte", flush=True)
        off = abs(ours[None] / theirs - 1)
        report.check(f"gguf_{type_}_off_llama_cpp", off, "of llama.cpp's", target=TARGET, better="lower")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the four smallest modules only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    parser.add_argument(
        "--peer-python", type=Path, help="interpreter with the peers (default: $JAXINFER_PEERS or make peers)"
    )
    args = parser.parse_args()
    texts = sorted(read_corpus(Path(sysconfig.get_path("stdlib"))).held_out.values(), key=len)
    report = Report()
    report.print_header()
    with tempfile.TemporaryDirectory() as work:
        measure(report, find_peers(args.peer_python), Path(work), texts[: 4 if args.quick else MODULES])
    report.finish(args.json)


if __name__ == "__main__":
    main()
