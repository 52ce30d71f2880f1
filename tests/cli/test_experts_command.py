"""`jaxinfer experts`, on a board of three tiny classifiers."""

import json
import re
import shutil
import struct
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from jaxinfer.cli import app
from jaxinfer.cli.experts import tables
from jaxinfer.evaluation.experts.forecast import Forecast, MemoryAdvice
from jaxinfer.evaluation.experts.memory_search import Window
from jaxinfer.experts import POLICIES, opened
from jaxinfer.experts.execution.architectures import Architecture
from jaxinfer.experts.execution.profiler import Measured
from jaxinfer.experts.scheduling.profile import Profile
from jaxinfer.models import WeightFormat
from jaxinfer.models.config import Activation, AttentionConfig, MlpConfig, NormConfig, NormKind, ViTConfig
from jaxinfer.models.files.loading import load_model
from jaxinfer.models.vision.image_files import fitted, read_image
from tests.cli.test_display import shown
from tests.experts.boards import image, probabilities, save_classifiers

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


def check_tables(output):
    """No figure is cut, and a terminal of 80 columns has room."""
    assert "…" not in output
    assert max(map(len, output.splitlines())) <= 80


def test_profile(board):
    output = invoke("profile", board, "--remeasure").stdout
    assert "A batch of n takes K n + B" in output
    assert re.search(r"classifier *\n +32x32 *\n", output)
    check_tables(output)


def test_profile_of_several_architectures_fits():
    config = ViTConfig(
        labels=("good", "bad"),
        embed=16,
        layers=1,
        attention=AttentionConfig(q_heads=2, kv_heads=2, head_dim=8),
        mlp=MlpConfig(hidden=16, activation=Activation.GELU),
        norm=NormConfig(kind=NormKind.LAYER),
        image_size=1024,
        patch_size=512,
    )
    profile = Profile(
        k=12.3456,
        b=1.23456,
        max_batch=1024,
        load={"disk": 123.456, "host": 9.9996},
        evict=1e-7,
        activation_bytes=10**12,
    )
    measurement = Measured(profile=profile, r_squared=0.98765, workspace={})
    kinds = [Architecture(config, WeightFormat(), (1024, 1024 + count, 3), "uint8") for count in range(5)]
    experts = {str(count): SimpleNamespace(architecture=kind, bytes=10**9) for count, kind in enumerate(kinds)}
    system = SimpleNamespace(experts=experts, graph=SimpleNamespace(experts=experts))
    made = tables.profile_tables(system, {(kind.name, "cpu"): measurement for kind in kinds})
    output = shown(*made)
    assert output.split().count("12,346") == output.split().count("123,456") == len(kinds)
    assert output.split().count("vision_transformer") == len(kinds)


def test_plan(board):
    output = invoke("plan", board, "--requests", 100, "--interval-ms", 0.01, "--top", 2).stdout
    assert "The 2 most used of 3 experts" in output
    assert "75.0%" in output
    assert re.search(r"inputs +learned +weights", output)
    assert "any scheduler needs at least 0" in output
    rates = re.findall(r"^ \d+ to \d+% +(?:\d+ to )?(\d+) +([\d,.]+) $", output, re.MULTILINE)
    best = max(rates, key=lambda row: float(row[1].replace(",", "")))[0]
    assert f"Best: room for the {'most used expert' if best == '1' else f'{best} most used experts'}:" in output
    check_tables(output)
    assert "No advice on memory: experts keep up with 1.0" in invoke("plan", board, "--interval-ms", 1000).output


def test_simulate(board, tmp_path):
    file = tmp_path / "trace.jsonl"
    options = ["--mode", "samba", "--mode", "best", "--requests", 50]
    output = invoke("simulate", board, *options, "--save-trace", file).output
    assert "50 inputs on a simulated clock" in output
    check_tables(output)
    assert all(mode in output for mode in ("samba", "best"))
    assert len(file.read_text().splitlines()) == 50
    assert "50 inputs" in invoke("simulate", board, "--mode", "paper", "--trace", file).output


def test_policies_and_windows_fit():
    counted = SimpleNamespace(loads=Counter(disk=123456, host=1), batches=1234567)
    outcome = SimpleNamespace(throughput=1234.56, statistics=counted, latencies=[0.1234, 1234.5], failed=12345)
    item = Forecast(outcome=outcome, scheduler=None, placed={}, bound=98765)
    output = shown(tables.mode_table(dict.fromkeys(POLICIES, item), 100_000))
    for figure in ("1,235", "123457", "123456", "98765", "1234567", "617,312", "12345"):
        assert output.split().count(figure) == len(POLICIES)
    windows = [Window(lower=0.0, upper=15.0, experts=(1, 7), throughput=1.0)]
    windows += [Window(lower=low, upper=low + 9, experts=(7, 12), throughput=9.0) for low in (15.0, 24.0)]
    advice = MemoryAdvice(windows=windows, experts=12, expert_bytes=[1], activation_bytes=[1])
    rows = [line.split() for line in shown(tables.window_table(advice)).splitlines()]
    assert ["15", "to", "33%", "7", "to", "12", "9.000"] in rows


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


def test_photographs_are_resized_and_cropped_as_the_checkpoint_says(board, tmp_path):
    """An input of any size has the verdict and probabilities of what `Embedder` and `elastic` make of it."""
    pillow = pytest.importorskip("PIL.Image")
    for number, size in enumerate([(640, 480), (31, 97), (32, 32)]):
        (tmp_path / "K0").mkdir(exist_ok=True)
        photo = pillow.effect_noise(size, 90).convert("RGB")
        photo.save(tmp_path / "K0" / f"{number}.png")
        np.save(tmp_path / "K0" / f"{number}.npy", np.asarray(photo))
    photo.save(tmp_path / "K0" / "3.jpg", quality=100)
    lines = [json.loads(line) for line in invoke("run", board, "--images", tmp_path, "--json").stdout.splitlines()]
    assert [line["input"] for line in lines] == [
        *("K0/0.npy", "K0/0.png", "K0/1.npy", "K0/1.png", "K0/2.npy", "K0/2.png", "K0/3.jpg"),
    ]
    config = load_model(board / "c0").config
    for line in lines:
        file = tmp_path / line["input"]
        pixels = np.load(file) if file.suffix == ".npy" else read_image(file)
        best = probabilities(board / "c0", fitted(pixels, config.image_size, config.preprocessing)).argmax()
        assert line["stages"][0]["verdict"] == config.labels[best]


def test_an_image_that_cannot_be_judged_is_the_only_one(board, tmp_path):
    """Damage that only decoding shows."""
    images = shutil.copytree(board / "images", tmp_path / "images")
    file = images / "K1" / "torn.png"
    pytest.importorskip("PIL.Image").effect_noise((64, 64), 90).save(file)
    file.write_bytes(file.read_bytes()[:-1000])
    done = invoke("run", board, "--images", images, "--json", code=1)
    errors = [line for line in map(json.loads, done.stdout.splitlines()) if "error" in line]
    assert [(line["input"], line["error"]) for line in errors] == [("K1/torn.png", "InvalidInputError")]
    assert "3 inputs in " in done.stderr
    assert "1 failed" in done.stderr


def test_files_that_are_no_images_are_refused_before_experts_are_opened(board, tmp_path, monkeypatch):
    monkeypatch.setattr(opened, "open_model", lambda *_, **__: pytest.fail("an expert was opened before the error"))
    images = shutil.copytree(board / "images", tmp_path / "images")
    np.save(images / "K0" / "floats.npy", np.zeros((8, 8, 3)))
    np.save(images / "K0" / "grey.npy", np.zeros((8, 8), np.uint8))
    (images / "K1" / "empty.npy").touch()
    (images / "K1" / "torn.npy").write_bytes(b"\x93NUMPY")
    header = "{'descr': '|u1', 'fortran_order': False, 'shape': %s"
    (images / "K1" / "unclosed.npy").write_bytes(npy(header % "(8, 8, 3)"))
    (images / "K1" / "vast.npy").write_bytes(npy(header % "(1000000, 1000000, 3)" + "}"))
    pytest.importorskip("PIL.Image").new("1", (10000, 10000)).save(images / "K1" / "vast.png")
    (images / "K1" / "text.jpg").write_text("no image")
    broken = ["K0/floats.npy", "K0/grey.npy", "K1/empty.npy", "K1/text.jpg", "K1/torn.npy", "K1/unclosed.npy"]
    broken += ["K1/vast.npy", "K1/vast.png"]
    (error,) = invoke("run", board, "--images", images, code=2).stderr.splitlines()
    assert "8 of 11 files are no images: " in error
    assert [name for name in broken if name in error] == broken[:5]
    assert "floats.npy: an image must be uint8 [H, W, 3] (RGB), got float64 [8, 8, 3]; " in error
    for name in broken[:5]:
        (images / name).unlink()
    (error,) = invoke("run", board, "--images", images, code=2).stderr.splitlines()
    assert [name for name in broken if name in error] == broken[5:]
    assert "vast.png: 10000 x 10000 are more than 50000000 pixels; make the image smaller" in error


def npy(header):
    """The beginning of an array's file."""
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()


def test_errors_are_one_line(board, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    for name, kind, file in (("unknown", "K7", "a.npy"), ("pictures", "K0", "a.png"), ("empty", "K0", "a.txt")):
        (tmp_path / name / kind).mkdir(parents=True)
        (tmp_path / name / kind / file).touch()
    (tmp_path / "unknown.jsonl").write_text('{"arrival": 0, "experts": ["c9"]}')
    (tmp_path / "torn.jsonl").write_text('{"arrival": 0, "expert": "c0"}')
    monkeypatch.setattr(opened, "open_model", lambda *_, **__: pytest.fail("an expert was opened before the error"))
    for command, options, message in (
        ("run", [], "Use exactly one of --images and --random."),
        ("run", ["--images", tmp_path / "none"], "no such folder"),
        ("run", ["--images", tmp_path / "empty"], "no images found"),
        ("run", ["--images", tmp_path / "unknown"], "unknown kind of input 'K7'"),
        ("run", ["--images", tmp_path / "pictures"], "needs pillow, of the extra images: pip install pillow"),
        ("profile", ["--mode", "fast"], "mode='fast' is not known"),
        ("simulate", ["--mode", "fast"], "mode='fast' is not known"),
        ("simulate", ["--save-trace", tmp_path / "none" / "trace"], "none is not a directory that can be written to."),
        ("simulate", ["--trace", tmp_path / "torn.jsonl", "--requests", 3], "--requests has no effect with --trace"),
        ("run", ["--images", tmp_path / "empty", "--seed", 1], "--seed has no effect with --images"),
        ("simulate", ["--trace", tmp_path / "unknown.jsonl"], "there is no expert 'c9'; known: c0, c1, c2."),
        ("plan", ["--trace", tmp_path / "torn.jsonl"], "unknown fields: expert; known: arrival, experts"),
        ("plan", ["--trace", tmp_path / "none"], "No such file"),
    ):
        done = invoke(command, board, *options, code=2)
        assert message in done.stderr
        assert done.stderr.splitlines()[-1].startswith("error: ")
    done = CliRunner().invoke(app, ["experts", "plan", str(tmp_path / "none.toml")])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)


@pytest.fixture
def changed(board, tmp_path):
    """Return a function that writes the board's file with a change."""

    def write(old, new):
        text = (board / "board.toml").read_text()
        assert old in text
        folder = tmp_path / "changed"
        folder.mkdir(exist_ok=True)
        text = text.replace(old, new, 1).replace('checkpoint = "c', f'checkpoint = "{board}/c')
        (folder / "board.toml").write_text(text)
        return folder

    return write


@pytest.mark.parametrize("command", ["profile", "plan", "simulate", "run"])
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("max_batch = 2", "max_bach = 2", "unknown field 'max_bach'; known: experts, inputs, executors, rules, mode,"),
        ('verdict = "ok"', 'verdikt = "ok"', "rules.0: unknown field 'verdikt'; known: expert, verdict, next, prob"),
        ('next = "c2"', 'next = "c0"', "the rules make a cycle: c0 -> c0"),
        ('expert_memory = "60kB"', 'expert_memory = "-1"', "expert_memory must be bytes or a size"),
        ('expert_memory = "60kB"', "expert_memory = 0", "executors.executor-0.expert_memory must be an integer >= 1"),
    ],
)
def test_files_are_refused_before_experts_are_opened(changed, command, old, new, message, monkeypatch):
    monkeypatch.setattr(opened, "open_model", lambda *_, **__: pytest.fail("an expert was opened before the error"))
    given = changed(old, new)
    options = ["--random", 1] if command == "run" else []
    assert re.search(f"board.toml: (the file: )?{re.escape(message)}", invoke(command, given, *options, code=2).stderr)


@pytest.mark.parametrize("command", ["profile", "plan", "simulate", "run"])
def test_memory_that_no_expert_fits_is_refused_before_measuring(changed, command, monkeypatch):
    monkeypatch.setattr(opened, "write_expert", lambda _: pytest.fail("a file was written before the error"))
    given = changed('expert_memory = "60kB"', 'expert_memory = "3kB"')
    options = ["--random", 1] if command == "run" else []
    assert "takes 3592 bytes and the largest pool has 3000" in invoke(command, given, *options, code=2).stderr


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_no_figures_of_an_expert_that_is_not_there(changed, command, monkeypatch):
    """Unless the file says which one it is like."""
    given = changed('c2 = {checkpoint = "c2"}', 'c2 = {checkpoint = "gone"}')
    done = invoke(command, given, code=2)
    assert "expert 'c2' cannot be opened, so its costs are not known: " in done.stderr
    assert not done.stdout
    given = changed('c2 = {checkpoint = "c2"}', 'c2 = {checkpoint = "gone", like = "c1"}')
    assert "c2" in invoke(command, given, "--requests", 20).stdout or command == "simulate"
