"""A model directory of one file: what is in it, what is refused, and that no byte of it changes unnoticed."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import msgspec
import numpy as np
import pytest
from safetensors import safe_open

from jaxinfer import checkpoints
from jaxinfer.checkpoints import CheckpointError, Writer, single_file
from jaxinfer.checkpoints.single_file import SINGLE_FILE

RNG = np.random.default_rng(0)
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "uint16", "int32", "bool")
LEAVES = {f"{dtype}.weight": RNG.normal(size=(4, 6)).astype(dtype) for dtype in DTYPES} | {
    "number": np.float32(3.5).reshape(()),
    "nothing.weight": np.zeros((0, 3), np.float32),
    "odd.scale": RNG.normal(size=3).astype(ml_dtypes.bfloat16),
}
FILES = {"config.json": b'{"a": 1}\r\n', "templates/a.jinja": "\N{SNOWMAN}\0 {{ x }}".encode(), "templates/b.txt": b""}


def _save(path, leaves=LEAVES, files=FILES):
    axes = {name: (None,) * leaf.ndim for name, leaf in leaves.items()}
    checkpoints.save(path, leaves, axes, files, layout="single-file")
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return _save(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def file(model, tmp_path):
    """A copy that a test may change."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / SINGLE_FILE).write_bytes((model / SINGLE_FILE).read_bytes())
    return tmp_path / "model" / SINGLE_FILE


def _header(content):
    """The header of a file's content, and the rest."""
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def _join(header, data):
    """A file's content, signed anew: what another program than ours could write."""
    header["__metadata__"] = {"sha256": "0" * 64} | {k: v for k, v in header["__metadata__"].items() if k != "sha256"}
    text = msgspec.json.encode(header)
    length = len(text).to_bytes(8, "little")
    return length + text.replace(b"0" * 64, single_file._sha256(length + text).encode(), 1) + data


def test_every_dtype_comes_back_out_of_one_file(model):
    assert [file.name for file in model.rglob("*")] == [SINGLE_FILE]
    assert list(model.parent.iterdir()) == [model]
    loaded = checkpoints.load(model)
    assert loaded.keys() == LEAVES.keys()
    for name, array in loaded.items():
        assert (array.dtype, array.shape) == (LEAVES[name].dtype, LEAVES[name].shape)
        assert np.asarray(array).tobytes() == LEAVES[name].tobytes()


def test_the_other_files_come_back(model):
    assert {name: checkpoints.read_file(model, name) for name in FILES} == FILES
    assert checkpoints.list_files(model, "templates") == ["templates/a.jinja", "templates/b.txt"]
    manifest = checkpoints.verify_files(model)
    assert manifest.files.keys() == FILES.keys() | {f"state/{name}" for name in LEAVES}
    assert manifest.files["config.json"].size == len(FILES["config.json"])


def test_any_reader_of_safetensors_reads_it(model):
    with safe_open(model / SINGLE_FILE, framework="numpy") as opened:
        assert set(opened.keys()) == LEAVES.keys()
        for name in ("float32.weight", "bfloat16.weight", "int8.weight", "uint16.weight", "odd.scale", "number"):
            np.testing.assert_array_equal(opened.get_tensor(name), LEAVES[name])
        assert opened.metadata()["config.json"].encode() == FILES["config.json"]


def test_numbers_are_aligned_and_equal_models_are_equal_files(model, tmp_path):
    content = (model / SINGLE_FILE).read_bytes()
    header, data = _header(content)
    for name, tensor in header.items():
        if name != "__metadata__" and LEAVES[name].size:
            assert (len(content) - len(data) + tensor["data_offsets"][0]) % LEAVES[name].dtype.itemsize == 0
    shuffled = dict(sorted(LEAVES.items(), key=lambda item: item[0][::-1]))
    assert (_save(tmp_path / "again", shuffled) / SINGLE_FILE).read_bytes() == content


def _read_all(model):
    checkpoints.verify_files(model)


def _load(model):
    jax.block_until_ready(checkpoints.load(model))


@pytest.mark.parametrize("read", [_read_all, _load])
def test_no_byte_changes_unnoticed(tmp_path, read):
    """Every byte of the length, the header and the weights, each with another bit flipped."""
    file = _save(tmp_path / "model", {"a.scale": LEAVES["odd.scale"], "b": LEAVES["int8.weight"]}) / SINGLE_FILE
    content = bytearray(file.read_bytes())
    for place in range(len(content)):
        content[place] ^= 1 << place % 8
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"checkpoint\.safetensors|manifest\.json") as error:
            read(file.parent)
        assert "\n" not in str(error.value)
        content[place] ^= 1 << place % 8
    file.write_bytes(content)
    read(file.parent)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 100, -1, "and one more"])
def test_a_file_that_is_cut_or_longer_is_refused(file, size):
    content = file.read_bytes()
    file.write_bytes(content + b"\0" if isinstance(size, str) else content[:size])
    with pytest.raises(CheckpointError, match=r"checkpoint\.safetensors: .*; copy or convert again"):
        checkpoints.read_manifest(file.parent)


def test_one_leaf_is_read_and_checked_without_the_others(file):
    header, data = _header(file.read_bytes())
    begin = header["float32.weight"]["data_offsets"][0]
    content = bytearray(file.read_bytes())
    content[len(content) - len(data) + begin] ^= 1
    file.write_bytes(content)
    loaded = checkpoints.load(file.parent, only=lambda name: name == "int8.weight")
    np.testing.assert_array_equal(loaded["int8.weight"], LEAVES["int8.weight"])
    with pytest.raises(CheckpointError, match=r"sha256 of float32\.weight differs from manifest\.json"):
        checkpoints.load(file.parent, only=lambda name: name == "float32.weight")
    with pytest.raises(CheckpointError, match=r"sha256 differs from manifest\.json: state/float32\.weight;"):
        checkpoints.verify_files(file.parent)


def _other_shape(header, manifest):
    header["float32.weight"]["shape"] = [6, 4]


def _other_dtype(header, manifest):
    header["float32.weight"]["dtype"] = "I32"


def _without_a_tensor(header, manifest):
    del header["float32.weight"]


def _another_leaf(header, manifest):
    manifest["leaves"]["float32.bias"] = manifest["leaves"]["float32.weight"]


def _another_file(header, manifest):
    manifest["files"]["tokenizer.json"] = manifest["files"]["config.json"]


def _without_a_checksum(header, manifest):
    del manifest["files"]["state/float32.weight"]


def _no_dtype(header, manifest):
    manifest["leaves"]["float32.weight"]["dtype"] = "float31"


def _another_format(header, manifest):
    manifest["format"] = 99


def _no_file(header, manifest):
    del header["__metadata__"]["config.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_other_shape, "float32.weight not stored as in manifest.json"),
        (_other_dtype, "float32.weight not stored as in manifest.json"),
        (_without_a_tensor, "float32.weight not stored as in manifest.json"),
        (_another_leaf, "not stored as in manifest.json"),
        (_another_file, "its files differ from manifest.json"),
        (_without_a_checksum, "its files differ from manifest.json"),
        (_no_dtype, "float31"),
        (_another_format, "format=99 and this version reads"),
        (_no_file, "its files differ from manifest.json"),
    ],
)
def test_what_is_stored_is_what_the_manifest_says(file, change, message):
    header, data = _header(file.read_bytes())
    manifest = json.loads(header["__metadata__"]["manifest.json"])
    change(header, manifest)
    header["__metadata__"]["manifest.json"] = json.dumps(manifest)
    file.write_bytes(_join(header, data))
    with pytest.raises(CheckpointError, match=message):
        checkpoints.read_manifest(file.parent)


def test_a_file_of_another_program_is_refused(file):
    header, data = _header(file.read_bytes())
    del header["__metadata__"]["manifest.json"]
    file.write_bytes(_join(header, data))
    with pytest.raises(CheckpointError, match=r"not written by jaxinfer .*manifest\.json"):
        checkpoints.read_manifest(file.parent)
    del header["__metadata__"]
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    with pytest.raises(CheckpointError, match="its header is damaged or not written by jaxinfer"):
        checkpoints.read_manifest(file.parent)


def test_two_models_in_a_directory_are_refused(file):
    (file.parent / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"has both manifest\.json and checkpoint\.safetensors, .*remove one"):
        checkpoints.load(file.parent)


def test_large_models_are_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(single_file, "MAX_BYTES", 1 << 20)
    leaf, message = np.zeros(1 << 18, np.float32), r"model: 1\.0 MiB exceed the 1 MiB that a single file may have"
    with Writer(tmp_path / "fits", layout="single-file") as writer:
        writer.add("a", leaf[: 1 << 17], (None,))
    with pytest.raises(CheckpointError, match=message):
        _save(tmp_path / "model", {"a": leaf, "b": leaf[:1]}, {})
    with pytest.raises(CheckpointError, match=message):  # with its header
        _save(tmp_path / "model", {"a": leaf}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["fits"]


@pytest.mark.parametrize(
    ("leaves", "files", "message"),
    [
        ({"a": np.zeros(2, ml_dtypes.int4)}, {}, "a: safetensors has no dtype int4; use the layout orbax"),
        ({"a": np.zeros(2)}, {"image.png": b"\x89PNG"}, r"model: image\.png is not text"),
        ({"a": np.zeros(2)}, {"manifest.json": b"{}"}, r"model: the name manifest\.json is reserved in a single file"),
        ({"a": np.zeros(2)}, {"sha256": b""}, "model: the name sha256 is reserved in a single file"),
    ],
)
def test_what_one_file_cannot_hold_is_refused(tmp_path, leaves, files, message):
    with pytest.raises(CheckpointError, match=message):
        _save(tmp_path / "model", leaves, files)
    assert list(tmp_path.iterdir()) == []


def test_files_are_copied_from_paths(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    _save(tmp_path / "model", {"a": np.zeros(2)}, {"tokenizer.json": tmp_path / "tokenizer.json"})
    assert checkpoints.read_file(tmp_path / "model", "tokenizer.json") == b"{}"


def test_an_unknown_layout_is_refused(tmp_path):
    with pytest.raises(ValueError, match="layout='zip' is not implemented; known: orbax, single-file"):
        Writer(tmp_path / "model", layout="zip")


def test_casts(model):
    loaded = checkpoints.load(model, dtype=jnp.bfloat16)
    for name in ("float32.weight", "float16.weight"):
        np.testing.assert_array_equal(loaded[name], LEAVES[name].astype(ml_dtypes.bfloat16))
    assert loaded["float8_e5m2.weight"].dtype == jnp.float8_e5m2
    assert loaded["number"].dtype == jnp.float32
