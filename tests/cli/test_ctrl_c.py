"""Ctrl-C at bad moments, in real processes on a terminal: they end soon, say so, and leave nothing half-written."""

import hashlib
import os
import re
import sys
import time
from pathlib import Path

import pytest

from jaxinfer.models.config import ResNetConfig
from jaxinfer.models.vision.resnet import ResNet
from tests.cli.test_experts_command import FILE
from tests.experts.boards import save
from tests.terminal import play

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "demo_model"
MOST = 4.0
"""Seconds to end in: 2 on a machine that has nothing else to do."""
PATIENCE = 120.0

pytestmark = pytest.mark.slow


class Ended:
    """A process after its end.

    Attributes:
      status: 130 also for a signal, as shells show it.
      seconds: from Ctrl-C to the end.
      text: the lines that the terminal shows in the end.
    """

    def __init__(self, played):
        self.status, self.seconds, self.written = played.status, played.ending, played.written
        self.text = f"\n{played.text}"

    def check(self):
        """Check what holds after Ctrl-C for every command."""
        assert self.status == 130, self.text
        assert self.seconds < MOST
        assert "Traceback" not in self.text
        assert "interrupted" in self.text
        assert self.written.rfind("\x1b[?25h") >= self.written.rfind("\x1b[?25l"), "the cursor is hidden"


def run(*arguments, cache, until=None, after=0.0):
    """Run Python on a terminal of 80 columns; press Ctrl-C some seconds after `until` is in its output."""
    changed = {"JAXINFER_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
    environment = {k: v for k, v in os.environ.items() if k not in ("JAXINFER_PROGRESS", "XLA_FLAGS")} | changed

    def due(written):
        if there := re.search(until, written, re.DOTALL) is not None:
            time.sleep(after)
        return there

    return Ended(
        play(
            [sys.executable, *map(str, arguments)],
            cwd=ROOT,
            environment=environment,
            interrupt_when=due if until else None,
            by_signal=True,
            timeout=PATIENCE,
        )
    )


def jaxinfer(*arguments, **options):
    return run("-m", "jaxinfer", *arguments, **options)


def check_cache(folder):
    """Check that every file that others would read is whole: it begins with a checksum of the rest."""
    files = [file for file in folder.rglob("*") if file.is_file() and not file.name.startswith(".")]
    for file in files:
        content = file.read_bytes()
        assert content[:32] == hashlib.sha256(content[32:]).digest(), file
    return files


GENERATE = ("generate", MODEL, "def main():", "--temperature", 0, "--max-tokens")


def test_generate(tmp_path):
    ended = jaxinfer(*GENERATE, 900, cache=tmp_path, until="compiling")
    ended.check()
    assert " main() for" not in ended.text
    check_cache(tmp_path)
    again = jaxinfer(*GENERATE, 8, cache=tmp_path)
    assert again.status == 0
    assert "[8 tokens, length" in again.text
    assert check_cache(tmp_path)
    ended = jaxinfer(*GENERATE, 900, cache=tmp_path, until=r"def main\(\):.{30}")
    ended.check()
    assert " main() for" in ended.text
    check_cache(tmp_path)


SCRIPT = """
import sys, time
from jaxinfer import LLM, SamplingParams
print("begun", flush=True)
with LLM(sys.argv[1]) as llm:
    print(llm.generate("def main():", SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].text)
"""


@pytest.mark.parametrize(("until", "after"), [("begun", 0.0), ("begun", 0.5), ("compiling", 0.0)])
def test_a_script(tmp_path, until, after):
    """Its traceback is Python's way; but it ends at once.

    Python ignores an exception in JAX's callback of the garbage collector, which can take 0.1 s: then a user presses
    Ctrl-C again.
    """
    for again in range(3):
        ended = run("-c", SCRIPT, MODEL, cache=tmp_path / str(again), until=until, after=after + 0.2 * again)
        if "Exception ignored in: <function _xla_gc_callback" not in ended.text.replace("\n", ""):
            break
    assert ended.status in (130, 1)
    assert ended.seconds < MOST
    assert "KeyboardInterrupt" in ended.text
    check_cache(tmp_path / str(again))


BENCH = ("bench", "latency", MODEL, "--batch", 1, "--rounds", 1000)


def test_bench(tmp_path):
    for until in ("compiling", r"rounds: [1-9]\d* of 1002"):  # two rounds warm up
        ended = jaxinfer(*BENCH, cache=tmp_path, until=until)
        ended.check()
        check_cache(tmp_path)


def test_tune(tmp_path):
    ended = jaxinfer("tune", MODEL, "--context", 64, cache=tmp_path, until=r"measuring calls: [1-9]")
    ended.check()
    assert "operation" in ended.text, "what is measured so far"
    assert [file.parent.name for file in check_cache(tmp_path) if file.parent.name == "choices"] == ["choices"]


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    folder = tmp_path_factory.mktemp("board")
    names = ("c0", "c1", "c2")
    config = ResNetConfig(  # as large as it must be to compile for seconds
        labels=("ok", "defect"), widths=(64, 128, 256), depths=(2, 2, 2), stem=16, bottleneck=False, image_size=64
    )
    for seed, name in enumerate(names):
        save(folder / name, ResNet, config, "resnet", seed)
    (folder / "board.toml").write_text(
        FILE.replace("60kB", "60MB") + "\n".join(f'{name} = {{checkpoint = "{name}"}}' for name in names)
    )
    return folder / "board.toml"


def test_experts(board, tmp_path):
    ended = jaxinfer("experts", "profile", board, cache=tmp_path, until="compiling")
    ended.check()
    ended = jaxinfer("experts", "run", board, "--random", 100_000, cache=tmp_path, until=r"K\d/10 ")
    ended.check()
    summary = re.search(r"\n(\d+) inputs in .*; 0 failed; (\d+) not judged\.\n\d+ batches;", ended.text)
    assert summary, ended.text[-1000:]
    judged, left = summary.groups()
    shown = len(re.findall(r"[\r\n]K\d/\d+  (?:ok|defect) ", ended.text))
    assert shown > 5
    assert int(judged) - shown in (0, 1)  # Ctrl-C may come between counting and showing
    assert int(judged) + int(left) == 100_000
    check_cache(tmp_path)
    ended = jaxinfer(
        "experts", "simulate", board, "--requests", 200_000, cache=tmp_path, until="simulating inputs: [1-9]"
    )
    ended.check()
    assert "200000 inputs on a simulated clock" in ended.text
    again = jaxinfer("experts", "run", board, "--random", 5, cache=tmp_path)
    assert again.status == 0
    assert "5 inputs in " in again.text
    assert not [path for path in board.parent.rglob("*") if "partial" in path.name or path.name.endswith(".tmp")]


def test_circuit_board(tmp_path):
    folder = tmp_path / "board"
    arguments = ROOT / "examples" / "circuit_board.py", "--folder", folder, "--types", 2, "--images", 5000
    ended = run(*arguments, cache=tmp_path / "cache", until="fitting classifier 2 of 2")
    ended.check()
    assert [path.name for path in folder.iterdir()] == ["resistor-0"]
