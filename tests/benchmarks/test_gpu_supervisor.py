"""The parent of a GPU run, with workers that fail at once and need no JAX; and a run on a CPU with every fault."""

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import stages, supervisor, verdicts
from benchmarks.gpu.rows import Rows
from benchmarks.gpu.settings import FAULTS, LOST_CONTEXT, Settings
from benchmarks.gpu.stages import Stage

ROOT = Path(__file__).parents[2]
STAGE = Stage(share=1, first=20, later=0.5)
WORKER = """#!{python}
import os, sys, time
from benchmarks.gpu.settings import Progress, Settings
stage, first, text = sys.argv[3:]
settings = Settings.loads(text)
for n in range(int(first), 4):
    if "start" in settings.faults:
        sys.exit(5)
    Progress(("a", "b", "c", "d"), n).write(settings.progress)
    match settings.faults.get(f"{{stage}}.{{n}}"):
        case "abort": os.abort()
        case "hang": time.sleep(99)
        case "lost": settings.rows.row(part=stage, what="abcd"[n], absent="CUDA_ERROR_X"); os._exit({lost})
    settings.rows.row(part=stage, what="abcd"[n], done=True)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a stage whose worker is a script; returns what its rows say of each item, and all rows."""
    script = tmp_path / "worker"
    script.write_text(WORKER.format(python=sys.executable, lost=LOST_CONTEXT))
    script.chmod(0o755)
    monkeypatch.setattr(supervisor.sys, "executable", str(script))

    def run(faults=None, seconds=60.0, names=("kernels",), stage=STAGE):
        settings = Settings(folder=str(tmp_path), work=str(tmp_path), dry=True, peer_python="", faults=faults or {})
        list(supervisor.run(dict.fromkeys(names, stage), seconds, settings, patience=1))
        rows = settings.rows.read()
        return {row["what"]: row.get("absent", "done") for row in rows if row["part"] in names}, rows

    return run


def test_a_stage_without_faults_needs_one_worker(run):
    items, rows = run()
    assert items == dict.fromkeys("abcd", "done")
    assert [row["items"] for row in rows if row["part"] == "plan"] == [list("abcd")]


def test_another_worker_goes_on_behind_an_item_that_ends_one(run):
    items, _ = run({"kernels.0": "abort", "kernels.1": "lost", "kernels.3": "hang"})
    assert items == {
        "a": "the worker was ended by SIGABRT; see log.txt",
        "b": "CUDA_ERROR_X",
        "c": "done",
        "d": "no result within 0.5 s",
    }


def test_the_first_item_has_the_time_of_the_start_as_well(run):
    assert run({"kernels.0": "hang"}, stage=Stage(share=1, first=2, later=20))[0]["a"] == "no result within 2 s"


def test_the_last_item_may_end_the_worker(run):
    assert run({"kernels.3": "abort"})[0]["d"].startswith("the worker was ended by SIGABRT")


def test_a_worker_that_cannot_start_is_not_started_again(run, tmp_path):
    items, _ = run({"start": "always"})
    assert items == {"the start of a worker": "the worker ended with status 5; see log.txt"}


def test_a_stage_that_keeps_dying_leaves_the_rest_out(run, monkeypatch):
    monkeypatch.setattr(supervisor, "MAX_FAULTS", 2)
    items, _ = run({"kernels.0": "abort", "kernels.1": "abort"})
    assert items["c"] == items["d"] == "2 workers of this stage have died"


def test_the_time_is_kept_and_later_stages_have_theirs(run, monkeypatch):
    monkeypatch.setattr(supervisor, "POLL_SECONDS", 0.02)
    start = time.monotonic()
    items, rows = run({"kernels.0": "hang"}, seconds=4, names=("kernels", "numerics"))
    assert time.monotonic() - start < 4.4  # within 10%
    took = {row["took"]: row["seconds"] for row in rows if "took" in row}
    assert took["kernels"] == pytest.approx(2, abs=0.2)
    assert items == dict.fromkeys("abcd", "done")  # of the second stage, which has the same titles


def test_a_run_without_time_starts_nothing(run):
    assert run(seconds=-1)[0] == {"all items": supervisor.NO_TIME}


def test_the_parent_imports_no_jax():
    code = "import benchmarks.gpu.__main__, sys; print({'jax', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_every_stage_is_a_module():
    assert all((ROOT / f"benchmarks/gpu/{name}.py").exists() for name in stages.STAGES)
    assert set(stages.ALWAYS) <= stages.STAGES.keys()
    assert not stages.STAGES["streaming"].selected


def test_a_line_that_a_killed_worker_left_incomplete_is_skipped(tmp_path):
    rows = Rows(tmp_path / "rows.jsonl")
    rows.row(part="a", error=float("inf"))
    rows.path.write_text(rows.path.read_text() + '{"part": "b", "x"')
    assert rows.read() == [{"part": "a", "error": float("inf")}]


def test_a_gpu_without_kernels_ends_the_run(tmp_path):
    settings = Settings(folder=str(tmp_path), work=str(tmp_path), dry=False, peer_python="")
    command._require_kernels(settings)  # nothing is known: the device may have failed
    settings.rows.row(part="machine", kernels=False, machine={"device": "NVIDIA A100"})
    with pytest.raises(SystemExit, match="NVIDIA A100 cannot run the kernels"):
        command._require_kernels(settings)


def test_options_name_what_there_is():
    assert command.read_fault("numerics.12=hang") == ("numerics.12", "hang")
    for wrong in ("numerics=hang", "nothing.1=hang", "numerics.1=sleep"):
        with pytest.raises(argparse.ArgumentTypeError, match="abort, illegal-address, hang"):
            command.read_fault(wrong)
    with pytest.raises(argparse.ArgumentTypeError, match="unknown kernel; there are machine, numerics"):
        command.read_stages("kernel,numerics")


# Verdicts


def numerics(*kernels, planned=3):
    rows = [{"part": "plan", "stage": "numerics", "items": [f"f: {n}" for n in range(planned)]}]
    return rows + [{"part": "numerics", "error": 1.0, "tolerance": 2.0, "kernel": kernel} for kernel in kernels]


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        (numerics(True, True, None), "met"),
        (numerics(True, True), "only 2 of 3 cases ran"),
        (numerics(True, False, False), "2 of 3 cases ran no kernel"),
        (numerics(), "only 0 of 3 cases ran"),
    ],
)
def test_numerics_are_judged_only_if_every_case_ran_its_kernel(rows, verdict):
    (check,) = verdicts.checks(rows)
    assert (check.name, check.verdict) == ("worst_error_of_tolerance", verdict)


def test_kernels_are_judged_only_if_every_case_was_timed_both_ways():
    def timed(case, ours, xla):
        row = {"part": "kernels", "op": "f", "case": case}
        return [{**row, "way": "jaxinfer", "us": ours}, {**row, "way": "XLA", "us": xla}]

    plan = {"part": "plan", "stage": "kernels", "items": ["f: a", "f: b"]}
    (check,) = verdicts.checks([plan, *timed("a", 1.0, 2.0), *timed("b", 2.0, 3.0)])
    assert (check.name, check.value, check.verdict) == ("f_worst_vs_xla", 1.5, "met")
    (check,) = verdicts.checks([plan, *timed("a", 1.0, 2.0), timed("b", 2.0, 3.0)[1]])
    assert check.verdict == "only 1 of 2 cases ran"
    assert verdicts.checks([]) == []


# A run on a CPU


@pytest.mark.slow
def test_a_dry_run_survives_every_fault(tmp_path):
    """Three items in a row fail, as they can on a GPU. Those around them are measured, and so are later stages."""
    faults = [f"--fault=numerics.{n}={kind}" for n, kind in enumerate(FAULTS, 1)]
    options = ["--dry-run", "--only=numerics,kernels", "--minutes=12", "--patience=2", f"--out={tmp_path}", *faults]
    printed = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *options], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    rows = Rows(tmp_path / "rows.jsonl").read()
    (titles,) = [row["items"] for row in rows if row["part"] == "plan" and row["stage"] == "numerics"]
    absent = {row["what"]: row["absent"] for row in rows if row["part"] == "numerics" and "absent" in row}
    for title, reason in zip(titles[1:4], ["SIGABRT", "CUDA_ERROR_ILLEGAL_ADDRESS", "no result within"], strict=True):
        assert reason in absent[title]
    done = [row["what"] for row in rows if row["part"] == "items" and row["stage"] == "numerics"]
    assert done[0] == titles[0]
    assert titles[4] in done
    assert any(row["part"] == "kernels" and "us" in row for row in rows)
    assert re.search(r"worst_error_of_tolerance \|.*\*\*only \d+ of \d+ cases ran\*\*", printed)
    assert "SIGABRT" in (tmp_path / "report.md").read_text()
