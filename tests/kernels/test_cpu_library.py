"""The library of CPU kernels: compiled by the compiler that is there, called by operations that a trace allows it."""

import os
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.disk_cache import keys
from jaxinfer.disk_cache.processor import cpu_fields
from jaxinfer.pallas_kernels.cpu import build as builds
from jaxinfer.pallas_kernels.cpu.build import BuildError, Compiler, build, build_digest, find_compiler, handlers
from jaxinfer.pallas_kernels.cpu.library import (
    DEFAULT_ROWS,
    Library,
    ffi_call,
    library_or_none,
    load_library,
    most_rows,
    use_library,
)
from jaxinfer.pallas_kernels.dispatch import Operation, recorded_implementations, without_kernels
from jaxinfer.pallas_kernels.implementation import composed, ffi
from jaxinfer.pallas_kernels.mosaic.interpreter import interpreted
from jaxinfer.pallas_kernels.target import UnsupportedError
from tests.kernels.cpu_levels import has_compiler

ROOM = Path(__file__).parent / "cpu_room"
SECONDS = 3600  # machines may be busy


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="there is no C++ compiler")


def named(digest, functions=("jaxinfer_times",), **options):
    return Library(digest=digest, level="generic", functions=functions, **options)


@pytest.fixture(scope="module")
def library():
    """`cpu_room`, built and loaded."""
    compiler = find_compiler()
    content = build(compiler, "generic", seconds=SECONDS, folder=ROOM, options=["-O1"])
    built = named(build_digest(compiler, "generic", [], ROOM), handlers(ROOM))
    load_library(built, content)
    return built


def times_by_library(x, *, factor):
    if x.ndim > 2:
        raise UnsupportedError("too many dimensions")
    return ffi_call("jaxinfer_times", jax.ShapeDtypeStruct(x.shape, x.dtype), x, factor=np.float32(factor))


def times_by_xla(x, *, factor):
    return x * factor


times = Operation("times", ffi(times_by_library), composed(times_by_xla))


def implementation(x, operation=times):
    """The name of the implementation that is traced."""
    with recorded_implementations() as used:
        jax.eval_shape(lambda x: operation(x, factor=2.0), x)
    return next(iter(used["times"])).name


# Operations.


@needs_compiler
def test_an_operation_calls_the_library_in_use(library):
    x = jnp.arange(12.0).reshape(3, 4)
    with use_library(library):
        assert implementation(x) == "ffi"
        program = jax.jit(lambda x: times(x, factor=3.0)).lower(x).compile()
    assert f"jaxinfer_times_{library.digest[:12]}" in program.as_text()
    np.testing.assert_array_equal(program(x), 3 * x)


def test_without_a_library_xla_runs():
    x = jnp.ones(3)
    with use_library(named("0" * 64)):
        assert implementation(x) == "ffi"
        with use_library(None):
            assert implementation(x) == "composed"
    assert library_or_none() is None
    assert implementation(x) == "composed"


@pytest.mark.parametrize(
    "context", [lambda: without_kernels("times"), without_kernels, interpreted], ids=["named", "all", "interpreting"]
)
def test_the_library_is_left_out(context):
    with use_library(named("0" * 64)):
        with context():
            assert implementation(jnp.ones(3)) == "composed"
        assert implementation(jnp.ones(3)) == "ffi"


def test_what_xla_divides_over_devices_has_no_kernels():
    automatic = jax.make_mesh((2,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    explicit = jax.make_mesh((2,), ("x",), (jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])
    with use_library(named("0" * 64)):
        with jax.set_mesh(automatic):
            assert implementation(jnp.ones(3)) == "composed"
        with jax.set_mesh(explicit):
            assert implementation(jnp.ones(3)) == "ffi"


def test_an_implementation_that_refuses_is_followed_by_the_next():
    with use_library(named("0" * 64)):
        assert implementation(jnp.ones((1, 1, 1))) == "composed"
    with use_library(named("0" * 64, ())):
        assert implementation(jnp.ones(3)) == "composed"


@needs_compiler
def test_each_part_of_a_mesh_calls_the_library(library):
    mesh = jax.make_mesh((4,), ("x",), (jax.sharding.AxisType.Explicit,), devices=jax.devices()[:4])
    spec = jax.sharding.PartitionSpec("x")
    with use_library(library), jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(64.0), jax.sharding.NamedSharding(mesh, spec))
        part = jax.shard_map(lambda x: times(x, factor=3.0), out_specs=spec)
        np.testing.assert_array_equal(jax.jit(part)(x), 3 * np.arange(64.0))


@needs_compiler
def test_calls_that_run_at_once_do_not_wait_for_each_other(library):
    """A program of independent calls, dispatched by three threads: as with q, k, v, and with several engines."""

    def fan_out(x):
        for _ in range(3):
            x = sum(times(x, factor=factor) for factor in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)) / 21
        return x

    with use_library(library):
        program = jax.jit(fan_out).lower(jnp.ones(32)).compile()
    results = []

    def dispatch():
        for _ in range(5):
            results.append(np.asarray(program(jnp.ones(32))))

    threads = [threading.Thread(target=dispatch, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert len(results) == 15
    np.testing.assert_allclose(results, 1, rtol=1e-6)


# What programs depend on.


def test_the_library_is_in_the_key_of_every_program():
    libraries = (
        None,
        named("0" * 64),
        named("1" * 64),
        named("0" * 64, limits=(("int8", 8),)),
    )
    found = []
    for library in libraries:
        with use_library(library):
            found.append(keys.digest(keys.environment_key()))
    assert len(set(found)) == len(libraries)


def test_limits_of_rows():
    assert most_rows(jnp.int8) == 0
    with use_library(named("0" * 64, limits=(("int8", 4), ("bfloat16", 0)))):
        assert [most_rows(dtype) for dtype in (jnp.int8, jnp.bfloat16, "uint16")] == [4, 0, DEFAULT_ROWS]


@needs_compiler
def test_the_digest_names_all_that_is_compiled(tmp_path):
    compiler = Compiler(("/usr/bin/c++",), "c++ 1.0")
    (tmp_path / "cpu").mkdir()
    source = tmp_path / "cpu" / "a.cc"
    source.write_text("int a;")
    found = [build_digest(compiler, "generic", ["cpu"], tmp_path)]
    found.append(build_digest(compiler, "avx2", ["cpu"], tmp_path))
    found.append(build_digest(compiler, "generic", ["another"], tmp_path))
    found.append(build_digest(Compiler(compiler.command, "c++ 2.0"), "generic", ["cpu"], tmp_path))
    source.write_text("int b;")
    found.append(build_digest(compiler, "generic", ["cpu"], tmp_path))
    source.rename(source.with_name("b.cc"))
    found.append(build_digest(compiler, "generic", ["cpu"], tmp_path))
    assert len(set(found)) == 6
    assert found[-1] == build_digest(compiler, "generic", ["cpu"], tmp_path)


# Compilers.


def script(path, text):
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return path


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError, match="install g\\+\\+ or clang\\+\\+"):
        find_compiler()


def test_a_compiler_that_is_named_and_not_there(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -v")
    with pytest.raises(BuildError, match="CXX=no-such-compiler"):
        find_compiler()


def test_the_compiler_is_the_one_that_cxx_names(monkeypatch, tmp_path):
    path = script(tmp_path / "mine", "print('mine 7.0'); print('more')")
    monkeypatch.setenv("CXX", f"{path} -DA=1")
    assert find_compiler() == Compiler((str(path), "-DA=1"), "mine 7.0")


def test_a_compiler_that_fails(tmp_path):
    path = script(tmp_path / "bad", "import sys\nsys.exit('warning: a\\nb.cc:1: error: no room')")
    with pytest.raises(BuildError, match=r"bad fails: b.cc:1: error: no room"):
        build(Compiler((str(path),), ""), "generic", seconds=SECONDS, folder=ROOM)


def runs(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # of which nobody has asked how it ended


@pytest.mark.slow
def test_a_compiler_that_hangs_is_ended_with_what_it_has_started(tmp_path):
    pid, path = tmp_path / "pid", tmp_path / "slow"
    path.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {pid}\nwait\n")
    path.chmod(0o755)
    with pytest.raises(BuildError, match="took longer"):
        builds.run([[str(path)]], seconds=3)
    end = time.monotonic() + 60
    while runs(pid.read_text().strip()):
        assert time.monotonic() < end
        time.sleep(0.01)


@needs_compiler
def test_source_that_does_not_compile(tmp_path):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "wrong.cc").write_text("int f() { return nothing; }")
    with pytest.raises(BuildError, match="nothing"):
        build(find_compiler(), "generic", seconds=SECONDS, folder=tmp_path)


# Loading.


@pytest.mark.parametrize("content", [b"", b"\x7fELF and nothing else", b"text" * 1000])
def test_a_damaged_library_is_an_error(content):
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=r"."):
        load_library(named("2" * 64), content)
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.slow
@needs_compiler
def test_two_builds_are_in_one_process(library, tmp_path):
    (tmp_path / "cpu").mkdir()
    text = (ROOM / "cpu" / "times.cc").read_text()
    (tmp_path / "cpu" / "times.cc").write_text(text.replace("in[i] * factor", "in[i] * factor + 1"))
    content = build(find_compiler(), "generic", seconds=SECONDS, folder=tmp_path, options=["-O0"])
    another = named(build_digest(find_compiler(), "generic", [], tmp_path))
    load_library(another, content)
    for used, expected in ((library, 6), (another, 7), (library, 6)):
        with use_library(used):
            assert float(jax.jit(lambda x: times(x, factor=3.0))(jnp.float32(2))) == expected


@pytest.mark.slow
@needs_compiler
def test_a_library_without_a_function_is_an_error():
    content = build(find_compiler(), "generic", seconds=SECONDS, folder=ROOM, options=["-O0"])
    with pytest.raises(OSError, match="jaxinfer_nothing"):
        load_library(named("3" * 64, ("jaxinfer_nothing",)), content)


def test_levels_of_a_cpu():
    assert builds.levels_of(["fpu", "sse2"]) == ("generic",)
    assert builds.levels_of(["avx2", "fma", "f16c"]) == ("avx2", "generic")
    flags = ["avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"]
    assert builds.levels_of(flags) == ("avx512_vnni", "avx512", "avx2", "generic")
    assert builds.levels_of([*flags, "avx512_bf16", "amx_tile"])[0] == "avx512_bf16"
    assert builds.levels_of([*flags, "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"]) == tuple(builds.LEVELS)


@needs_compiler
@pytest.mark.slow
def test_levels_that_this_cpu_lacks_compile():
    compiler, here = find_compiler(), builds.levels_of(cpu_fields().get("flags", "").split())
    for level in builds.LEVELS:
        if level not in here and compiler.accepts(level):
            assert build(compiler, level, seconds=200)[:4] == b"\x7fELF"
