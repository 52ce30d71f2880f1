"""A newcomer's tour in a terminal of 80 x 24: set-up, README and the how-to pages, typical mistakes, Ctrl-C.

It holds: no figure is cut, nothing is silent for more than 2 s, no traceback, exit codes, nothing left behind.
"""

import collections
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap

import pytest

from tests.docs.snippets import check_played, read_blocks, runs, typed
from tests.terminal import Limits, Played, play

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).parents[2]
DEMO = ROOT / "examples/demo_model"
VIT = ROOT / "examples/elastic_vit"
JAXINFER = [sys.executable, "-m", "jaxinfer"]
PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
SILENCE = 2.0  # seconds without a sign
ENDING = 2.0  # seconds from Ctrl-C to the prompt of the shell
REFUSAL = 5.0  # seconds in which a mistake is refused: imports, and reading small files


class Tour:
    """A home of its own, in which commands are typed."""

    def __init__(self, folder: pathlib.Path):
        self.home, self.work = folder / "home", folder / "work"
        for path in (self.home, self.work):
            path.mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX", "XLA", "NPROC"))}
        self.environment = kept | {"HOME": str(self.home), "PYTHONPATH": str(ROOT), "HF_ENDPOINT": "http://127.0.0.1:9"}

    def type(self, *arguments: object, **options: object) -> Played:
        """Run `jaxinfer ARGUMENTS`, and hold what holds of every command."""
        return self.run([*JAXINFER, *map(str, arguments)], **options)

    def run(self, command: list, *, silence: float = SILENCE, cwd: pathlib.Path | None = None, **options) -> Played:
        limits = Limits()
        played = play(command, cwd=cwd or self.work, environment=self.environment, **options)
        assert "Traceback (most recent call last)" not in played.written, played.text
        assert "…" not in played.text, played.text  # a figure that was cut
        limits.hold("silence", played.silence, silence, played)
        return played

    @property
    def left(self) -> list[str]:
        """Files that are half-written: under the names that they have until they are whole."""
        return [str(path) for path in self.home.rglob("*") if re.search(r"\.(partial|tmp|incomplete)\b", path.name)]


@pytest.fixture
def tour(tmp_path):
    return Tour(tmp_path)


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """A tour whose programs are compiled, for what is tried with the demo model."""
    made = Tour(tmp_path_factory.mktemp("tour"))
    assert made.type("generate", DEMO, "--prompt", PROMPT, "--max-tokens", 8).status == 0
    return made


@pytest.fixture
def images(tmp_path):
    from PIL import Image  # the environment of ahead-of-time tests collects this file without it

    files = [tmp_path / f"{name}.png" for name in "ab"]
    for file in files:
        Image.new("RGB", (32, 32), "white").save(file)
    return files


# Set-up, and README's lines


LEFT_OUT = {"network": 6}
"""Blocks of README and the how-to pages that are not run, by what they need."""


def test_every_page_from_a_clone(tour):
    """Set up by `make demo`, and run README and the how-to pages as printed, each in a folder with the examples."""
    clone = tour.work / "jaxinfer"
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    tour.environment.pop("PYTHONPATH")
    played = tour.run(["make", "demo"], cwd=clone, silence=20)  # pip says nothing while it builds
    assert played.status == 0, played.text
    assert "self" in played.text
    status = subprocess.run(["git", "status", "--porcelain"], cwd=clone, capture_output=True, text=True, check=True)
    assert status.stdout == ""

    shutil.rmtree(clone / "tests")
    tour.environment["PATH"] = f"{clone / '.venv/bin'}{os.pathsep}{tour.environment['PATH']}"
    left_out, wrong = collections.Counter(), []
    for page in (clone / "README.md", *sorted((clone / "docs/how-to").glob("*.md"))):
        blocks = read_blocks(page, page.read_text())
        left_out.update(block.needs for block in blocks if block.needs)
        blocks = [*filter(runs, blocks)]
        folder = tour.work / page.stem
        shutil.copytree(clone / "examples", folder / "examples")
        try:
            played = tour.run([clone / ".venv/bin/python", *typed(blocks)], cwd=folder, silence=20)
            check_played(blocks, played, folder)
        except AssertionError as error:  # the other pages may tell more
            wrong.append(str(error))
    assert wrong == []
    assert left_out == LEFT_OUT
    assert tour.left == []


def test_first_text_cold(tour):
    played = tour.type("generate", DEMO, "--prompt", PROMPT, "--temperature", 0, "--max-tokens", 16)
    assert played.status == 0, played.text
    assert "compiling" in played.written  # it took long, and said so
    # But not where the text is, apart from the kernels of the next start if they are not ready.
    assert "compiling" not in "\n".join(line for line in played.lines if not line.startswith("warning: XLA runs"))
    assert PROMPT.splitlines()[-1] in played.text
    assert tour.left == []


def test_first_text_from_python(tour):
    script = f"""
        from jaxinfer import LLM, SamplingParams
        llm = LLM({str(DEMO)!r})
        print(llm.generate({PROMPT!r}, SamplingParams(temperature=0, max_tokens=16))[0].outputs[0].text)
    """
    played = tour.run([sys.executable, "-c", textwrap.dedent(script)])
    assert played.status == 0, played.text
    assert "self" in played.text


def test_help_and_version(tour):
    for arguments in (["--help"], ["--version"], ["generate", "--help"], ["elastic", "--help"], ["experts", "--help"]):
        played = tour.type(*arguments)
        assert played.status == 0
        assert all(len(line) <= 80 for line in played.lines)


@pytest.mark.parametrize(
    "command",
    [
        ["info", DEMO],
        ["info", DEMO, "--costs"],
        ["bench", "latency", DEMO, "--batch", "1,2", "--prompt-tokens", 16, "--output-tokens", 4, "--rounds", 3],
        ["bench", "throughput", DEMO, "--requests", 4, "--prompt-tokens", 16, "--output-tokens", 4],
        ["plan", DEMO],
        ["cache"],
        ["elastic", "profile", VIT, "--task", "digits"],
    ],
    ids=lambda command: " ".join(map(str, command[:2])).replace(str(ROOT), ""),
)
def test_tables_are_whole(warm, command):
    played = warm.type(*command)
    assert played.status == 0, played.text
    assert re.search(r"\d", played.text)


# Typical mistakes


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "nothere", "--prompt", "x"], "nothere"),
        (["generate", DEMO], "prompt"),
        (["generate", DEMO, "--prompt", "x", "--dtype", "fp17"], "fp17"),
        (["generate", DEMO, "--prompt", "x", "--mesh", "tensor=2"], "JAX_NUM_CPU_DEVICES"),
        (["generate", DEMO, "--prompt", "x", "--max-new-tokens", 5], "--max-tokens"),
        (["convert", "nobody/nothing", "out"], "hf download"),
        (["elastic", "classify", VIT, "nothere.png", "--task", "digits"], "nothere.png"),
        (["elastic", "classify", VIT, "IMAGE", "--task", "cats"], "cats"),
        (["elastic", "classify", VIT, "IMAGE", "--task", "digits", "--level", "-99"], "-99"),
        (["elastic", "run", VIT, "--arrivals", "sinus"], "sinus"),
        (["elastic", "run", VIT, "--policy", "magic"], "magic"),
        (["experts", "plan", "nothere.toml"], "nothere.toml"),
        (["bench", "latency", DEMO, "--prompt-tokens", "-1"], "--prompt-tokens"),
    ],
    ids=lambda value: " ".join(map(str, value)).replace(str(ROOT), "") if isinstance(value, list) else "",
)
def test_a_mistake_is_refused_at_once(tour, images, arguments, says):
    limits = Limits()
    played = tour.type(*[images[0] if argument == "IMAGE" else argument for argument in arguments])
    assert played.status == 2, played.text
    assert says in "".join(played.lines)  # lines of the terminal, which wraps anywhere
    allowed = 15 if says == "hf download" else REFUSAL  # the network may be slow to say that it is not there
    limits.hold("refusal", played.seconds, allowed, played)
    assert tour.left == []
    assert list(tour.work.iterdir()) == []


def test_a_name_of_vllm_is_told_ours(tour):
    script = f"from jaxinfer import LLM\nLLM({str(DEMO)!r}, tensor_parallel_size=2)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=tour.environment)
    assert re.search(r"tensor_parallel_size.*mesh", done.stderr.splitlines()[-1])


# Ctrl-C


@pytest.mark.parametrize(
    ("command", "when"),
    [
        (["generate", DEMO, "--prompt", PROMPT], "compiling"),
        (["generate", DEMO, "--prompt", PROMPT, "--max-tokens", 900, "--ignore-eos"], "push"),
        (["elastic", "classify", VIT, "IMAGE", "--task", "digits"], "compiling"),
        (["elastic", "run", VIT, "--seconds", 60], "compiling|timing|measuring"),
        (["bench", "latency", DEMO], "compiling"),
    ],
    ids=["generate compiling", "generate streaming", "elastic classify", "elastic run", "bench"],
)
def test_ctrl_c_ends_at_once(tour, images, command, when):
    limits = Limits()
    command = [images[0] if argument == "IMAGE" else argument for argument in command]
    played = tour.type(*command, interrupt_when=lambda written: re.search(when, written) is not None)
    assert played.status == 130, played.text
    assert "interrupted" in played.lines  # not behind ^C
    limits.hold("end after Ctrl-C", played.ending, ENDING, played)
    assert tour.left == []


def test_ctrl_c_while_converting_leaves_nothing_half_written(tour):
    hf = tour.work / "hf"
    shutil.copytree(ROOT / "tests/goldens/llama_llama3", hf)
    script = f"""
        import sys
        sys.argv = ["jaxinfer", "convert", {str(hf)!r}, "out"]
        from jaxinfer.models.files import conversion
        stored = conversion._stored_leaves
        def slow(*arguments):  # a model of any size
            import time
            for leaf in stored(*arguments):
                time.sleep(1)
                yield leaf
        conversion._stored_leaves = slow
        from jaxinfer.__main__ import main
        main()
    """
    limits = Limits()
    played = tour.run(
        [sys.executable, "-c", textwrap.dedent(script)], interrupt_when=lambda written: "converting" in written
    )
    assert played.status == 130, played.text
    limits.hold("end after Ctrl-C", played.ending, ENDING, played)
    assert not (tour.work / "out").exists()
    assert tour.type("convert", hf, "out").status == 0
    assert sorted(path.name for path in tour.work.iterdir()) == ["hf", "out"]
