"""Executables kept on disk: what is loaded is what was compiled, and every part of the key counts."""

import collections
import contextlib
import dataclasses
import importlib.metadata
import json
import logging
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxinfer.compiled import ExecutableStore, ProgramCache, ProgramSpec, Sizes, compiler_options
from jaxinfer.compiled.options import LARGE_WEIGHTS
from jaxinfer.disk_cache import keys
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.execution.layout import DeviceLayout
from jaxinfer.generation.execution.programs import admit, copy_pages, decode, decoder_programs, embed, zeros
from jaxinfer.generation.execution.programs.prefill import Prefill
from jaxinfer.generation.execution.state import DeviceState
from jaxinfer.models import KVPages, WeightFormat
from jaxinfer.models.config import NO_POSITIONS, EncoderConfig, LearnedPositions
from jaxinfer.models.files.loading import load_model
from jaxinfer.pallas_kernels.dispatch import without_kernels
from jaxinfer.pallas_kernels.mosaic import tuning
from jaxinfer.pallas_kernels.mosaic.interpreter import interpreted
from jaxinfer.sharding import ShardingRules
from tests.tiny import CONFIG

ENGINE = EngineConfig(max_batch=2, context=32, page_size=8, chunk_size=8, token_budget=8, max_adapters=1)
TRACE = "/jax/core/compile/jaxpr_trace_duration"


@pytest.fixture
def store(tmp_path):
    return ExecutableStore(tmp_path / "kept")


@pytest.fixture
def traced():
    """The names of all functions traced in this test."""
    names = collections.Counter()

    def listen(event, seconds, **details):
        if event == TRACE:
            names[details["fun_name"]] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def shape(*sizes, dtype=jnp.float32, weak_type=False, sharding=None):
    return jax.ShapeDtypeStruct(sizes, dtype, weak_type=weak_type, sharding=sharding)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copy(Sizes):
    program = "copy"
    pages: int = 4


class Other(Copy):
    program = "other"


COPY = Copy()


def copying(**options):
    """`copy_pages` of one layer of 4 pages."""
    page, index = shape(4, 2, 1, 8), shape(2, dtype=jnp.int32)
    given = {
        "sizes": Copy,
        "build": copy_pages.build,
        "arguments": lambda sizes: (DeviceState([KVPages(page, page)], None), index, index),
        "reachable": lambda buckets: (COPY,),
        "donate": (0,),
    }
    return ProgramSpec(**given | options)


def pages():
    return DeviceState([KVPages(*np.random.default_rng(0).normal(size=(2, 4, 2, 1, 8)).astype(np.float32))], None)


def test_what_is_loaded_is_what_was_compiled(store, traced):
    compiled = copying().compile(COPY, store=store)
    assert not compiled.kept
    before = traced.total()
    loaded = copying().compile(COPY, store=ExecutableStore(store.files.folder))
    assert loaded.kept
    assert traced.total() == before > 0
    assert loaded.memory == compiled.memory
    for name in ("args_info", "in_tree", "out_tree", "in_avals", "out_info", "input_shardings", "output_shardings"):
        assert getattr(loaded.executable, name) == getattr(compiled.executable, name), name
    index = np.array([1, 0], np.int32), np.array([3, 9], np.int32)  # the second goes nowhere
    expected, again, found = (program(pages(), *index) for program in (compiled, loaded, loaded))
    for result in (again, found):
        assert isinstance(result.caches[0], KVPages)
        jax.tree.map(np.testing.assert_array_equal, result, expected)
    assert [x.aval for x in jax.tree.leaves(found)] == [x.aval for x in jax.tree.leaves(expected)]
    where = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(found)]
    result = loaded(found, *index)
    assert all(x.is_deleted() for x in jax.tree.leaves(found))  # donated, and written in place
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(result)] == where
    with pytest.raises(TypeError, match="compiled with"):
        loaded(result, *(x.astype(np.float32) for x in index))


def test_a_program_on_a_mesh_is_kept(store, traced):
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,))
    split, whole = (NamedSharding(mesh, spec) for spec in (PartitionSpec(None, None, "tensor"), PartitionSpec()))
    page, index = shape(4, 2, 2, 8, sharding=split), shape(2, dtype=jnp.int32, sharding=whole)
    state = DeviceState([KVPages(page, page)], None)
    given = {
        "arguments": lambda sizes: (state, index, index),
        "out_shardings": lambda sizes: jax.tree.map(lambda x: x.sharding, state),
    }
    compiled, loaded = (copying(**given).compile(COPY, mesh=mesh, store=store) for _ in range(2))
    assert (compiled.kept, loaded.kept) == (False, True)
    empty = zeros.spec(state)
    made, again = (empty.compile(zeros.Zeros(), mesh=mesh, store=store)() for _ in range(2))
    indices = jax.device_put((np.array([1, 0], np.int32), np.array([3, 2], np.int32)), whole)
    expected, found = compiled(made, *indices), loaded(again, *indices)
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        assert (one.aval, one.sharding, one.committed) == (other.aval, other.sharding, other.committed)
        np.testing.assert_array_equal(one, other)
    assert traced["copy_pages"] == traced["zeros"] == 1


@contextlib.contextmanager
def patched(target, name, value):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, value)
        yield


@contextlib.contextmanager
def variable(name, value):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        yield


def doubled(static, sizes):
    return lambda *arguments: arguments


def moved(**options):
    """`copying` with other shapes or places of its pages."""
    page, index = shape(4, 2, 1, 8, **options), shape(2, dtype=jnp.int32)
    return copying(arguments=lambda sizes: (DeviceState([KVPages(page, page)], None), index, index))


@pytest.mark.parametrize(
    ("part", "change"),
    {
        "program": lambda: copying(sizes=Other),
        "function": lambda: copying(build=zeros.build),
        "static": lambda: copying(static=CONFIG),
        "static, deep inside": lambda: copying(static=dataclasses.replace(ENGINE, context=31)),
        "the dtype of an argument": lambda: moved(dtype=jnp.bfloat16),
        "a weak type": lambda: moved(weak_type=True),
        "the device of an argument": lambda: moved(sharding=SingleDeviceSharding(jax.devices()[1])),
        "the tree of the arguments": lambda: copying(arguments=lambda sizes: (*copying().arguments(COPY), ())),
        "donate": lambda: copying(donate=()),
        "out_shardings": lambda: copying(out_shardings=lambda sizes: SingleDeviceSharding(jax.devices()[1])),
        "compiler_options": lambda: copying(compiler_options=lambda sizes: {"xla_cpu_use_onednn": True}),
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_part_of_a_spec_is_in_its_key(part, change):
    base = keys.digest(copying(static=ENGINE).key(COPY))
    assert base == keys.digest(copying(static=ENGINE).key(COPY))
    assert keys.digest(change().key(COPY)) not in (base, keys.digest(copying().key(COPY)))


@pytest.mark.parametrize(
    "change",
    {
        "a library's version": lambda: patched(importlib.metadata, "version", lambda name: "0.1"),
        "python": lambda: patched(sys, "version", "4.0"),
        "instructions": lambda: patched(keys, "_cpu_features", lambda: ["avx3"]),
        "cores": lambda: patched(os, "sched_getaffinity", lambda pid: range(1000)),
        "devices": lambda: patched(jax, "devices", lambda: [jax.local_devices()[1]]),
        "XLA_FLAGS": lambda: variable("XLA_FLAGS", "--xla_cpu_enable_fast_math=true"),
        "code": lambda: patched(keys, "source_digest", lambda: "other"),
        "x64": lambda: jax.enable_x64(True),
        "precision": lambda: jax.default_matmul_precision("bfloat16"),
        "nan checks": lambda: jax.debug_nans(True),
        "no kernels": without_kernels,
        "one kernel less": lambda: without_kernels("merge_tokens"),
        "interpreter": interpreted,
        "a device": lambda: jax.default_device(jax.devices()[1]),
        "a mesh": lambda: jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2,), ("x",), (AxisType.Auto,))),
    }.items(),
    ids=lambda value: value[0],
)
def test_every_part_of_the_environment_is_in_the_key(change):
    spec = copying()
    base = keys.digest(spec.key(COPY))
    with change[1]():
        clear_caches()
        changed = keys.digest(spec.key(COPY))
    clear_caches()
    assert keys.digest(spec.key(COPY)) == base != changed


def clear_caches():
    for function in (keys._machine, keys._versions):
        function.cache_clear()


def test_sizes_and_meshes_are_in_the_key():
    layout = DeviceLayout(CONFIG, WeightFormat(), ENGINE, num_pages=4, platform="cpu")
    found = {keys.digest(admit.spec(layout).key(admit.Admit(count=count))) for count in (1, 2)}
    sizes = decode.Decode(batch=1, speculative=0, pages=4)
    others = [layout]
    others.append(DeviceLayout(CONFIG, WeightFormat(), ENGINE, num_pages=5, platform="cpu"))
    others.append(DeviceLayout(CONFIG, WeightFormat(quantized="int8"), ENGINE, num_pages=4, platform="cpu"))
    more = dataclasses.replace(CONFIG, norm=dataclasses.replace(CONFIG.norm, eps=1e-6))
    others.append(DeviceLayout(more, WeightFormat(), ENGINE, num_pages=4, platform="cpu"))
    passes = dataclasses.replace(ENGINE, max_decode_passes=3)
    others.append(DeviceLayout(CONFIG, WeightFormat(), passes, num_pages=4, platform="cpu"))
    found |= {keys.digest(decode.spec(other).key(sizes)) for other in others}
    found.add(keys.digest(decode.spec(layout).key(dataclasses.replace(sizes, speculative=2))))
    assert len(found) == 2 + len(others) + 1
    meshes = [jax.make_mesh((2,), (name,), axis_types=(kind,)) for name in "xy" for kind in AxisType]
    meshes.append(jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[2:4]))
    described = {json.dumps(keys.describe(mesh)) for mesh in meshes}
    assert len(described) == len(meshes)


def test_the_code_is_read_from_its_files(tmp_path, monkeypatch):
    folder = tmp_path / "ours"
    (folder / "inner").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(keys, "PACKAGE", "ours")
    monkeypatch.setattr(keys, "_STARTED", float("inf"))
    found = []
    for name, text in (("a.py", "x = 1"), ("a.py", "x = 2"), ("inner/b.py", ""), ("inner/table.json", "{}")):
        (folder / name).write_text(text)
        keys.source_digest.cache_clear()
        found.append(keys.source_digest())
    assert len(set(found)) == 4
    monkeypatch.setattr(keys, "_STARTED", 0.0)  # so all is newer
    keys.source_digest.cache_clear()
    with pytest.raises(keys.NoKeyError, match="has changed since this process started"):
        keys.source_digest()
    keys.source_digest.cache_clear()


def test_every_program_of_ours_can_be_kept(model_dir):
    """A program that depends on more than its spec says would be compiled in every process: it fails here."""
    layout = DeviceLayout.from_model(load_model(model_dir), ENGINE, num_pages=4)
    for spec in decoder_programs(layout):
        keys.describe_function(spec.build)
        keys.describe(spec.static)
    for given in (embed.build, zeros.build):
        keys.describe_function(given)
    keys.describe(embed.EncoderStatic(_encoder(), WeightFormat(), ShardingRules()))
    keys.describe((layout.state, layout.adapters))


def _encoder():
    names = [field.name for field in dataclasses.fields(EncoderConfig) if hasattr(CONFIG, field.name)]
    options = {name: getattr(CONFIG, name) for name in names}
    attention = dataclasses.replace(CONFIG.layer(0).attention, positions=NO_POSITIONS)
    kind = {"attention": attention, "mlp": CONFIG.layer(0).mlp, "learned_positions": LearnedPositions()}
    return EncoderConfig(**options | kind)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (lambda: copying(build=doubled), r"doubled is not a function of jaxinfer"),
        (lambda: copying(build=lambda static, sizes: lambda *arguments: arguments), "is not a function of jaxinfer"),
        (lambda: copying(static=(ENGINE, doubled)), "depends on a builtins.function"),
        (lambda: copying(static=object()), "depends on a builtins.object"),
    ],
)
def test_a_program_that_depends_on_unknown_code_is_never_kept(store, caplog, spec, why):
    caplog.set_level(logging.INFO, "jaxinfer.compiled")
    with pytest.raises(keys.NoKeyError, match=why):
        spec().key(COPY)
    for _ in range(2):
        assert not spec().compile(COPY, store=store).kept
    assert list(store.not_kept) == ["copy"]
    assert not store.files.sizes()
    said = [record.message for record in caplog.records if not record.message.startswith("compil")]
    assert [message.partition(":")[0] for message in said] == ["copy is compiled in every process"]


def test_a_function_with_values_of_its_own_has_no_name():
    def inside(static, sizes):
        return store

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, "PACKAGE", __name__.partition(".")[0])
        for function in (inside, lambda static, sizes, extra=1: extra):
            with pytest.raises(keys.NoKeyError, match="has values of its own"):
                keys.describe_function(function)


def test_sizes_of_another_type_are_no_error(store):
    for size in (np.int64(16), object()):
        spec = copying(arguments=lambda sizes: copying().arguments(COPY), static=ENGINE)
        spec.compile(Copy(pages=size), store=store)
    assert list(store.not_kept.values()) == ["it depends on a builtins.object"]
    assert len(store.files.sizes()) == 1


def test_a_program_with_a_replaced_function_is_run_and_not_kept(store, monkeypatch):
    monkeypatch.setattr(copy_pages, "copy_pages", lambda *arguments: arguments[0])
    assert not copying().compile(COPY, store=store).kept
    assert "copy_pages.copy_pages was replaced by a function of" in store.not_kept["copy"]
    monkeypatch.undo()
    assert not copying().compile(COPY, store=store).kept
    assert copying().compile(COPY, store=store).kept


def test_logits_processors_are_never_kept(model_dir, store):
    layout = DeviceLayout.from_model(
        load_model(model_dir), ENGINE, num_pages=4, processors=(lambda scores, *_: scores,)
    )
    (prefill,) = [spec for spec in decoder_programs(layout) if spec.name == "prefill"]
    assert not prefill.compile(Prefill(chunks=1, batch=0, pages=4), store=store).kept
    assert store.not_kept["prefill"].startswith("it depends on a builtins.function")
    assert not store.files.sizes()


def test_products_of_onednn_cannot_be_kept(store):
    """Should this fail because jaxlib has learned to serialise them, `ExecutableStore.save` has a case less."""
    large = dataclasses.replace(CONFIG.with_mlp(hidden=1024), embed=1024, layers=1)
    layout = DeviceLayout(large, WeightFormat(), ENGINE, num_pages=4, platform="cpu")
    options = compiler_options("cpu", rows=8, dtype=np.dtype(np.float32), weight_bytes=LARGE_WEIGHTS)
    assert options["xla_cpu_use_onednn"]
    (prefill,) = [spec for spec in decoder_programs(layout) if spec.name == "prefill"]
    prefill = dataclasses.replace(prefill, compiler_options=lambda sizes: options)
    prefill.compile(Prefill(chunks=1, batch=0, pages=4), kernels=False, store=store)
    assert "oneDNN" in store.not_kept["prefill"]
    assert not store.files.sizes()


def test_it_can_be_switched_off(store):
    copying().compile(COPY, store=store)
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        assert not copying().compile(COPY, store=store).kept
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert store.not_kept == {"copy": "jax_enable_compilation_cache is off"}
    assert copying().compile(COPY, store=store).kept


def test_tile_sizes_on_trial_are_not_kept(store):
    with tuning.Trial("an operation", {}).active():
        assert not copying().compile(COPY, store=store).kept
    assert store.not_kept == {"copy": "it depends on a jaxinfer.pallas_kernels.mosaic.tuning.Trial"}


def test_dumps_are_written_by_compiling(store, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=somewhere")
    assert not copying().compile(COPY, store=store).kept
    assert store.not_kept == {"copy": "XLA_FLAGS asks for dumps, which only compiling writes"}


@pytest.mark.parametrize("content", [b"", b"\xff" * 50, b"\x02" + bytes(7) + b"{}"])
def test_what_cannot_be_loaded_is_compiled_anew(store, content):
    spec = copying()
    spec.compile(COPY, store=store)
    (name,) = store.files.sizes()
    store.files.put(name, content)  # whole, but not an executable
    assert not spec.compile(COPY, store=store).kept
    assert spec.compile(COPY, store=store).kept


def test_a_truncated_executable_is_compiled_anew(store):
    spec = copying()
    spec.compile(COPY, store=store)
    (path,) = store.files.folder.iterdir()
    for length in (0, 10, 1000, path.stat().st_size - 1):
        path.write_bytes(path.read_bytes()[:length])
        assert not spec.compile(COPY, store=store).kept
    assert spec.compile(COPY, store=store).kept


def test_an_unwritable_store_costs_only_time(tmp_path):
    (tmp_path / "file").write_text("")
    store = ExecutableStore(tmp_path / "file" / "kept")
    cache = ProgramCache([copying()], store=store)
    assert not cache.get(COPY).kept
    assert not store.files.sizes()
