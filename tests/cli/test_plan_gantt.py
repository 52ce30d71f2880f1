"""`jaxinfer plan --gantt` as a user runs it."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jaxinfer.cli import app

ROOT = Path(__file__).parents[2]


def run(*arguments, code=0):
    done = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done


def headings(text):
    """The name, units and idle share of each schedule."""
    return [
        (name, float(units), float(idle))
        for name, units, idle in re.findall(r"^(.*): ([\d.]+) units, ([\d.]+)% idle$", text, re.MULTILINE)
    ]


def test_by_default_the_papers_second_figure_is_drawn():
    """Four sequences, four stages, three tokens."""
    text = run("--gantt", "-").stdout
    drained, queued = headings(text)
    assert drained == ("drained after each token (Fig. 2a)", 21.0, 42.9)
    assert queued == ("generated tokens queued (Fig. 2b)", 15.0, 20.0)
    rows = [line.split()[2:] for line in text.splitlines() if line.startswith("stage 0")]
    each = [f"{micro_batch}{token}" for token in "abc" for micro_batch in range(4)]
    assert rows[1] == [*each, "..", "..", ".."]
    assert rows[0] == [*each[:4], *[".."] * 3, *each[4:8], *[".."] * 3, *each[8:], *[".."] * 3]


def test_the_sizes_are_the_options():
    options = ("--mesh", "pipeline=2,tensor=4", "--micro-batches", 3, "--tokens", 2, "--prompt-time", 6)
    lengths = [units for _, units, _ in headings(run("--gantt", "-", *options).stdout)]
    assert lengths == [2 * 4 + 4, 2 * 4 + 3]


def test_the_third_figure_and_chunks_are_drawn_when_asked_for():
    text = run("--gantt", "-", "--prompt-micro-batches", 8, "--chunks", 8).stdout
    few, many, hybrid, equal, shrinking = headings(text)[2:]
    assert [few[1], many[1], hybrid[1]] == [25.0, 30.0, 22.0]
    assert hybrid[0] == "hybrid: 8 micro-batches of prompts, 4 of generation (Fig. 3)"
    assert equal[0] == "chunks of equal tokens, 4,096 to 4,096 tokens"
    assert re.fullmatch(r"chunks of equal time, 6,\d{3} to 3,\d{3} tokens", shrinking[0])
    assert shrinking[1:] == (11.0, 27.3)
    assert equal[1] > 12


@pytest.mark.slow
def test_files_are_drawn_and_are_the_same_each_time(tmp_path):
    pytest.importorskip("matplotlib")
    files = [tmp_path / f"{name}.svg" for name in "ab"]
    for file in files:
        done = run("--gantt", file, "--mesh", "pipeline=3")
        assert done.stderr == f"Wrote {file}\n"
        assert len(headings(done.stdout)) == 2
    svg = files[0].read_text()
    assert svg == files[1].read_text()
    assert "drained after each token (Fig. 2a): 15 units, 40.0% idle" in svg
    run("--gantt", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_figure_of_the_page_is_what_its_command_draws(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    page = (ROOT / "docs/pipeline.md").read_text()
    (command,) = re.findall(r"^jaxinfer plan (--gantt pipeline-schedules\.svg .*)$", page, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    run(*command.split())
    drawn, committed = ((folder / "pipeline-schedules.svg").read_text() for folder in (tmp_path, ROOT / "docs"))
    version = r"Matplotlib v[\d.]+"
    assert re.sub(version, "", drawn) == re.sub(version, "", committed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gantt", "there/is/none.svg"), r"--gantt there/is/none\.svg: there/is is not a directory"),
        (("--gantt", "a.pdf"), r"--gantt a\.pdf must end in \.png or \.svg"),
        (("--gantt", "-", "--mesh", "tensor=2"), r"--mesh tensor=2 has no pipeline .*; add for example pipeline=4"),
        (("--gantt", "-", "--mesh", "pipeline=0"), r"mesh 'pipeline=0': .* must be an integer >= 1, below .*, got 0"),
        (("--gantt", "-", "--tokens", 0), r"--tokens must be a number above 0, got 0"),
        (("--gantt", "-", "--prompt-time", "nan"), r"--prompt-time must be a number above 0, got nan"),
        (("--gantt", "-", "--tokens", 10**6), r"--gantt: 16,000,000 ticks of stages are too many to draw, .* lower"),
        (("--gantt", "-", "--prompt-micro-batches", 4), r"--prompt-micro-batches=4 must differ from the"),
        (("--gantt", "-", "--prompt-tokens", 9), r"--prompt-tokens is only used with --chunks; add --chunks"),
        (("--gantt", "-", "--chunks", 9, "--prompt-tokens", 8), r"--chunks=9 is more than the prompt's 8 tokens"),
        (("--gantt", "-", "--dtype", "bf16"), r"--gantt draws schedules, .*: leave out --dtype"),
        (("model", "--gantt", "-"), r"--gantt draws schedules, .*: leave out MODEL"),
        (("model", "--micro-batches", 4), r"--micro-batches is only used with --gantt; add --gantt FILE"),
        ((), r"plan: name a model, or draw .* with --gantt FILE"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_a_line(arguments, message):
    stderr = run(*arguments, code=2).stderr
    assert re.search(f"^error: {message}", stderr), stderr
    assert stderr.count("\n") == 1
