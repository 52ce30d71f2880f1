"""`jaxinfer experts`, on a board of three tiny classifiers."""

import json
import shutil
import struct
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from jaxinfer.cli import app
from tests.experts.boards import image, save_classifiers

FILE = """
mode = "best"
host_memory = "20kB"
max_batch = 2
[[executors]]
expert_memory = "60kB"
[[inputs]]
kind = "K0"
expert = "c0"
share = 0.75
[[inputs]]
kind = "K1"
expert = "c1"
share = 0.25
[[rules]]
expert = "c0"
verdict = "ok"
next = "c2"
probability = 0.5
[experts]
"""


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli-board")
    names = ("c0", "c1", "c2")
    save_classifiers([folder / name for name in names])
    (folder / "board.toml").write_text(FILE + "\n".join(f'{name} = {{checkpoint = "{name}"}}' for name in names))
    for place, kind in enumerate(("K0", "K0", "K1")):
        (folder / "images" / kind).mkdir(parents=True, exist_ok=True)
        np.save(folder / "images" / kind / f"{place}.npy", image(place))
    return folder


def invoke(command, board, *options, code=0):
    done = CliRunner().invoke(app, ["experts", command, str(board / "board.toml"), *map(str, options)])
    assert done.exit_code == code, done.output
    return done


def test_profile(board):
    output = invoke("profile", board, "--anew").output
    assert "A batch of n takes K n + B" in output
    assert "classifier-32x32-" in output


def test_plan(board):
    output = invoke("plan", board, "--requests", 100, "--interval-ms", 0.01, "--top", 2).output
    assert "The 2 most used of 3 experts" in output
    assert "75.0%" in output
    assert "any scheduler needs at least 0" in output
    assert "Room for the" in output
    assert "No advice on memory: experts keep up with 1.0" in invoke("plan", board, "--interval-ms", 1000).output


def test_simulate(board, tmp_path):
    file = tmp_path / "trace.jsonl"
    options = ["--mode", "samba", "--mode", "best", "--requests", 50]
    output = invoke("simulate", board, *options, "--save-trace", file).output
    assert "50 inputs on a simulated clock" in output
    assert all(mode in output for mode in ("samba", "best"))
    assert len(file.read_text().splitlines()) == 50
    assert "50 inputs" in invoke("simulate", board, "--mode", "paper", "--trace", file).output


def test_run_files(board):
    output = invoke("run", board, "--images", board / "images").output
    assert "K0/0.npy  " in output
    assert "(c1: " in output
    assert "3 inputs in " in output
    assert "0 failed" in output


def test_run_random_as_json(board):
    done = invoke("run", board, "--random", 5, "--mode", "samba", "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 5
    assert all(line["verdict"] in ("ok", "defect") and line["stages"][0]["batch"] == 1 for line in lines)
    assert "5 inputs in " in done.stderr


def test_an_image_that_cannot_be_judged_is_the_only_one(board, tmp_path):
    images = shutil.copytree(board / "images", tmp_path / "images")
    np.save(images / "K0" / "small.npy", image(0, size=8))
    (images / "K1" / "empty.npy").touch()
    (images / "K1" / "torn.npy").write_bytes(b"\x93NUMPY")
    header = "{'descr': '|u1', 'fortran_order': False, 'shape': %s"
    (images / "K1" / "unclosed.npy").write_bytes(npy(header % "(8, 8, 3)"))
    (images / "K1" / "vast.npy").write_bytes(npy(header % "(1000000, 1000000, 12)" + "}"))
    pytest.importorskip("PIL.Image").new("1", (20000, 20000)).save(images / "K1" / "vast.png")
    done = invoke("run", board, "--images", images, "--json", code=1)
    errors = [line for line in map(json.loads, done.stdout.splitlines()) if "error" in line]
    assert [(line["input"], line["error"]) for line in errors] == [
        ("K0/small.npy", "InvalidInputError"),
        ("K1/empty.npy", "EOFError"),
        ("K1/torn.npy", "ValueError"),
        ("K1/unclosed.npy", "TokenError"),
        ("K1/vast.npy", "MemoryError"),
        ("K1/vast.png", "DecompressionBombError"),
    ]
    assert "3 inputs in " in done.stderr
    assert "6 failed" in done.stderr


def npy(header):
    """The beginning of an array's file."""
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()


def test_errors_are_one_line(board, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    for name, kind, file in (("unknown", "K7", "a.npy"), ("pictures", "K0", "a.png"), ("empty", "K0", "a.txt")):
        (tmp_path / name / kind).mkdir(parents=True)
        (tmp_path / name / kind / file).touch()
    for command, options, message in (
        ("run", [], "Give exactly one of --images and --random."),
        ("run", ["--images", tmp_path / "none"], "there is no such folder"),
        ("run", ["--images", tmp_path / "empty"], "there are no images"),
        ("run", ["--images", tmp_path / "unknown"], "no input is of kind 'K7'"),
        ("run", ["--images", tmp_path / "pictures"], "needs pillow, of the extra images: pip install pillow"),
        ("simulate", ["--mode", "fast"], "mode='fast' is not known"),
        ("plan", ["--trace", tmp_path / "none"], "No such file"),
    ):
        done = invoke(command, board, *options, code=2)
        assert message in done.stderr
        assert done.stderr.splitlines()[-1].startswith("error: ")
    done = CliRunner().invoke(app, ["experts", "plan", str(tmp_path / "none.toml")])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
