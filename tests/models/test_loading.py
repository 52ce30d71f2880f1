"""Model directories as models: what is loaded, in which dtype and place, and what is refused."""

import dataclasses
import json
import math
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer import checkpoints
from jaxinfer.checkpoints import CheckpointError
from jaxinfer.models import DecoderConfig, Encoder, WeightFormat, devices
from jaxinfer.models.abstract import leaf_name
from jaxinfer.models.config import (
    Activation,
    AttentionConfig,
    LayerConfig,
    MlpConfig,
    NormConfig,
    NormKind,
    PositionKind,
    PositionsConfig,
)
from jaxinfer.models.files.conversion import HuggingFaceModel, convert
from jaxinfer.models.files.description import Description
from jaxinfer.models.files.loading import load_model, save_model
from jaxinfer.models.leaves import cache_leaves, canonical_leaves
from jaxinfer.sharding import MeshConfig, ShardingRules
from tests.models.vision import build
from tests.tiny import MOE_CONFIGS, save_tiny

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
CONFIG = DecoderConfig(
    vocab=64,
    embed=32,
    layers=3,
    context=40,
    pattern=(
        LayerConfig(
            mixer=AttentionConfig(
                q_heads=4,
                kv_heads=2,
                head_dim=8,
                qkv_bias=True,
                positions=PositionsConfig(kind=PositionKind.ROTARY, rotary_dim=8),
            ),
            mlp=MlpConfig(hidden=48, activation=Activation.SILU, gated=True),
        ),
    ),
    norm=NormConfig(kind=NormKind.RMS),
).with_windows((None, 8))


@pytest.fixture(scope="module")
def original():
    return build(CONFIG)


@pytest.fixture(scope="module")
def saved(original, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "model"
    save_model(
        path,
        original,
        family="test",
        tokenizer={"tokenizer.json": b"{}"},
        bos_id=1,
        eos_ids=(2, 3),
    )
    return path


@pytest.fixture
def copy(saved, tmp_path):
    return pathlib.Path(shutil.copytree(saved, tmp_path / "model"))


def _leaves(state) -> dict[str, jax.Array]:
    return {leaf_name(path): leaf[...] for path, leaf in nnx.to_flat_state(state)}


@jax.jit(static_argnums=0)
def _run(graphdef, state):
    tokens = jnp.arange(12)[None]
    return nnx.merge(graphdef, state)(tokens, tokens)[0]


def _hidden(model) -> np.ndarray:
    return np.asarray(_run(model.graphdef, model.state), np.float32)


def test_round_trip(original, saved):
    model = load_model(saved)
    assert (model.config, model.bos_id, model.eos_ids, model.folder) == (CONFIG, 1, (2, 3), saved)
    assert model.description.family == "test"
    expected, loaded = _leaves(nnx.state(original)), _leaves(model.state)
    assert expected.keys() == loaded.keys()
    jax.tree.map(np.testing.assert_array_equal, expected, loaded)


def test_a_loaded_model_is_saved_the_same(saved, tmp_path):
    model = load_model(saved)
    save_model(tmp_path / "again", nnx.merge(model.graphdef, model.state), family="test")
    leaves, again = checkpoints.load(saved), checkpoints.load(tmp_path / "again")
    assert leaves.keys() == again.keys()
    jax.tree.map(np.testing.assert_array_equal, leaves, again)


def test_halves_are_computed_in_float32_on_a_cpu(original, tmp_path):
    save_model(tmp_path / "model", original, family="test", dtype="bfloat16")
    assert load_model(tmp_path / "model").weights.dtype == jnp.float32
    kept = load_model(tmp_path / "model", dtype="bfloat16")
    assert kept.weights.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(kept.state) if leaf.ndim == 2} == {jnp.dtype(jnp.bfloat16)}
    assert {leaf.dtype for leaf in jax.tree.leaves(kept.state) if leaf.ndim == 1} == {jnp.dtype(jnp.float32)}


def test_on_a_device_of_its_own(saved):
    third = jax.devices()[2]
    model = load_model(saved, device=third)
    assert {device for leaf in model.leaves.values() for device in leaf.devices()} == {third}
    for name, leaf in load_model(saved).leaves.items():
        np.testing.assert_array_equal(model.leaves[name], leaf)
    with pytest.raises(ValueError, match=r"either a device .* or a mesh"):
        load_model(saved, device=third, mesh=MeshConfig(tensor=2))


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_on_a_mesh_the_same_numbers(saved, tmp_path, quantize):
    (tmp_path / "mesh.toml").write_text("[mesh]\ntensor = 2\n")
    whole = load_model(saved, quantize=quantize)
    split = load_model(saved, mesh=tmp_path / "mesh.toml", quantize=quantize)
    assert split.mesh is not None
    up = _leaves(split.state)["layers.0.mlp.gate_up.weight"]
    assert {shard.data.shape for shard in up.addressable_shards} == {(48, 32)}
    # A split sum rounds differently, and int8 activations may then fall on the other side of a step.
    np.testing.assert_allclose(_hidden(whole), _hidden(split), atol=1e-5 if quantize is None else 2e-2)


def test_int8_at_load(saved):
    exact, rounded = load_model(saved), load_model(saved, quantize="int8")
    leaves = _leaves(rounded.state)
    matrices = {name for name, leaf in leaves.items() if leaf.ndim == 2}
    assert {leaves[name].dtype for name in matrices} == {jnp.dtype(jnp.int8)}
    assert {name.rpartition(".")[0] + ".scale" for name in matrices} <= leaves.keys()
    difference = np.abs(_hidden(exact) - _hidden(rounded)).max()
    assert 0 < difference < 0.2


@pytest.fixture(scope="module")
def divisible(tmp_path_factory):
    """A model of whole groups of int4, and what it gives."""
    config = dataclasses.replace(CONFIG.with_mlp(hidden=512), embed=256, layers=1)
    save_model(path := tmp_path_factory.mktemp("divisible") / "model", build(config), family="test")
    return path, _hidden(load_model(path))


@pytest.mark.parametrize(
    ("quantize", "close"), [("int4", 0.25), ("fp8", 0.1), pytest.param("int8", 0.03, marks=pytest.mark.slow)]
)
def test_formats_of_a_model_that_int4_divides(divisible, quantize, close):
    """Outputs stay near float's, also divided over devices: groups of inputs stay whole."""
    path, exact = divisible
    rounded = _hidden(load_model(path, quantize=quantize))
    split = load_model(path, quantize=quantize, mesh=MeshConfig(tensor=2))
    difference = np.linalg.norm(exact - rounded) / np.linalg.norm(exact)
    assert close / 5 < difference < close
    np.testing.assert_allclose(rounded, _hidden(split), atol=2e-2 if quantize == "int8" else 1e-4)
    down = _leaves(split.state)["layers.0.mlp.down.weight"]
    assert {shard.data.shape for shard in down.addressable_shards} == {(256, 64 if quantize == "int4" else 256)}


def test_encoders_too(tmp_path):
    convert(GOLDENS / "bert_pooled", tmp_path / "model")
    model = load_model(tmp_path / "model")
    assert isinstance(nnx.merge(model.graphdef, model.state), Encoder)
    assert model.description.kind == "encoder"
    assert "block" not in json.loads((tmp_path / "model/config.json").read_text())["config"]  # always post-norm


@pytest.mark.parametrize("name", sorted(path.parent.name for path in GOLDENS.glob("*/config.json")))
def test_config_json_keeps_every_config(name, tmp_path):
    source = HuggingFaceModel(GOLDENS / name)
    description = Description(family=source.model_type, config=source.config, dtype=source.dtype, eos_ids=(1, 2))
    (tmp_path / "config.json").write_bytes(description.to_json())
    assert Description.read(tmp_path) == description


def _edit(folder, change):
    fields = json.loads((folder / "config.json").read_text())
    change(fields)
    (folder / "config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.update(kind="diffusion"), "Invalid enum value 'diffusion'"),
        (lambda f: f.update(dtype="int4"), "Invalid enum value 'int4'"),
        (lambda f: f.update(extra=1), "unknown field `extra`"),
        (
            lambda f: f["config"]["pattern"][1]["mixer"].update(sinks=4),
            r"unknown fields config\.pattern\[1\]\.mixer\.sinks",
        ),
        (lambda f: f["config"].update(layers="3"), r"Expected `int`, got `str` - at `\$\.layers`"),
        (lambda f: f["config"].update(layers=0), r"layers must be >= 1, got 0"),
        (lambda f: f["config"].update(layers=10**9), "has 1000000000 layers"),
        (lambda f: f["config"]["pattern"][0].pop("mlp"), "missing required field `mlp`"),
    ],
)
def test_config_json_is_read_strictly(copy, change, message):
    _edit(copy, change)
    with pytest.raises(CheckpointError, match=message) as error:
        Description.read(copy)
    assert str(copy / "config.json") in str(error.value)
    assert "\n" not in str(error.value)


def test_no_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json; make a model directory with `jaxinfer convert"):
        Description.read(tmp_path)


def test_a_hugging_face_directory_is_not_a_model_directory():
    with pytest.raises(CheckpointError, match="not a model directory; make one with `jaxinfer convert"):
        load_model(GOLDENS / "llama_llama3")


def test_all_leaves_that_do_not_fit_are_listed(copy, original, tmp_path):
    leaves, axes = checkpoints.load(copy), checkpoints.read_manifest(copy).leaves
    del leaves["layers.2.mlp.down.weight"], leaves["final_norm.scale"]
    leaves["head.weight"] = leaves["head.weight"][:-1]
    leaves["layers.0.mlp.gate_up.weight"] = leaves["layers.0.mlp.gate_up.weight"].astype(jnp.bfloat16)
    names = {name: axes[name].axes for name in leaves}
    leaves["surprise.weight"], names["surprise.weight"] = jnp.zeros((2, 2)), ("mlp", "embed")
    checkpoints.save(tmp_path / "bad", leaves, names, {"config.json": copy / "config.json"})
    with pytest.raises(CheckpointError) as error:
        load_model(tmp_path / "bad")
    message = str(error.value)
    assert "2 missing: final_norm.scale, layers.2.mlp.down.weight" in message
    assert "1 unexpected: surprise.weight" in message
    assert "2 mis-shaped" in message
    assert "head.weight is float32[63, 32], not float32[64, 32]" in message
    assert "layers.0.mlp.gate_up.weight is bfloat16[96, 32], not float32[96, 32]" in message
    assert "\n" not in message


def test_too_little_memory_is_said_before_loading(saved, monkeypatch):
    monkeypatch.setattr(devices, "available_bytes", lambda *_: 1000)
    monkeypatch.setattr(checkpoints, "stream", lambda *_, **__: pytest.fail("a weight was read"))
    with pytest.raises(MemoryError, match=r"loading needs [\d.]+ kB of memory and [\d.]+ kB are available; use"):
        load_model(saved)


def test_memory_is_that_of_the_leaves(saved):
    leaves = canonical_leaves(CONFIG, WeightFormat())
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(load_model(saved).state))
    assert devices.bytes_per_device(leaves, None, ShardingRules()) == total
    split = devices.bytes_per_device(leaves, MeshConfig(tensor=2).abstract(), ShardingRules())
    assert total / 2 < split < total * 0.52
    assert devices.available_bytes() > 2**20
    cache = cache_leaves(CONFIG, WeightFormat(), batch=2, context=40)
    assert sum(leaf.bytes for leaf in cache.values()) == 2 * 3 * (2 * 40) * 2 * 8 * 4


def test_a_device_that_reports_no_limit_does_not_get_the_memory_of_the_host():
    class Gpu:
        id, platform = 0, "gpu"

        def memory_stats(self):
            return {"bytes_in_use": 1}

    with pytest.raises(RuntimeError, match=r"gpu:0 does not say .* unset that variable"):
        devices.device_available_bytes(Gpu())


def test_a_process_without_the_cpu_is_told_how_to_add_it(monkeypatch):
    def absent(backend):
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setattr(jax, "local_devices", absent)
    with pytest.raises(RuntimeError, match="JAX_PLATFORMS=cuda,cpu"):
        devices.host_device()


def test_a_container_may_have_less_than_its_machine(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 900 kB\nMemAvailable:   500 kB\n")
    assert devices.host_available_bytes(tmp_path) == 500 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    assert devices.host_available_bytes(tmp_path) == 500 * 1024
    (group / "memory.max").write_text("300000\n")
    (group / "memory.current").write_text("250000\n")
    (group / "memory.stat").write_text("anon 190000\ninactive_file 50000\n")
    assert devices.host_available_bytes(tmp_path) == 100_000
    assert devices.host_total_bytes(tmp_path) == 300_000
    (group / "memory.max").write_text("max\n")
    assert devices.host_total_bytes(tmp_path) == 900 * 1024


def test_limits_of_groups_within_groups_and_of_version_1(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 900 kB\nMemAvailable:   500 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("4:cpu,memory:/outer/inner\n1:name=systemd:/\n0::/unified\n")
    groups = tmp_path / "sys/fs/cgroup"

    def limit(folder, most, used, cached):
        folder.mkdir(parents=True)
        (folder / "memory.limit_in_bytes").write_text(f"{most}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"cache 1\ntotal_inactive_file {cached}\n")

    limit(groups / "memory/outer/inner", 9223372036854771712, 100_000, 0)  # none
    assert devices.host_available_bytes(tmp_path) == 500 * 1024
    (groups / "memory/outer/memory.limit_in_bytes").write_text("not yet all files\n")
    assert devices.host_available_bytes(tmp_path) == 500 * 1024
    limit(groups / "memory/other", 1, 0, 0)
    assert devices.host_available_bytes(tmp_path) == 500 * 1024
    (groups / "memory/outer/memory.limit_in_bytes").unlink()
    (groups / "memory/outer/inner").rename(groups / "memory/inner")
    (groups / "memory/outer").rmdir()
    limit(groups / "memory/outer", 300_000, 250_000, 40_000)
    assert devices.host_available_bytes(tmp_path) == 90_000
    (groups / "unified").mkdir()
    (groups / "unified/memory.max").write_text("70000\n")
    (groups / "unified/memory.current").write_text("20000\n")
    (groups / "unified/memory.stat").write_text("inactive_file 1000\n")
    assert devices.host_available_bytes(tmp_path) == 51_000
    assert devices.host_total_bytes(tmp_path) == 70_000


def test_options(saved, original, tmp_path):
    (tmp_path / "memory.toml").write_text('[memory]\nweights = "disk"\n')
    with pytest.raises(ValueError, match=r"memory.toml: \[memory\] is for LLM and Embedder"):
        load_model(saved, mesh=tmp_path / "memory.toml")
    with pytest.raises(ValueError, match="dtype='int4' is not implemented; known: float32, bfloat16, float16"):
        load_model(saved, dtype="int4")
    with pytest.raises(ValueError, match="quantize='int2' is not implemented; known: int8, int4, fp8"):
        load_model(saved, quantize="int2")
    convert(GOLDENS / "llama_llama3", tmp_path / "int8", quantize="int8")
    with pytest.raises(ValueError, match="quantize='int4' needs a float model, and this one is stored in int8"):
        load_model(tmp_path / "int8", quantize="int4")
    assert load_model(tmp_path / "int8", quantize="int8").weights.quantized == "int8"
    quantized = load_model(saved, quantize="fp8")
    with pytest.raises(ValueError, match="takes a float model"):
        save_model(tmp_path / "x", nnx.merge(quantized.graphdef, quantized.state), family="test")
    with pytest.raises(ValueError, match="dtype='int8' is not implemented"):
        save_model(tmp_path / "x", original, family="test", dtype="int8")


@pytest.mark.parametrize("tensor", [2, 4])
def test_each_device_asks_for_its_own_part_alone(model_dir, asked, tensor):
    """Together the parts of a leaf that is split are read once, without what it is padded with."""
    model = load_model(model_dir, mesh=MeshConfig(tensor=tensor))
    attention = model.config.layer(0).attention
    copies = attention.kv_heads // model.description.config.layer(0).attention.kv_heads
    assert copies == tensor // 2
    stored = checkpoints.read_manifest(model_dir).leaves
    read_bytes = 0
    for name, leaf in stored.items():
        size = math.prod(leaf.shape)
        if name.endswith("qkv.weight"):  # each copy of a KV head has its key and value
            size += (copies - 1) * 2 * 2 * attention.head_dim * leaf.shape[1]
        read_bytes += size
    assert sum(asked) == read_bytes


@pytest.fixture(scope="module", params=["orbax", pytest.param("single-file", marks=pytest.mark.slow)])
def mixture(request, tmp_path_factory):
    """A dense layer, and one of eight experts, whose widths are whole groups of int4."""
    dense, moe = (kind.mlp for kind in MOE_CONFIGS["sigmoid"].pattern)
    moe = dataclasses.replace(moe, hidden=256, moe=dataclasses.replace(moe.moe, shared_hidden=512))
    config = CONFIG.with_mlps((dense, moe))
    return save_tiny(tmp_path_factory.mktemp("models") / "mixture", request.param, config)


@pytest.mark.parametrize(
    "quantize", [None, *(pytest.param(x, marks=pytest.mark.slow) for x in ("int8", "int4", "fp8"))]
)
def test_experts_come_to_the_devices_that_have_them(mixture, quantize, asked):
    whole = load_model(mixture, quantize=quantize).leaves
    alone = [{"expert": 2}] if quantize is None else []
    for mesh in (*alone, {"expert": 2, "tensor": 2}, {"data": 2, "expert": 2}):
        check_experts_on(MeshConfig(**mesh), mixture, quantize, whole, asked)


def check_experts_on(mesh, mixture, quantize, whole, asked):
    asked.clear()
    split = load_model(mixture, mesh=mesh, quantize=quantize)
    leaves = split.leaves
    if mesh.size == 2:  # no KV head is copied: together all parts are each leaf once
        assert sum(asked) == sum(math.prod(leaf.shape) for leaf in split.manifest.leaves.values())
    for name in whole:
        if ".mlp." in name:  # none is padded
            np.testing.assert_array_equal(np.asarray(leaves[name]), np.asarray(whole[name]), err_msg=name)
    (rows, _, inputs), shared = leaves[down := "layers.1.mlp.experts.down.weight"].shape, "layers.1.mlp.shared.down"
    held = {shard.data.shape for shard in leaves[down].addressable_shards}
    assert held == {(rows // mesh.data // mesh.expert, CONFIG.embed, inputs // mesh.tensor)}
    (held,) = {shard.data.shape[1] for shard in leaves[f"{shared}.weight"].addressable_shards}
    assert held == leaves[f"{shared}.weight"].shape[1] // mesh.expert // mesh.tensor
    for device in mesh.build().devices.flat:
        parts = (shard.data.nbytes for x in leaves.values() for shard in x.addressable_shards if shard.device == device)
        assert sum(parts) == split.bytes_per_device()


@pytest.mark.parametrize("quantize", ["int8", "int4", "fp8"])
def test_experts_that_are_stored_quantised(tmp_path, quantize):
    """In files of their own, padded: 10 numbers of an expert's width are 12 on four devices."""
    convert(GOLDENS / "olmoe_awkward", tmp_path / "m", quantize=quantize)
    whole = load_model(tmp_path / "m").leaves
    split = load_model(tmp_path / "m", mesh=MeshConfig(expert=5)).leaves
    padded = load_model(tmp_path / "m", mesh=MeshConfig(tensor=4)).leaves
    for name in ("gate_up.weight", "gate_up.scale", "down.weight", "down.scale"):
        name, leaf = f"layers.1.mlp.experts.{name}", np.asarray(whole[f"layers.1.mlp.experts.{name}"])
        np.testing.assert_array_equal(np.asarray(split[name]), leaf)
        padding = [(0, new - old) for new, old in zip(padded[name].shape, leaf.shape, strict=True)]
        np.testing.assert_array_equal(np.asarray(padded[name]), np.pad(leaf, padding))


def test_experts_that_do_not_divide_are_refused_before_reading(mixture, asked):
    with pytest.raises(ValueError, match=r"mixture: mesh expert=3: the 8 experts of layer 1 do not divide"):
        load_model(mixture, mesh=MeshConfig(expert=3))
    assert not asked
