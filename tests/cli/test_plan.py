"""`jaxinfer plan`, and the arithmetic behind it."""

import pytest
from typer.testing import CliRunner

from jaxinfer.cli import app
from jaxinfer.streaming.config import MemoryConfig, parse_bytes, spread
from jaxinfer.streaming.prediction import balanced_tokens, measure_disk, predict

SIXTEEN = {"streamed_bytes": 16 << 30, "parameters": 8 << 30, "bandwidth": float(16 << 30), "flops": 64e12}


def test_a_pass_takes_as_long_as_what_takes_longest():
    one = predict(1, **SIXTEEN)
    assert (one.seconds, one.tokens_per_s) == (1.0, 1.0)
    balanced = balanced_tokens(**SIXTEEN)
    at, beyond = predict(balanced, **SIXTEEN), predict(4 * balanced, **SIXTEEN)
    assert at.seconds == pytest.approx(1.0, rel=1e-3)
    assert beyond.seconds == pytest.approx(4.0, rel=1e-3)
    assert beyond.flops == pytest.approx(64e12)
    assert beyond.tokens_per_s == pytest.approx(at.tokens_per_s, rel=1e-3)


def test_plan(model_dir):
    options = ["--bandwidth", "1MB", "--flops", "1e6", "--context", "64"]
    done = CliRunner().invoke(app, ["plan", str(model_dir), *options])
    assert done.exit_code == 0, done.output
    assert "(recommended)" in done.output
    assert "layers: 2 on disk" in done.output
    done = CliRunner().invoke(app, ["plan", str(model_dir), "--weights", "auto"])
    assert "nothing is streamed" in done.output


def test_plan_reads_the_file_of_the_mesh(model_dir, tmp_path):
    (tmp_path / "memory.toml").write_text('[memory]\nweights = "host"\n')
    options = ["--mesh", str(tmp_path / "memory.toml"), "--bandwidth", "1MB", "--flops", "1e6"]
    assert "layers: 2 on host" in CliRunner().invoke(app, ["plan", str(model_dir), *options]).output
    (tmp_path / "memory.toml").write_text("[memory]\nweigths = 1\n")
    assert "[memory]: unknown field 'weigths'" in CliRunner().invoke(app, ["plan", str(model_dir), *options]).output


def test_plan_measures_this_machine(model_dir):
    done = CliRunner().invoke(app, ["plan", str(model_dir), "--weights", "host"])
    assert done.exit_code == 0, done.output
    assert "TFLOP/s" in done.output


def test_plan_refuses(model_dir):
    for options, message in (
        (["--context", "1"], "--context must be in [2, 128]"),
        (["--weights", "tape"], "weights must be one of device, host, disk, auto"),
        (["--bandwidth", "fast"], "--bandwidth must be bytes or a size"),
        ([], "no file of 8 MiB to measure the disk with; give --bandwidth"),
    ):
        done = CliRunner().invoke(app, ["plan", str(model_dir), *options])
        assert done.exit_code == 2
        assert message in done.output


def test_a_disk_is_measured(tmp_path):
    (tmp_path / "large").write_bytes(bytes(24 << 20))
    assert measure_disk(tmp_path) > 1e6


@pytest.mark.parametrize(
    ("text", "count"), [(7, 7), ("1.5GiB", 3 << 29), ("800MB", 8 * 10**8), ("12", 12), ("1 kb", 1000)]
)
def test_sizes(text, count):
    assert parse_bytes("x", text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 apple", True, "1e9"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="x must be bytes or a size"):
        parse_bytes("x", text)


def test_tiers_are_spread_evenly():
    assert spread(4, {}) == ("disk",) * 4
    assert spread(4, {"device": 4}) == ("device",) * 4
    assert spread(9, {"device": 3}) == ("disk", "disk", "device") * 3
    assert spread(6, {"device": 3, "host": 3}).count("disk") == 0
    assert spread(2, {"host": 5}) == ("host", "host")
    assert spread(5, {"device": 4}) == ("disk", *["device"] * 4)  # one range
    assert spread(8, {"device": 4, "host": 2}) == ("disk", "device", "host", "device") * 2


@pytest.mark.parametrize(
    "options", [{"weights": "ram"}, {"device_memory": 0}, {"host_memory": -5}, {"prefetch": 65}], ids=str
)
def test_bad_settings(options):
    with pytest.raises(ValueError, match="must be"):
        MemoryConfig(**options)
