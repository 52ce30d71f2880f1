"""Hugging Face directories: what is read, and what each kind of damage says."""

import json
import pathlib

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfer.checkpoints import CheckpointError
from jaxinfer.checkpoints.huggingface import INDEX, SINGLE, SafetensorsFolder, read_json

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4).astype(ml_dtypes.bfloat16),
    "c": np.arange(4, dtype=np.float16),
}


def _sharded(path: pathlib.Path) -> None:
    save_file({"a": TENSORS["a"]}, path / "one.safetensors")
    save_file({"b": TENSORS["b"], "c": TENSORS["c"]}, path / "two.safetensors")
    weight_map = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("sharded", [False, True])
def test_reads_every_tensor(tmp_path, sharded):
    if sharded:
        _sharded(tmp_path)
    else:
        save_file(TENSORS, tmp_path / SINGLE)
    folder = SafetensorsFolder(tmp_path)
    assert folder.shapes == {"a": (2, 3), "b": (4,), "c": (4,)}
    for name, tensor in TENSORS.items():
        found = folder.read(name)
        assert found.dtype == tensor.dtype
        np.testing.assert_array_equal(found, tensor)


def test_the_index_says_which_file_counts(tmp_path):
    """Not the last one that has the tensor: the copy in the second file is an old one."""
    _sharded(tmp_path)
    save_file({"a": 0 * TENSORS["a"], "b": TENSORS["b"], "c": TENSORS["c"]}, tmp_path / "two.safetensors")
    folder = SafetensorsFolder(tmp_path)
    assert folder.tensors.keys() == TENSORS.keys()
    np.testing.assert_array_equal(folder.read("a"), TENSORS["a"])


def test_one_file_of_another_name(tmp_path):
    save_file(TENSORS, tmp_path / "weights.safetensors")
    assert SafetensorsFolder(tmp_path).tensors.keys() == TENSORS.keys()


def test_a_read_tensor_is_the_callers_alone(tmp_path):
    save_file(TENSORS, tmp_path / SINGLE)
    folder = SafetensorsFolder(tmp_path)
    tensor = folder.read("a")
    (tmp_path / SINGLE).write_bytes(b"")
    np.testing.assert_array_equal(tensor, TENSORS["a"])


@pytest.mark.parametrize("keep", [0, 4, 40, -1])
def test_truncated(tmp_path, keep):
    save_file(TENSORS, tmp_path / SINGLE)
    content = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(content[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated or corrupt .*; fetch it again"):
        SafetensorsFolder(tmp_path)


def test_corrupt_header(tmp_path):
    (tmp_path / SINGLE).write_bytes(np.uint64(20).tobytes() + b"x" * 40)
    with pytest.raises(CheckpointError, match="truncated or corrupt"):
        SafetensorsFolder(tmp_path)


def test_missing_files(tmp_path):
    with pytest.raises(CheckpointError, match=r"no model\.safetensors and no model\.safetensors\.index\.json"):
        SafetensorsFolder(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"PyTorch checkpoint: save it with .*safe_serialization=True"):
        SafetensorsFolder(tmp_path)


def test_missing_shards_are_all_named(tmp_path):
    _sharded(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"missing: one\.safetensors, two\.safetensors"):
        SafetensorsFolder(tmp_path)


def test_a_shard_without_what_the_index_promises(tmp_path):
    _sharded(tmp_path)
    save_file({"c": TENSORS["c"]}, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"two\.safetensors: lacks b"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("name", ["../model.safetensors", "/model.safetensors", "a/../../model.safetensors"])
def test_shards_are_in_the_folder(tmp_path, name):
    (folder := tmp_path / "folder").mkdir()
    save_file(TENSORS, tmp_path / SINGLE)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match=rf"folder: names a file '{name}' outside of it"):
        SafetensorsFolder(folder)


def test_links_are_followed_as_caches_of_downloads_need_it(tmp_path):
    (folder := tmp_path / "snapshot").mkdir()
    save_file(TENSORS, tmp_path / "blob")
    (folder / "one.safetensors").symlink_to("../blob")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(TENSORS, "one.safetensors")}))
    assert SafetensorsFolder(folder).tensors.keys() == TENSORS.keys()


def test_shards_without_index(tmp_path):
    _sharded(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(CheckpointError, match="2 safetensors files but no"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("content", ["{", '{"weight_map": 3}', "{}"])
def test_damaged_index(tmp_path, content):
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match="fetch it again"):
        SafetensorsFolder(tmp_path)


def test_dtypes_that_cannot_be_read(tmp_path):
    save_file({"a": np.arange(3, dtype=np.int64)}, tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match="a has dtype I64, which is not implemented"):
        SafetensorsFolder(tmp_path).read("a")


def test_json(tmp_path):
    file = tmp_path / "config.json"
    assert read_json(file) == {}
    with pytest.raises(CheckpointError, match="no such file"):
        read_json(file, required=True)
    for content in (b"[]", b"{", b"\xff"):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match="not a JSON object"):
            read_json(file)
