"""Writing and reading model directories: what comes back, what is read, and what is refused."""

import contextlib
import os
import pathlib
import stat

import jax
import jax.numpy as jnp
import ml_dtypes
import msgspec
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxinfer import checkpoints
from jaxinfer.checkpoints import CheckpointError, Writer, reading, writing
from jaxinfer.sharding import MeshConfig

LAYERS, WIDTH = 8, 128
AXES = {"weight": ("mlp", "embed"), "scale": ("norm",), "codes": ("vocab", "embed")}


def _leaves():
    rng = np.random.default_rng(0)
    for i in range(LAYERS):
        yield f"layers.{i}.weight", rng.standard_normal((4 * WIDTH, WIDTH), np.float32)
        yield f"layers.{i}.scale", rng.standard_normal(WIDTH, np.float32)
    yield "head.weight", rng.standard_normal((6, WIDTH)).astype(ml_dtypes.bfloat16)
    yield "embed.codes", rng.integers(-127, 128, (10, WIDTH), np.int8)
    yield "fp8.weight", rng.normal(size=(4, WIDTH)).astype(ml_dtypes.float8_e4m3fn)
    yield "int4.weight", rng.integers(0, 2**16, (4, WIDTH), np.uint16)
    yield "int4.scale", rng.normal(size=(2, 4)).astype(ml_dtypes.bfloat16)


LEAVES = dict(_leaves())


def _axes(name):
    return AXES[name.rpartition(".")[2]] if name != "int4.scale" else ("embed", "mlp")


def _save(path, layout):
    checkpoints.save(path, LEAVES, {name: _axes(name) for name in LEAVES}, {"config.json": b"{}"}, layout=layout)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model in many files."""
    return _save(tmp_path_factory.mktemp("models") / "model", "orbax")


@pytest.fixture(scope="module", params=["orbax", "single-file"])
def model(request, tmp_path_factory):
    """The model in both layouts."""
    return _save(tmp_path_factory.mktemp("models") / "model", request.param)


@pytest.fixture
def damaged(folder, tmp_path):
    """A copy that a test may change."""
    for file in folder.rglob("*"):
        if file.is_file():
            copy = tmp_path / "model" / file.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    return tmp_path / "model"


def _largest(path: pathlib.Path) -> pathlib.Path:
    return max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


def _bytes_read() -> int:
    """Bytes that this process has read from files, cached or not."""
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


def test_everything_comes_back(model):
    loaded = checkpoints.load(model)
    assert loaded.keys() == LEAVES.keys()
    for name, array in loaded.items():
        assert array.dtype == LEAVES[name].dtype
        np.testing.assert_array_equal(np.asarray(array), LEAVES[name])


def test_few_files_and_nothing_beside_them(model):
    assert sum(file.is_file() for file in model.rglob("*")) < len(LEAVES)
    assert list(model.parent.iterdir()) == [model]


def test_manifest_describes_the_leaves(model):
    manifest = checkpoints.read_manifest(model)
    assert manifest.leaves["layers.0.weight"] == checkpoints.Leaf((4 * WIDTH, WIDTH), "float32", ("mlp", "embed"))
    assert manifest.bytes == sum(array.nbytes for array in LEAVES.values())
    read = []
    assert checkpoints.verify_files(model, read.append) == manifest
    assert sum(read) == sum(file.size for file in manifest.files.values())


def test_files_are_read_by_name(model):
    assert checkpoints.read_file(model, "config.json") == b"{}"
    assert checkpoints.read_file(model, "tokenizer.json") is None
    assert checkpoints.list_files(model, "templates") == []
    assert checkpoints.is_complete(model)
    assert not checkpoints.is_complete(model.parent)


@pytest.mark.parametrize("groups", [1, 4])
def test_many_groups_make_one_checkpoint(tmp_path, monkeypatch, groups):
    monkeypatch.setattr(writing, "GROUP_BYTES", manifest_bytes() // groups)
    monkeypatch.setattr(reading, "GROUP_BYTES", manifest_bytes() // 3)
    checkpoints.save(tmp_path / "model", LEAVES, {name: _axes(name) for name in LEAVES}, {})
    loaded = checkpoints.load(tmp_path / "model")
    assert loaded.keys() == LEAVES.keys()
    assert all((np.asarray(loaded[name]) == LEAVES[name]).all() for name in LEAVES)


def manifest_bytes() -> int:
    return sum(array.nbytes for array in LEAVES.values())


def test_dtype_casts_float_matrices_only(model):
    loaded = checkpoints.load(model, dtype=jnp.bfloat16)
    assert loaded["layers.0.weight"].dtype == loaded["head.weight"].dtype == jnp.bfloat16
    assert loaded["layers.0.scale"].dtype == jnp.float32
    assert loaded["embed.codes"].dtype == jnp.int8
    for name in ("fp8.weight", "int4.weight", "int4.scale"):
        assert loaded[name].dtype == LEAVES[name].dtype
    expected = LEAVES["layers.0.weight"].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(loaded["layers.0.weight"]), expected)


def test_straight_into_a_sharding(model):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), (AxisType.Auto,) * 2)
    loaded = checkpoints.load(model, mesh=mesh)
    weight = loaded["layers.3.weight"]
    assert weight.sharding.spec == P("tensor", None)
    assert {shard.data.shape for shard in weight.addressable_shards} == {(2 * WIDTH, WIDTH)}
    assert len(weight.addressable_shards) == 4
    np.testing.assert_array_equal(np.asarray(weight), LEAVES["layers.3.weight"])


def test_a_leaf_that_does_not_divide_is_named(model):
    with pytest.raises(CheckpointError, match=r"embed\.codes: vocab=10 does not divide over tensor=4"):
        checkpoints.load(model, mesh=MeshConfig(tensor=4).build(), only=lambda name: name == "embed.codes")


def test_one_layer_reads_only_its_bytes(model):
    selected = [name for name in LEAVES if name.startswith("layers.5.")]
    needed = sum(LEAVES[name].nbytes for name in selected)
    checkpoints.load(model, only=lambda name: name == "layers.5.scale")  # imports behind us
    before = _bytes_read()
    loaded = checkpoints.load(model, only=set(selected).__contains__)
    read = _bytes_read() - before
    assert sorted(loaded) == sorted(selected)
    assert needed <= read < needed + 64_000  # beside manifests
    before = _bytes_read()
    checkpoints.load(model)
    assert _bytes_read() - before > LAYERS * needed


def test_streaming_holds_one_group_at_a_time(model, monkeypatch):
    monkeypatch.setattr(reading, "GROUP_BYTES", 1)
    before = len(jax.live_arrays())
    for _ in checkpoints.stream(model):
        assert len(jax.live_arrays()) <= before + 1


def test_damage_is_found_by_size(damaged):
    file = _largest(damaged)
    file.write_bytes(file.read_bytes()[:-1])
    (damaged / "config.json").unlink()
    with pytest.raises(CheckpointError) as error:
        checkpoints.load(damaged)
    message = str(error.value)
    assert "config.json is missing" in message
    assert file.name in message
    assert f"has {file.stat().st_size} bytes instead of {file.stat().st_size + 1}" in message
    assert "\n" not in message


def test_damage_is_found_by_sha256(damaged):
    files = _largest(damaged), damaged / "config.json"
    for file in files:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    checkpoints.read_manifest(damaged)  # sizes are right
    with pytest.raises(CheckpointError, match="sha256 differs") as error:
        checkpoints.verify_files(damaged)
    assert all(file.name in str(error.value) for file in files)


def test_not_a_model_directory(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(
            CheckpointError, match=r"no manifest\.json and no checkpoint\.safetensors.*jaxinfer convert"
        ):
            checkpoints.load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "damaged"),
        (b'{"format": 2}', "damaged"),
        (b"[]", "damaged"),
        (
            b'{"format": 1, "leaves": {"a.kernel": {}}}',
            "format=1 and this version reads 2: .* convert the model again, or",
        ),
        (b'{"format": 9, "leaves": {}, "files": {}}', "format=9 and this version reads 2; update jaxinfer"),
    ],
)
def test_damaged_manifest(tmp_path, content, message):
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        checkpoints.read_manifest(tmp_path)


@pytest.mark.parametrize("occupied", ["file", "directory"])
def test_an_occupied_output_is_left_alone(tmp_path, occupied):
    path = tmp_path / "model"
    inside = path
    if occupied == "directory":
        path.mkdir()
        inside = path / "keep"
    inside.write_text("mine")
    with pytest.raises(CheckpointError, match="not empty; name another output directory"):
        checkpoints.save(path, LEAVES, {}, {})
    assert inside.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [path]


def test_an_empty_output_directory_is_used(tmp_path):
    (tmp_path / "model").mkdir()
    checkpoints.save(tmp_path / "model", {"a.scale": np.ones(3, np.float32)}, {"a.scale": ("norm",)}, {})
    assert checkpoints.load(tmp_path / "model").keys() == {"a.scale"}


@pytest.mark.parametrize("late", [False, True])
def test_a_failure_leaves_nothing(tmp_path, monkeypatch, late):
    monkeypatch.setattr(writing, "GROUP_BYTES", 1)
    with contextlib.suppress(RuntimeError), Writer(tmp_path / "model") as writer:
        writer.add("a.scale", np.ones(3, np.float32), ("norm",))
        if late:
            monkeypatch.setattr(writing, "write_manifest", lambda *_: (_ for _ in ()).throw(RuntimeError))
        else:
            raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_two_writers_of_one_directory(tmp_path):
    with Writer(tmp_path / "model") as writer:
        writer.add("a.scale", np.ones(3, np.float32), ("norm",))
        with pytest.raises(CheckpointError, match="another process is writing"), Writer(tmp_path / "model"):
            pass
    assert checkpoints.load(tmp_path / "model").keys() == {"a.scale"}


def linked(partial, victim):
    partial.symlink_to(victim)


def with_links(partial, victim):
    """A directory that a killed writer left, with links in it."""
    partial.mkdir()
    (partial / "model").symlink_to(victim)
    (partial / "file").symlink_to(victim / "precious")
    (partial / "left").mkdir()
    (partial / "left" / "model").symlink_to(victim)


def of_another_user(partial, victim):
    partial.mkdir()
    os.chown(partial, 12345, -1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (linked, "not a directory but a file or a link; remove it"),
        (with_links, None),
        pytest.param(
            of_another_user,
            "belongs to another user",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs another user"),
        ),
    ],
)
def test_nothing_that_links_lead_to_is_deleted_or_written(tmp_path, change, message):
    (victim := tmp_path / "victim").mkdir()
    (victim / "precious").write_text("mine")
    change(partial := tmp_path / ".model.partial", victim)
    expected = pytest.raises(CheckpointError, match=rf"\.model\.partial: .*{message}") if message else None
    with expected or contextlib.nullcontext():
        checkpoints.save(tmp_path / "model", {"a.scale": np.ones(3, np.float32)}, {"a.scale": ("norm",)}, {})
    assert (victim / "precious").read_text() == "mine"
    assert os.listdir(victim) == ["precious"]
    assert partial.exists() == bool(message)
    assert (tmp_path / "model").exists() != bool(message)


def test_nobody_else_can_write_while_a_model_is_written(tmp_path):
    (tmp_path / ".model.partial").mkdir(mode=0o777)
    with Writer(tmp_path / "model") as writer:
        writer.add("a.scale", np.ones(3, np.float32), ("norm",))
        assert not stat.S_IMODE((tmp_path / ".model.partial").stat().st_mode) & 0o077
    (tmp_path / "like_any").mkdir()
    assert (tmp_path / "model").stat().st_mode == (tmp_path / "like_any").stat().st_mode


OUTSIDE = ["../outside", "a/../../outside", "/etc/hostname", "", ".."]


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_of_files_do_not_lead_out_of_the_directory(damaged, name):
    (damaged.parent / "outside").write_text("")
    manifest = msgspec.json.decode((damaged / "manifest.json").read_bytes())
    manifest["files"][name] = {"size": 0, "sha256": ""}
    (damaged / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(CheckpointError, match=rf"names a file '{name}' outside of it"):
        checkpoints.load(damaged)
    with pytest.raises(CheckpointError, match=rf"names a file '{name}' outside of it"):
        Writer(damaged.parent / "other").add_file(name, b"")
    assert (damaged.parent / "outside").read_text() == ""


@pytest.mark.parametrize(("change"), [{"shape": [4 * WIDTH, 2 * WIDTH]}, {"dtype": "bfloat16"}], ids=str)
def test_what_is_stored_is_what_the_manifest_says(damaged, change):
    manifest = msgspec.json.decode((damaged / "manifest.json").read_bytes())
    manifest["leaves"]["layers.0.weight"].update(change)
    (damaged / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(CheckpointError, match=r"layers\.0\.weight is stored as float32\[512, 128\], and manifest.json"):
        checkpoints.load(damaged)


def test_misuse_of_the_writer(tmp_path):
    with pytest.raises(ValueError, match="one name per dimension"), Writer(tmp_path / "model") as writer:
        writer.add("a.scale", np.ones(3, np.float32), ("norm", "embed"))
    with Writer(tmp_path / "twice") as writer:
        writer.add("a.scale", np.ones(3, np.float32), ("norm",))
        with pytest.raises(ValueError, match="added twice"):
            writer.add("a.scale", np.ones(3, np.float32), ("norm",))
    with pytest.raises(ValueError, match="no leaf was added"), Writer(tmp_path / "model"):
        pass
    assert list(tmp_path.iterdir()) == [tmp_path / "twice"]


@pytest.mark.parametrize("layout", ["orbax", "single-file"])
def test_the_caller_may_reuse_its_buffer(tmp_path, layout):
    buffer = np.ones(3, np.float32)
    with Writer(tmp_path / "model", layout=layout) as writer:
        for name in ("a.scale", "b.scale"):
            writer.add(name, buffer, ("norm",))
            buffer += 1
    loaded = checkpoints.load(tmp_path / "model")
    assert [np.asarray(loaded[name]).tolist() for name in ("a.scale", "b.scale")] == [[1.0] * 3, [2.0] * 3]
