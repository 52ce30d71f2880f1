"""Compiling small programs for a GPU that is not here (marker `aot`), and what that needs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.compiled import compiler_options
from jaxinfer.compiled import target as target_module
from jaxinfer.compiled.target import Target, compile_for, require_compiler
from jaxinfer.extras import MissingExtraError
from jaxinfer.pallas_kernels.target import GPU


def test_targets():
    assert "h200" in Target.names()
    assert 'name: "NVIDIA H200"' in Target.load("h200").description
    assert Target.load("h200").gpu == GPU(name="NVIDIA H200", capability=(9, 0), sms=132, shared_bytes=227 << 10)
    with pytest.raises(ValueError, match=r"The description of target 'x' has nothing like .*capability"):
        _ = Target(name="x", description="").gpu
    with pytest.raises(ValueError, match=r"Unknown target 'h2000'; known: .*h200"):
        Target.load("h2000")


DUMPED = """gpu_device_info {
  core_count: 114
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {
    major: 9
    feature_extension: ACCELERATED_FEATURES
  }
}
dnn_version_info {
  major: 8
  minor: 9
}
device_description_str: "NVIDIA H100 PCIe"
"""


def test_a_dumped_description_leaves_out_zeros():
    assert Target(name="x", description=DUMPED).gpu == Target.load("h100-pcie").gpu


@pytest.mark.parametrize(("find", "missing"), [("jax_plugins", "jax-cuda13-plugin"), ("nvidia", "ptxas")])
def test_a_missing_compiler_names_the_extra(monkeypatch, find, missing):
    present = target_module.importlib.util.find_spec
    pretended = target_module.importlib.util.spec_from_loader("jax_plugins", None)

    def find_spec(name):
        if name.startswith(find):
            return None
        return pretended if name.startswith("jax_plugins") else present(name)

    monkeypatch.setattr(target_module.importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(target_module.shutil, "which", lambda name: None)
    monkeypatch.setattr(target_module.Path, "exists", lambda path: False)
    with pytest.raises(MissingExtraError, match=rf"{missing}.*of the extra aot: pip install jax-cuda13-plugin "):
        require_compiler()


@pytest.mark.aot
def test_without_the_options_the_host_drives_the_loop():
    def loop(x):
        return jax.lax.while_loop(lambda x: x.sum() < 100, lambda x: x @ x, x)

    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    options = compiler_options("gpu", rows=8, dtype=np.dtype(jnp.bfloat16))
    driven, captured = (compile_for(Target.load("h200"), loop, (x,), options=o) for o in ({}, options))
    assert "kWhile" in driven.host_launches
    assert (captured.graphs, captured.host_launches) == (1, ())


@pytest.mark.aot
def test_kernels_in_branches_name_their_condition():
    """The branches for true, and for all numbers but 0, are conditional; a loop is counted apart."""

    def of(function):
        return lambda x: function(x @ x)

    def turn(x):
        with jax.named_scope("outer"):
            x = jax.lax.cond(x[0, 0] > 0, hidden, of(jnp.tanh), x)
        return x.T @ x

    def hidden(x):
        with jax.named_scope("inner"):
            x = jax.lax.cond(x[0, 1] > 0, of(jnp.exp), of(jnp.sin), x)
        with jax.named_scope("choice"):
            return jax.lax.switch(x[0, 2].astype(int), [of(f) for f in (jnp.cos, jnp.log, jnp.exp2)], x)

    def loop(x, stop):
        return jax.lax.while_loop(lambda x: x.sum() < stop, turn, jnp.sqrt(x @ x))

    x, stop = jax.ShapeDtypeStruct((256, 256), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)
    options = compiler_options("gpu", rows=8, dtype=np.dtype(jnp.bfloat16))
    kernels = compile_for(Target.load("h200"), loop, (x, stop), options=options).kernels
    conditions = {kernel.scope.rpartition("/")[2]: kernel.condition for kernel in kernels}
    outer = "while/body/outer/cond"
    assert conditions["sqrt"] == conditions["tanh"] == ""
    assert conditions["sin"] == conditions["cos"] == outer
    assert conditions["exp"] == f"{outer}/branch_1_fun/inner/cond"
    assert conditions["log"] == conditions["exp2"] == f"{outer}/branch_1_fun/choice/cond"
    assert {kernel.in_loop for kernel in kernels if "sqrt" in kernel.scope} == {False}
    assert {kernel.in_loop for kernel in kernels if kernel.condition} == {True}


@pytest.mark.aot
def test_kernels_for_two_capabilities_need_two_processes(monkeypatch):
    monkeypatch.setattr(target_module, "_assembled_for", [(10, 0)])
    x = (jax.ShapeDtypeStruct((8,), jnp.float32),)
    with pytest.raises(
        RuntimeError, match=r"here \(10, 0\): compile for NVIDIA H200, \(9, 0\), in a process of its own"
    ):
        compile_for(Target.load("h200"), jnp.sin, x)
    assert compile_for(Target.load("l4"), jnp.sin, x).kernels  # no kernels of Mosaic


@pytest.mark.aot
def test_registers_of_a_kernel_without_spills():
    x = jax.ShapeDtypeStruct((8, 4096), jnp.float32)
    report = compile_for(Target.load("h200"), lambda x: jax.nn.softmax(x), (x,), resources=True)
    assert [kernel.resources.spill_bytes for kernel in report.kernels if kernel.resources] == [0]
    assert all(0 < kernel.resources.registers < 256 for kernel in report.kernels if kernel.resources)


def scaled(name, factor, columns, semantics=plgpu.LoweringSemantics.Warpgroup):
    """A Mosaic kernel that copies rows to shared memory by TMA and writes them multiplied by `factor`."""

    def body(x, y, row, barrier):
        index = jax.lax.axis_index("row")
        plgpu.copy_gmem_to_smem(x.at[index], row, barrier)
        plgpu.barrier_wait(barrier)
        y[index] = row[...] * factor

    def run(x):
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
            scratch_types=[plgpu.SMEM((columns,), x.dtype), plgpu.Barrier()],
            grid=x.shape[:1],
            grid_names=("row",),
            kernel_name=name,
            compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
        )(x)

    return run


@pytest.mark.aot
def test_mosaic_kernels_are_told_apart():
    """By name, also if one is used twice, shared by a nested `jit`, or between XLA's own kernels."""
    double, triple = scaled("double", 2, 256), scaled("triple_3", 3, 128, plgpu.LoweringSemantics.Lane)
    shared = jax.jit(scaled("shared", 5, 256))

    def f(x, y):
        with jax.named_scope("layers.1"):
            x = double(jnp.sin(shared(x)))
        return shared(double(x)), triple(y)

    args = jax.ShapeDtypeStruct((8, 256), jnp.float32), jax.ShapeDtypeStruct((16, 128), jnp.float32)
    expected = ["double", "double", "shared", "shared", "triple_3"]
    for resources in (False, True):
        report = compile_for(Target.load("h200"), f, args, resources=resources)
        found = [kernel for kernel in report.kernels if kernel.kind == "mosaic"]
        assert sorted(kernel.name for kernel in found) == expected
        for kernel in found:  # launches are known either way
            rows, columns = (16, 128) if kernel.name == "triple_3" else (8, 256)
            assert (kernel.grid, kernel.cluster, kernel.threads) == (rows, 1, 128)
            assert columns * 4 < kernel.shared_bytes <= 1024 + 64  # Mosaic aligns; the barrier
    assert len(report.kernels) == len(expected) + 1  # the sine is XLA's
    assert report.of_layer(1)[0].name == "shared"
    for kernel in found:
        assert 0 < kernel.resources.registers < 64
        assert kernel.resources.spill_bytes == 0
        assert kernel.resources.features == ("UTMALDG",)


@pytest.mark.aot
def test_spills_are_reported():
    def body(x, y):  # 512 numbers per thread
        y[...] = jax.lax.fori_loop(0, 3, lambda i, tile: tile * tile + i, x[...])

    def f(x):
        return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), kernel_name="greedy")(x)

    report = compile_for(Target.load("h200"), f, (jax.ShapeDtypeStruct((128 * 512,), jnp.float32),), resources=True)
    resources = report.kernels[0].resources
    assert resources.registers == 255
    assert resources.spill_bytes > 0
    assert {"LDL", "STL"} <= set(resources.features)
