"""`jaxinfer plan`, and the arithmetic behind it."""

import errno
import math
import os
import re
import threading

import numpy as np
import pytest
from typer.testing import CliRunner

from jaxinfer.checkpoints import CheckpointError, readers
from jaxinfer.cli import app
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.execution.placement import plan_placement
from jaxinfer.models.files.loading import open_model
from jaxinfer.sharding import MeshConfig, ShardingRules
from jaxinfer.streaming import prediction
from jaxinfer.streaming.config import MemoryConfig, parse_bytes, spread
from jaxinfer.streaming.model import stream_model
from jaxinfer.streaming.prediction import measure_disk, plan_pass
from tests.generation.conftest import PAGE_BYTES

WHOLE = ShardingRules(heads=None, kv_heads=None, mlp=None, vocab=None)


def planned(model_dir, mesh=None, rules=None, **memory):
    opened = open_model(model_dir, mesh=mesh, rules=rules)
    placement = plan_placement(opened, EngineConfig(max_batch=1, context=64), MemoryConfig(**memory))
    return opened, plan_pass(opened, placement, context=64, bandwidths={"disk": 1e6, "host": 1e6}, flops=1e9)


@pytest.mark.parametrize("rules", [None, WHOLE], ids=["split", "whole"])
def test_devices_share_the_disk(model_dir, rules):
    """What is predicted to be read is what the store reads, and it takes no less time than for one device."""
    _, one = planned(model_dir, weights="disk")
    opened, two = planned(model_dir, MeshConfig(tensor=2), rules, weights="disk")
    assert two.predict(1).fetch >= one.predict(1).fetch > 0
    placement = plan_placement(opened, EngineConfig(max_batch=1, context=64), MemoryConfig(weights="disk"))
    files = stream_model(opened, placement).store
    read = sum(
        math.prod(part.shape) * np.dtype(leaf.dtype).itemsize
        for layer in files._stores[0].files.layers
        for leaf in layer.leaves
        for part in leaf.slices
    )
    assert two.moved == {"disk": read}


def test_devices_share_the_hosts_memory(model_dir):
    opened, two = planned(model_dir, MeshConfig(tensor=2), weights="host")
    placement = plan_placement(opened, EngineConfig(max_batch=1, context=64), MemoryConfig(weights="host"))
    store = stream_model(opened, placement).store
    assert two.moved == {"host": sum(store.start(layer).bytes for layer in range(2))}


def seconds(output):
    """Of a pass of one sequence."""
    return float(re.search(r"fetch +(?:\(recommended\) )?1 +([\d.]+) ", output)[1])


def test_a_mesh_is_not_predicted_to_read_faster_than_its_disk(model_dir):
    options = ["--bandwidth", "1MB", "--flops", "1e12"]
    found = [
        CliRunner().invoke(app, ["plan", str(model_dir), *options, *mesh]).output
        for mesh in ((), ("--mesh", "tensor=2"))
    ]
    assert seconds(found[1]) >= seconds(found[0]) > 0.05
    assert "1.0 MB/s from disk to all devices" in found[1]


def test_plan(model_dir):
    options = ["--bandwidth", "1MB", "--flops", "1e6", "--context", "64"]
    done = CliRunner().invoke(app, ["plan", str(model_dir), *options])
    assert done.exit_code == 0, done.output
    assert "(recommended)" in done.output
    assert "layers: 2 on disk" in done.output
    assert "1 GiB of --host-kv or --disk-kv-limit keeps" in done.output
    assert "ms to read back from the disk" in done.output
    done = CliRunner().invoke(app, ["plan", str(model_dir), "--weights", "auto", "--flops", "1e6"])
    assert "nothing is streamed" in done.output
    assert re.search(r"^ ?compute +1 ", done.output, re.MULTILINE)
    done = CliRunner().invoke(app, ["plan", str(model_dir), *options, "--kv-offload", str(9 * 4 * PAGE_BYTES)])
    assert "room for 9 sequences of 64 tokens" in done.output  # of four pages each


@pytest.mark.slow
def test_a_mixture_fetches_the_experts_that_its_tokens_choose():
    options = ["--bandwidth", "1MB", "--flops", "1e9", "--device-memory", "13MB", "--context", "64"]
    done = CliRunner().invoke(app, ["plan", "examples/moe_demo_model", "--weights", "disk", *options])
    assert done.exit_code == 0, done.output
    assert re.search(r"48 experts of .* on disk, \d+ at a time", done.output)
    assert seconds(done.output) > 0
    assert "of a layer's 8 experts, if tokens choose at random." in done.output


def test_plan_reads_the_file_of_the_mesh(model_dir, tmp_path):
    (tmp_path / "memory.toml").write_text('[memory]\nweights = "host"\n')
    options = ["--mesh", str(tmp_path / "memory.toml"), "--bandwidth", "1MB", "--flops", "1e6"]
    assert "layers: 2 on host" in CliRunner().invoke(app, ["plan", str(model_dir), *options]).output
    (tmp_path / "memory.toml").write_text("[memory]\nweigths = 1\n")
    assert "[memory]: unknown field 'weigths'" in CliRunner().invoke(app, ["plan", str(model_dir), *options]).output


def test_plan_measures_this_machine(model_dir, monkeypatch):
    monkeypatch.setattr(prediction, "COPIED_BYTES", 1 << 20)
    monkeypatch.setattr(prediction, "MATRIX", 256)
    done = CliRunner().invoke(app, ["plan", str(model_dir), "--weights", "host"])
    assert done.exit_code == 0, done.output
    assert "TFLOP/s" in done.output


def test_plan_refuses(model_dir):
    for options, message in (
        (["--context", "1"], "--context must be in [2, 128]"),
        (["--weights", "tape"], "weights must be one of device, host, disk, auto"),
        (["--bandwidth", "fast"], "--bandwidth must be bytes or a size"),
        (["--bandwidth", "tape=1GB"], "--bandwidth: layers cannot be streamed from 'tape'; known: disk, host"),
    ):
        done = CliRunner().invoke(app, ["plan", str(model_dir), *options])
        assert done.exit_code == 2
        assert message in done.output


@pytest.mark.parametrize("size", [24 << 20, 5000], ids=["blocks", "less than a block"])
def test_a_disk_is_measured(tmp_path, monkeypatch, size):
    monkeypatch.setattr(prediction, "MEASURED_SECONDS", 0.0)
    (tmp_path / "file").write_bytes(bytes(size))
    assert measure_disk(tmp_path) > 1e4


def test_a_disk_with_nothing_to_read_has_no_speed(tmp_path):
    (tmp_path / "small").write_bytes(bytes(4095))
    with pytest.raises(ValueError, match="no file of 4096 bytes to measure the disk with; give --bandwidth"):
        measure_disk(tmp_path)


def test_a_disk_that_cannot_be_read_has_no_speed(tmp_path):
    (tmp_path / "large").write_bytes(bytes(24 << 20))

    def preadv(handle, buffers, offset):
        if offset < 16 << 20:
            return os.preadv(handle, buffers, offset)
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(CheckpointError, match=r"large: cannot be read \(Input/output error\); check the disk"):
        measure_disk(tmp_path, preadv)


def test_a_disk_that_hangs_has_no_speed(tmp_path, monkeypatch):
    (tmp_path / "large").write_bytes(bytes(24 << 20))
    monkeypatch.setattr(readers, "READ_SECONDS", 0.2)
    let_go = threading.Event()
    with pytest.raises(CheckpointError, match=r"large, bytes 0 to 8388608: not read within 0\.2 s"):
        measure_disk(tmp_path, lambda *_: let_go.wait())
    let_go.set()


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
