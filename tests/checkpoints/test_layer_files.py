"""Layers on disk: what is written is what is read, and what is damaged is never taken for weights."""

import dataclasses
import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import crc32c
import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxinfer.checkpoints import CheckpointError, layer_files, readers, stores
from jaxinfer.checkpoints.host_memory import ALIGNMENT, aligned_buffer
from jaxinfer.checkpoints.layer_files import (
    LayerFiles,
    LayersManifest,
    StoredSlice,
    write_layers,
)
from jaxinfer.checkpoints.stores import DiskStore, Staging


def leaves(layer, sharding=None):
    rng = np.random.default_rng(layer)
    matrix = rng.normal(size=(40, 1000)).astype(np.float32)
    arrays = {"matrix": jnp.asarray(matrix), "half": jnp.asarray(matrix[:3], jnp.bfloat16), "norm": jnp.arange(7.0)}
    return arrays if sharding is None else {name: jax.device_put(x, sharding[name]) for name, x in arrays.items()}


def write(folder, read=leaves, layers=3, **options):
    write_layers(folder, layers, read, total_bytes=1, **options)
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(layer_files, "BLOCK_BYTES", 64 << 10)  # several blocks a layer
    monkeypatch.setattr(layer_files, "FIRST_DELAY", 1e-3)
    return write(tmp_path / "layers")


def read_all(files, layer):
    buffer = aligned_buffer(max(layer.bytes for layer in files.layers))
    for offset in files.blocks(layer):
        files.read_block(layer, offset, buffer.data)
    return files.views(layer, buffer)


def test_layers_are_read_as_they_were_written(folder):
    files = LayerFiles(folder)
    assert len(list(files.blocks(0))) > 1
    for layer in range(3):
        for (name, array), parts in zip(leaves(layer).items(), read_all(files, layer), strict=True):
            (part,) = parts.values()
            assert (part.dtype, part.ctypes.data % ALIGNMENT) == (array.dtype, 0)
            np.testing.assert_array_equal(part, array, err_msg=name)
    assert files.retries == 0


def test_each_device_reads_its_own_slice(tmp_path):
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2])
    axes = {"matrix": ("tensor", None), "half": (None, "tensor"), "norm": (None,)}
    shardings = {name: NamedSharding(mesh, PartitionSpec(*axis)) for name, axis in axes.items()}
    files = LayerFiles(write(tmp_path / "layers", lambda layer: leaves(layer, shardings)))
    stored = {leaf.name: leaf for leaf in files.layers[0].leaves}
    assert [part.shape for part in stored["matrix"].slices] == [(20, 1000), (20, 1000)]
    assert len(stored["norm"].slices) == 1  # both devices have it: stored once
    store = DiskStore(files, {1: list(shardings.values())}, aliases=True)
    fetch = store.start(1)
    for array, (name, wanted) in zip(fetch.arrays(), leaves(1).items(), strict=True):
        assert array.sharding == shardings[name]
        np.testing.assert_array_equal(array, wanted)
    fetch.release()


def test_a_buffer_is_given_back_only_when_its_arrays_are_gone(folder):
    released, sharding = [], SingleDeviceSharding(jax.devices()[0])

    def poison(buffer):
        buffer.fill(255)
        released.append(buffer)

    store = DiskStore(
        LayerFiles(folder), dict.fromkeys(range(3), [sharding] * 3), aliases=True, staging=Staging(on_release=poison)
    )
    first, second = store.start(0), store.start(1)
    kept = first.arrays()
    first.release()
    assert all(array.is_deleted() for array in kept)
    assert len(released) == 1
    third = store.start(2)  # in the buffer of the first
    for fetch, layer in ((second, 1), (third, 2)):
        for array, wanted in zip(fetch.arrays(), leaves(layer).values(), strict=True):
            np.testing.assert_array_equal(array, wanted)
    assert len(released) == 1


def test_damage_is_found(folder):
    file = folder / "layer-00001.bin"
    content = bytearray(file.read_bytes())
    content[70_000] ^= 1
    file.write_bytes(content)
    files = LayerFiles(folder)
    read_all(files, 0)
    with pytest.raises(CheckpointError, match=r"layer 1: .*layer-00001.bin, bytes 65536 to .*damaged.*remove"):
        read_all(files, 1)


def test_a_truncated_or_missing_file_is_found_at_once(folder):
    file = folder / "layer-00002.bin"
    os.truncate(file, 4096)
    with pytest.raises(CheckpointError, match=r"layer 2: .*layer-00002.bin has 4096 bytes instead of"):
        LayerFiles(folder)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"layer 2: .*is missing; remove"):
        LayerFiles(folder)


def test_a_file_that_shrinks_while_it_is_read(folder):
    files = LayerFiles(folder)
    os.truncate(folder / "layer-00000.bin", 4096)
    with pytest.raises(CheckpointError, match=r"layer 0: .*cannot be read \(ends after 4096 bytes\)"):
        read_all(files, 0)


@pytest.mark.parametrize("text", ["", "{", '{"format": 9, "block_bytes": 1, "layers": []}', '{"format": 2}'])
def test_a_damaged_manifest(folder, text):
    (folder / "layers.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"layers.json: (damaged|format=9)"):
        LayerFiles(folder)


def test_a_changed_manifest_is_damaged(folder):
    text = (folder / "layers.json").read_text()
    (folder / "layers.json").write_text(text.replace('"matrix"', '"MATRIX"', 1))
    with pytest.raises(
        CheckpointError, match=r"layers.json: damaged \(its checksum differs\); remove .*; the next run writes it"
    ):
        LayerFiles(folder)


def rewrite(folder, change):
    """A manifest of other layers that is whole."""
    file = folder / "layers.json"
    manifest = msgspec.json.decode(file.read_bytes(), type=LayersManifest)
    manifest = dataclasses.replace(manifest, layers=tuple(change(list(manifest.layers))))
    checksum = crc32c.crc32c(manifest.encoded())
    file.write_bytes(msgspec.json.encode(dataclasses.replace(manifest, checksum=checksum)))


def with_leaves(change):
    return lambda layers: [
        layers[0],
        dataclasses.replace(layers[1], leaves=tuple(change(list(layers[1].leaves)))),
        *layers[2:],
    ]


def with_leaf(**fields):
    return with_leaves(lambda leaves: [dataclasses.replace(leaves[0], **fields), *leaves[1:]])


WANTED = [{name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in leaves(0).items()}] * 3
ELSEWHERE = StoredSlice(start=(0, 0), shape=(40, 1000), offset=1 << 20)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layers: layers[:2], "has 2 layers, and the model has 3"),
        (lambda layers: [*layers, layers[0]], "has 4 layers, and the model has 3"),
        (with_leaves(lambda leaves: leaves[::-1]), r"layer 1: .*layer-00001.bin: norm float32\[7\] is not the model's"),
        (with_leaves(lambda leaves: leaves[:2]), r"layer 1: .*layer-00001.bin: lacks a leaf"),
        (with_leaves(lambda leaves: [*leaves, leaves[0]]), r"layer 1: .*: matrix float32\[40, 1000\] is not"),
        (with_leaf(name="other"), r"layer 1: .*: other float32\[40, 1000\] is not the model's"),
        (with_leaf(dtype="int32"), r"layer 1: .*: matrix int32\[40, 1000\] is not the model's"),
        (with_leaf(shape=(1000, 40)), r"layer 1: .*: matrix float32\[1000, 40\] is not the model's"),
        (with_leaf(slices=()), r"layer 1: .*: matrix float32\[40, 1000\] is not the model's"),
        (with_leaf(slices=(ELSEWHERE,)), r"layer 1: .*: matrix float32\[40, 1000\] is not the model's"),
    ],
)
def test_layers_that_are_not_the_models(folder, change, message):
    LayerFiles(folder).check(WANTED)
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=rf"{message}.*remove .*; the next run writes it again"):
        LayerFiles(folder).check(WANTED)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname"])
def test_layers_are_in_the_folder(folder, name):
    rewrite(folder, lambda layers: [dataclasses.replace(layers[0], file=name), *layers[1:]])
    (folder.parent / "outside").write_bytes(bytes(LayerFiles(write(folder.parent / "good")).layers[0].bytes))
    with pytest.raises(CheckpointError, match=f"names a file '{name}' outside of it"):
        LayerFiles(folder)


def test_a_link_is_no_layer(folder):
    file = folder / "layer-00001.bin"
    file.symlink_to(file.rename(folder.parent / "elsewhere"))
    with pytest.raises(CheckpointError, match=r"layer 1: .*layer-00001.bin is not a file; remove"):
        LayerFiles(folder)


def test_transient_errors_are_tried_again_and_counted(folder):
    failures = [OSError(errno.EIO, "injected")] * 2

    def preadv(handle, buffers, offset):
        if failures:
            raise failures.pop()
        return os.preadv(handle, buffers, offset)

    files = LayerFiles(folder, preadv)
    np.testing.assert_array_equal(read_all(files, 0)[0][0, 0], leaves(0)["matrix"])
    assert files.retries == 2


def test_a_disk_that_is_gone_ends_in_an_error(folder):
    def preadv(handle, buffers, offset):
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(CheckpointError, match=r"layer 0: .*cannot be read \(Input/output error\); check the disk"):
        read_all(LayerFiles(folder, preadv), 0)


def test_short_reads_are_continued_and_refused_direct_reads_are_buffered(folder):
    direct = []

    def preadv(handle, buffers, offset):
        if os.O_DIRECT & fcntl.fcntl(handle, fcntl.F_GETFL):
            direct.append(handle)
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return os.preadv(handle, [buffers[0][:8192]], offset)

    files = LayerFiles(folder, preadv)
    np.testing.assert_array_equal(read_all(files, 0)[0][0, 0], leaves(0)["matrix"])
    handle, supported = layer_files._open(folder / "layers.json")
    os.close(handle)
    assert bool(direct) == supported
    assert files.retries == 0


# Writing


def test_layers_are_written_once(folder):
    def read(layer):
        raise AssertionError("they are there")

    write(folder, read)


def test_a_failed_write_leaves_nothing(tmp_path):
    def read(layer):
        if layer == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return leaves(layer)

    with pytest.raises(CheckpointError, match=r"layers: cannot be written \(No space left on device\); free some"):
        write(tmp_path / "layers", read)
    assert not list(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=r"needs .* are free"):
        write_layers(tmp_path / "layers", 3, leaves, total_bytes=1 << 60)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot be written .* set layer_files to another folder"):
        write(tmp_path / "file" / "layers")


def test_nothing_is_written_where_a_link_leads(tmp_path):
    (victim := tmp_path / "victim").mkdir()
    (victim / "precious").write_text("mine")
    (tmp_path / ".layers.partial").symlink_to(victim)
    with pytest.raises(CheckpointError, match=r"\.layers\.partial: is not a directory but a file or a link; remove it"):
        write(tmp_path / "layers")
    assert os.listdir(victim) == ["precious"]


KILLED = """
import os, sys, pathlib, signal
from jaxinfer.checkpoints.layer_files import write_layers
import numpy as np, jax.numpy as jnp
def read(layer):
    if layer == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"matrix": jnp.ones((4, 4))}
write_layers(pathlib.Path(sys.argv[1]), 3, read, total_bytes=1)
"""


def test_a_writer_that_is_killed_leaves_nothing_that_counts(tmp_path):
    folder = tmp_path / "layers"
    done = subprocess.run([sys.executable, "-c", KILLED, folder], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not folder.exists()
    write(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["layers"]
    assert len(LayerFiles(folder).layers) == 3


# Reads that hang


class Hanging:
    """Reads of a file hang until they are let go.

    Attributes:
      begun: how many have.
    """

    def __init__(self, file):
        self._file, self._let_go, self.begun = file, threading.Event(), 0

    def preadv(self, handle, buffers, offset):
        if self._file in os.readlink(f"/proc/self/fd/{handle}"):
            self.begun += 1
            self._let_go.wait()
        return os.preadv(handle, buffers, offset)

    def let_go(self):
        self._let_go.set()


@pytest.fixture
def hanging():
    yield (found := Hanging("layer-00001"))
    found.let_go()


def store_of(folder, hanging, **options):
    sharding = SingleDeviceSharding(jax.devices()[0])
    return DiskStore(
        LayerFiles(folder, hanging.preadv),
        dict.fromkeys(range(3), [sharding] * 3),
        aliases=True,
        staging=Staging(**options),
    )


def check_layer(store, layer):
    fetch = store.start(layer)
    for array, wanted in zip(fetch.arrays(), leaves(layer).values(), strict=True):
        np.testing.assert_array_equal(array, wanted)
    fetch.release()


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_read_that_hangs_is_given_up_and_its_buffer_never_used_again(folder, hanging, monkeypatch):
    monkeypatch.setattr(readers, "READ_SECONDS", 0.2)
    monkeypatch.setattr(stores, "TAKE_SECONDS", 0.01)
    released = []
    store = store_of(folder, hanging, on_release=lambda buffer: released.append(buffer.ctypes.data))
    check_layer(store, 0)
    fetch = store.start(1)  # in the buffer of the other one
    with pytest.raises(
        CheckpointError, match=r"layer 1: .*layer-00001.bin, bytes 0 to .*: not read within 0.2 s; check"
    ):
        fetch.arrays()
    fetch.release()
    check_layer(store, 0)  # one thread is left
    first, second = released
    assert first != second
    fetch = store.start(1)
    with pytest.raises(CheckpointError, match=r"layer 1: .*not read within"):
        fetch.arrays()
    fetch.release()
    with pytest.raises(CheckpointError, match=r"layer 0: .*not read within"):
        store.start(0).arrays()
    assert released == [first, second]
    hanging.let_go()

    def both_come_back():  # as soon as a buffer is asked for when nothing writes to them any more
        store.staging.give_back(store.staging.take(store.largest))
        return {first, second} <= {*released[2:]}

    until(both_come_back)
    check_layer(store, 1)


def test_closing_ends_waiting(folder, hanging):
    before = set(threading.enumerate())
    store = store_of(folder, hanging)
    fetch, threads = store.start(1), set(threading.enumerate()) - before
    with ThreadPoolExecutor(1) as waiting:
        waits = waiting.submit(fetch.arrays)
        until(lambda: hanging.begun)
        store.close()
        with pytest.raises(CheckpointError, match=r"layer 1: .*layer-00001.bin.*: not read, because"):
            waits.result(60)
        with pytest.raises(CheckpointError, match="not read, because"):
            store.start(0).arrays()
    fetch.release()
    hanging.let_go()
    until(lambda: not any(thread.is_alive() for thread in threads))


def test_what_is_given_back_is_not_tried_again(folder, monkeypatch):
    tried, failing = [], [True]

    def preadv(handle, buffers, offset):
        tried.append(offset)
        if failing:
            raise OSError(errno.EIO, "injected")
        return os.preadv(handle, buffers, offset)

    monkeypatch.setattr(layer_files, "FIRST_DELAY", 1000.0)
    sharding = SingleDeviceSharding(jax.devices()[0])
    store = DiskStore(LayerFiles(folder, preadv), dict.fromkeys(range(3), [sharding] * 3), aliases=True)
    fetch = store.start(0)
    until(lambda: tried)
    fetch.release()
    failing.clear()
    check_layer(store, 1)
    assert store.files.retries == 0


HUNG = """
import pathlib, sys, threading
import jax
from jaxinfer.checkpoints import CheckpointError, readers
from jaxinfer.checkpoints.layer_files import LayerFiles
from jaxinfer.checkpoints.stores import DiskStore
readers.READ_SECONDS = 0.2
store = DiskStore(
    LayerFiles(pathlib.Path(sys.argv[1]), lambda *_: threading.Event().wait()),
    {0: [jax.sharding.SingleDeviceSharding(jax.devices()[0])] * 3},
    aliases=True,
)
try:
    store.start(0).arrays()
except CheckpointError as error:
    print(error)
"""


def test_the_process_ends_while_a_read_hangs(folder):
    done = subprocess.run([sys.executable, "-c", HUNG, folder], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "layer-00000.bin, bytes 0 to 65536: not read within 0.2 s" in done.stdout
