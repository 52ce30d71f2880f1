"""Layer files of a model: found again, compared with it, somewhere else, and cleaned up."""

import fcntl
import os
import shutil
import stat

import crc32c
import jax
import numpy as np
import pytest

from jaxinfer.checkpoints import CheckpointError
from jaxinfer.models.files.conversion import convert
from jaxinfer.models.files.loading import open_model
from jaxinfer.sharding import MeshConfig
from jaxinfer.streaming import layer_folders
from jaxinfer.streaming.layer_folders import (
    find_layer_folders,
    layer_folder,
    layer_leaves,
    open_layer_files,
    read_leaves,
    remove_layer_folders,
    write_layer_files,
)
from tests.models import goldens


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "model"
    convert(goldens.DIRECTORY / "llama_llama3", path)
    return path


@pytest.fixture
def model(golden, tmp_path):
    return shutil.copytree(golden, tmp_path / "model")


FORMATS = {"float32": {}, "bfloat16": {"dtype": "bfloat16"}, "int8": {"quantize": "int8"}, "int4": {"quantize": "int4"}}
FORMATS |= {"tensor=2": {"mesh": MeshConfig(tensor=2)}}
REVISED = {
    1: {"float32": 2155442713, "bfloat16": 828959936, "int8": 1352155894, "int4": 3463150228, "tensor=2": 807199983},
    2: {"float32": 2700163079, "bfloat16": 1414531805, "int8": 182986555, "int4": 1251320163, "tensor=2": 752250444},
}
"""By revision, the crc32c of the demo model's first layer in each format. From 2 on leaves are named `weight` and
`gate_up`, and no longer `kernel` and `up`; nothing else is different."""


def test_another_content_is_another_revision():
    """Files under one key are the same in every version: if this fails, raise `REVISION`, and note what is so now."""
    found = {}
    for name, options in FORMATS.items():
        opened, total = open_model("examples/demo_model", **options), 0
        for leaf, array in read_leaves(opened, layer_leaves(opened, 0)).items():
            total = crc32c.crc32c(f"{leaf} {array.dtype} {array.shape}".encode(), total)
            for shard in array.addressable_shards:
                total = crc32c.crc32c(np.asarray(shard.data).tobytes(), total)
        found[name] = total
    assert found == REVISED[layer_folders.REVISION]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of layers in a cache of its own."""
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "layers"


def test_each_format_has_a_folder_of_its_own(model, monkeypatch, cache):
    found = {layer_folder(open_model(model, **options)) for options in FORMATS.values()}
    found.add(layer_folder(open_model(model), parts=1))
    monkeypatch.setattr(layer_folders, "REVISION", layer_folders.REVISION + 1)
    found.add(layer_folder(open_model(model)))
    assert len(found) == len(FORMATS) + 2
    assert {path.parent for path in found} == {cache}


def test_files_of_another_model_are_refused(model, cache):
    opened = open_model(model)
    other = write_layer_files(opened, parts=1)
    shutil.copytree(other, folder := layer_folder(opened))
    with pytest.raises(CheckpointError, match=rf"{folder.name}: has 1 layers, and the model has 2; remove .*;"):
        open_layer_files(opened)
    shutil.rmtree(folder)  # as the error says
    assert len(open_layer_files(opened).layers) == 2


def test_of_a_mesh_each_slice_is_compared(model, cache):
    opened = open_model(model, mesh=MeshConfig(tensor=2))
    shutil.copytree(write_layer_files(open_model(model)), layer_folder(opened))
    with pytest.raises(CheckpointError, match="is not the model's; remove"):
        open_layer_files(opened)


def test_they_can_be_in_another_folder(model, tmp_path):
    before = sorted(os.listdir(model))
    folder = write_layer_files(open_model(model), tmp_path / "layers" / "here")
    assert folder.parent == tmp_path / "layers" / "here"
    assert sorted(os.listdir(model)) == before
    (found,) = find_layer_folders(folder.parent)
    assert found.path == folder
    assert found.about == f"{model}: float32"
    assert found.bytes == sum(file.stat().st_size for file in folder.iterdir())


def test_by_default_they_are_in_a_cache_that_nobody_else_can_fill(model, cache):
    before = sorted(os.listdir(model))
    folder = open_layer_files(open_model(model)).folder
    assert (folder.parent, stat.S_IMODE(cache.stat().st_mode)) == (cache, 0o700)
    assert sorted(os.listdir(model)) == before
    (folder / "layer-00000.bin").write_bytes(b"another's")
    cache.chmod(0o777)
    files = open_layer_files(open_model(model))
    assert (folder / "layer-00000.bin").stat().st_size == files.layers[0].bytes
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    shutil.rmtree(cache)
    cache.symlink_to(model)
    with pytest.raises(CheckpointError, match=r"cache/layers: .* it is a link\); name a folder by layer_files"):
        open_layer_files(open_model(model))


def test_in_the_cache_those_used_longest_ago_make_room_unless_they_are_in_use(model, cache, monkeypatch):
    opened = [open_model(model, **options) for options in FORMATS.values()]
    float32, bfloat16, int8, *_ = folders = [layer_folder(each) for each in opened]
    for each in opened[:3]:
        write_layer_files(each)
    for age, folder in enumerate((float32, bfloat16, int8)):
        os.utime(folder, (1e9 - age, 1e9 - age))
    held = [open_layer_files(opened[2])]  # it has become the one that was used last
    os.utime(int8, (1, 1))  # and is the oldest again
    kept = sum(found.bytes for found in find_layer_folders(cache))
    usage = shutil.disk_usage(cache)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=kept + 1_000_000))
    write_layer_files(opened[3])
    assert all(folder.exists() for folder in folders[:4])
    kept = sum(found.bytes for found in find_layer_folders(cache))
    needed = sum(leaf.size * leaf.dtype.itemsize for layer in (0, 1) for leaf in opened[4].layer_shapes(layer))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=kept + 2 * needed - 1))
    write_layer_files(opened[4])
    assert [folder.exists() for folder in folders] == [True, False, True, True, True]
    held.clear()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed))
    write_layer_files(opened[1])
    assert [folder.exists() for folder in folders] == [False, True, False, False, True]


def test_what_killed_writers_left_is_cleaned_by_the_next(model):
    """Whatever format they wrote; that which another process is writing is left alone."""
    killed, writing = model / f".layers-{'0' * 16}.partial", model / f".layers-{'1' * 16}.partial"
    for partial in (killed, writing):
        (partial / "layers").mkdir(parents=True)
        (partial / "layers" / "layer-00000.bin").write_bytes(bytes(5000))
    handle = os.open(writing, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    write_layer_files(open_model(model), model)
    assert [found.bytes for found in find_layer_folders(model) if found.path == writing] == [5000]
    assert not killed.exists()
    os.close(handle)  # it is killed, too
    write_layer_files(open_model(model), model)
    assert not writing.exists()


def test_all_are_removed_and_nothing_else(model, tmp_path):
    for options in ({}, {"dtype": "bfloat16"}):
        write_layer_files(open_model(model, **options), model)
    (tmp_path / "mine").mkdir()
    (model / f"layers-{'2' * 16}").symlink_to(tmp_path / "mine")
    (model / "layers-mine").mkdir()
    (model / f"layers-{'3' * 16}").mkdir()
    found = find_layer_folders(model)
    assert sorted(folder.about.removeprefix(f"{model}: ") for folder in found) == [
        "bfloat16",
        "float32",
        "of another version, or damaged",
    ]
    reading = open_layer_files(open_model(model))  # beside the model, where they are
    remove_layer_folders(model)
    assert [folder.path for folder in find_layer_folders(model)] == [reading.folder]
    del reading
    remove_layer_folders(model)
    assert not find_layer_folders(model)
    assert (tmp_path / "mine").exists()
    assert (model / "layers-mine").exists()
    assert not list(model.glob(".*"))
    assert jax.tree.leaves(open_model(model).read())
