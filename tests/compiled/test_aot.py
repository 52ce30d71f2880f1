"""Compiling for an H200 here: what GPT-J-6B's decode runs there (marker `aot`), and the readers of XLA's dumps."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import mosaic_gpu as plgpu
from typer.testing import CliRunner

from jaxinfer.cli import app
from jaxinfer.cli.inspect import decode_program
from jaxinfer.compiled import compiler_options
from jaxinfer.compiled import target as target_module
from jaxinfer.compiled.dumps import (
    Buffer,
    Launch,
    Resources,
    read_aliases,
    read_instructions,
    read_mosaic_dumps,
    read_mosaic_launch,
    read_op_names,
    read_resources,
    read_temporaries,
    read_thunk_names,
    read_thunks,
)
from jaxinfer.compiled.target import MissingCompilerError, Target, compile_for, require_compiler
from jaxinfer.models import KVPages, WeightFormat
from jaxinfer.models.loading import Description, abstract_model
from jaxinfer.models.presets import preset

BF16 = WeightFormat(dtype=np.dtype(jnp.bfloat16))
CONTEXT = 2048
KERNELS_PER_LAYER = 5  # norm and qkv; attention; output and residual; norm, up and activation; down and residual
OUTSIDE = 9  # embedding, rotary tables, last norm, head, argmax


def step_report(layers, model="gpt-j-6b", *, batch=1, weights=BF16, page_size=16):
    """One greedy decode step of a model's shape, compiled for an H200."""
    config = dataclasses.replace(preset(model), layers=layers)
    graphdef, state = nnx.split(abstract_model(config, weights))
    leaves, treedef = jax.tree.flatten(state)
    pages = CONTEXT // page_size
    page = (page_size, config.attention.kv_heads, config.attention.head_dim)
    cache = jax.ShapeDtypeStruct((batch * pages, *page), weights.dtype)
    one = jax.ShapeDtypeStruct((batch, 1), jnp.int32)

    def step(leaves, caches, tokens, positions, page_table):
        model = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
        hidden, caches = model(tokens, positions, caches, page_table)
        return jnp.argmax(model.logits(hidden[:, -1]), axis=-1), caches

    options = compiler_options("gpu", rows=batch, dtype=weights.matrix_dtype)
    args = (leaves, [KVPages(cache, cache)] * layers, one, one, jax.ShapeDtypeStruct((batch, pages), jnp.int32))
    return compile_for(Target.load("h200"), step, args, donate=(1,), options=options)


def cache_bytes(batch=1):
    """Keys (or values) of one layer."""
    attention = preset("gpt-j-6b").attention
    return batch * CONTEXT * attention.kv_heads * attention.head_dim * 2


@pytest.fixture(scope="module")
def whole_step():
    return step_report(preset("gpt-j-6b").layers)


@pytest.mark.aot
def test_caches_are_written_in_place(whole_step):
    assert whole_step.aliased == whole_step.donated == 2 * 28
    assert whole_step.alias_bytes == 2 * 28 * cache_bytes()


@pytest.mark.aot
def test_nothing_large_is_temporary(whole_step):
    """Pages are read in place, and no weights are converted: only partial sums of clusters, which all layers share."""
    assert whole_step.temp_bytes < 2e6


@pytest.mark.aot
def test_kernels_per_layer(whole_step):
    assert whole_step.layers == 28
    assert {len(whole_step.of_layer(layer)) for layer in range(1, 28)} == {KERNELS_PER_LAYER}
    assert len(whole_step.kernels) <= 28 * KERNELS_PER_LAYER + OUTSIDE


@pytest.mark.aot
def test_a_step_is_one_graph(whole_step):
    assert (whole_step.graphs, whole_step.host_launches) == (1, ())
    assert all(kernel.in_graph for kernel in whole_step.kernels)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("model", "batch", "quantized"),
    [
        ("gpt-j-6b", 8, None),
        ("gpt-j-6b", 1, "int8"),
        ("llama3-8b", 1, None),
        ("llama3-8b", 16, "int4"),
        ("gpt2-1.5b", 1, None),
        ("gpt2-1.5b", 1, "int8"),
    ],
)
def test_a_layer_is_five_kernels_of_ours(model, batch, quantized):
    report = step_report(2, model, batch=batch, weights=dataclasses.replace(BF16, quantized=quantized))
    assert [kernel.kind for kernel in report.of_layer(1)] == ["mosaic"] * KERNELS_PER_LAYER
    assert (report.graphs, report.host_launches) == (1, ())
    assert report.temp_bytes < (2e6 if batch == 1 else 8e6)  # with logits


@pytest.mark.aot
@pytest.mark.parametrize("batch", [1, 8])
def test_the_generation_loop_is_one_graph(batch):
    config = dataclasses.replace(preset("gpt-j-6b"), layers=2)
    program, args = decode_program(config, BF16, batch=batch, context=CONTEXT, steps=16)
    options = compiler_options("gpu", rows=batch, dtype=BF16.dtype)
    report = compile_for(Target.load("h200"), program, args, donate=(2,), options=options)
    assert (report.graphs, report.host_launches) == (1, ())
    assert report.aliased == report.donated == len(jax.tree.leaves(args[2]))  # the caches and the slots
    assert len(report.of_layer(1)) == KERNELS_PER_LAYER
    assert report.temp_bytes < 16e6


@pytest.mark.aot
def test_without_the_options_the_host_drives_the_loop():
    def loop(x):
        return jax.lax.while_loop(lambda x: x.sum() < 100, lambda x: x @ x, x)

    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    options = compiler_options("gpu", rows=8, dtype=BF16.dtype)
    driven, captured = (compile_for(Target.load("h200"), loop, (x,), options=o) for o in ({}, options))
    assert "kWhile" in driven.host_launches
    assert (captured.graphs, captured.host_launches) == (1, ())


@pytest.mark.aot
def test_registers_and_spills():
    x = jax.ShapeDtypeStruct((8, 4096), jnp.float32)
    report = compile_for(Target.load("h200"), lambda x: jax.nn.softmax(x), (x,), resources=True)
    assert [kernel.resources.spill_bytes for kernel in report.kernels if kernel.resources] == [0]
    assert all(0 < kernel.resources.registers < 256 for kernel in report.kernels if kernel.resources)


def scaled(name, factor, columns, semantics=plgpu.LoweringSemantics.Warpgroup):
    """A Mosaic kernel that copies rows to shared memory by TMA and writes them scaled."""

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
    """By name, also where one is used twice, shared by a nested `jit`, or lies between XLA's own."""
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
    assert len(report.kernels) == len(expected) + 1  # the sine is XLA's
    assert report.of_layer(1)[0].name == "shared"
    for kernel in found:
        rows, columns = (16, 128) if kernel.name == "triple_3" else (8, 256)
        assert (kernel.grid, kernel.cluster, kernel.threads) == (rows, 1, 128)
        assert columns * 4 < kernel.shared_bytes <= 1024 + 64  # Mosaic aligns; the barrier
        assert 0 < kernel.resources.registers < 64
        assert kernel.resources.spill_bytes == 0
        assert kernel.resources.features == ("UTMALDG",)


@pytest.mark.aot
def test_a_kernel_that_spills_is_seen():
    def body(x, y):  # 512 numbers a thread
        y[...] = jax.lax.fori_loop(0, 3, lambda i, tile: tile * tile + i, x[...])

    def f(x):
        return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), kernel_name="greedy")(x)

    report = compile_for(Target.load("h200"), f, (jax.ShapeDtypeStruct((128 * 512,), jnp.float32),), resources=True)
    resources = report.kernels[0].resources
    assert resources.registers == 255
    assert resources.spill_bytes > 0
    assert {"LDL", "STL"} <= set(resources.features)


def model_directory(folder):
    """A directory that says what GPT-J-6B with two layers is, without weights."""
    config = dataclasses.replace(preset("gpt-j-6b"), layers=2)
    (folder / "config.json").write_bytes(Description(family="gptj", config=config, dtype="bfloat16").to_json())
    return str(folder)


@pytest.mark.aot
def test_inspect_reports_on_a_model_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    result = CliRunner().invoke(app, ["inspect", model_directory(tmp_path), "--context", "256"])
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.replace("│", " ").split()) for line in result.output.splitlines()]
    assert "CUDA graphs 1, and no launches outside" in lines
    assert any(re.match(r"written in place (\d+) of \1 donated arrays", line) for line in lines)
    assert any("attention" in line and "decode_attention" in line for line in lines)


# What needs no compiler.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "h2000"], "Unknown target 'h2000'"),
        (["--context", "4096"], "--context 4096 is more than the model's 2048"),
        (["--quantize", "int3"], "int3"),
    ],
)
def test_inspect_refuses(tmp_path, options, message):
    result = CliRunner().invoke(app, ["inspect", model_directory(tmp_path), *options])
    assert result.exit_code == 2
    assert message in result.output


def test_targets():
    assert "h200" in Target.names()
    assert 'name: "NVIDIA H200"' in Target.load("h200").description
    with pytest.raises(ValueError, match=r"Unknown target 'h2000'; known: .*h200"):
        Target.load("h2000")
    with pytest.raises(ValueError, match=r"Target.topology must be three numbers like 1x1x1, got '8'"):
        Target(name="x", description="", topology="8")


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
    with pytest.raises(MissingCompilerError, match=rf"{missing}.*pip install 'jaxinfer\[aot\]'"):
        require_compiler()


THUNKS = """\
000: kCopy         [source | next=001 (1)] kCopy
001: kCommandBuffer [prev=000 (1) | sink]
    002: kWhile        [source | sink        ]
condition:
        003: kCustomKernel [source | sink] loop_and_fusion grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
      body:
        004: kCustomKernel [source       | sink (2)] dot_7 grid: [4, 2, 1] threads: [64, 1, 1]  shared_memory: 768 bytes
          true_branch:
            No thunks.
005: kGemm [source | sink] kGemm
"""


def test_read_thunks():
    thunks = {thunk.id: thunk for thunk in read_thunks(THUNKS)}
    assert [thunk.kind for thunk in thunks.values()] == [
        "kCopy", "kCommandBuffer", "kWhile", "kCustomKernel", "kCustomKernel", "kGemm"
    ]  # fmt: skip
    assert [thunks[number].parents for number in (0, 2, 3, 4, 5)] == [(), (1,), (1, 2), (1, 2), ()]
    assert (thunks[4].kernel, thunks[4].launch) == ("dot_7", Launch(grid=8, threads=64, shared_bytes=768))
    with pytest.raises(ValueError, match="format has changed"):
        read_thunks("nothing")


def test_read_thunk_names():
    text = 'thunk_info {\n profile_annotation: "a"\n }\n thunk_info {\n profile_annotation: "b.1"\n thunk_id: 2\n }'
    assert read_thunk_names(text) == {0: "a", 2: "b.1"}


HLO = """\
HloModule jit_step, is_scheduled=true, input_output_alias={ {1}: (2, {}, may-alias), {0, 1}: (0, {}, must-alias) }, x=y
ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0), metadata={op_name="x"}
  %dot.1 = f32[2,4]{1,0} fusion(%p), kind=kCustom, calls=%c, metadata={scheduling_name="dot.1"}, backend_config={}
  ROOT %add = f32[4]{0} fusion(%dot.1, %p), calls=%d, metadata={op_name="jit(step)/layers.3/add" source_line=1}
}
"""


def test_a_nameless_instruction_belongs_to_its_user():
    names = read_op_names(HLO)
    assert names["p"] == "x"
    assert names["dot.1"] == names["add"] == "jit(step)/layers.3/add"


def test_read_aliases():
    assert read_aliases(HLO) == 2
    assert read_aliases("HloModule jit_step, is_scheduled=true") == 0


def test_read_temporaries():
    text = """\
allocation 3: size 64, page 0, parameter 0, shape |f32[16]| at ShapeIndex {}:
 value: <1 p @0> (size=64,offset=0): f32[16]{0}
allocation 4: size 96, page 0, preallocated-temp:
 value: <7 fusion.2 @0> (size=32,offset=64): f32[8]{0}
 value: <8 fusion.3{} @0> (size=16,offset=0): (f32[8]{0}, f32[8]{0})
 value: <9 gather{1} @0> (size=64,offset=0): bf16[4,8]{1,0}
"""
    small, large = (
        Buffer(name="fusion.2", shape="f32[8]", bytes=32),
        Buffer(name="gather{1}", shape="bf16[4,8]", bytes=64),
    )
    assert read_temporaries(text) == [large, small]


def test_read_resources():
    text = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'dot_7' for 'sm_90a'
ptxas info    : Function properties for dot_7
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 768 bytes smem
"""
    assert read_resources(text) == {"dot_7": Resources(registers=255, spill_bytes=16)}


def test_read_mosaic_dumps():
    line = (
        r'  ROOT %mpmd_map.3 = f32[8]{0} custom-call(%x), custom_call_target="mosaic_gpu_v2", '
        r'backend_config={module = "ML\EFR\00stable_mosaic_gpu\00step_2_mosaic_gpu\00x\00step_2\00step_2_17\00y"}'
    )
    assert read_mosaic_dumps(f"HloModule\n{line}\n  %y = f32[8]{{0}} add(%x, %x)") == {"mpmd_map.3": "step_2_17"}
    with pytest.raises(ValueError, match=r"mpmd_map\.3: its format has changed"):
        read_mosaic_dumps(line.replace("step_2_17", "?"))


def test_read_mosaic_launch():
    constants = "".join(f"%c{size} = arith.constant {size} : i32\n" for size in (1, 2, 3, 128, 256, 74824))
    launch = constants + (
        "    %50 = gpu.launch async [%8] clusters(%a, %b, %c) in (%d = %c2, %e = %c1, %f = %c1) "
        "blocks(%g, %h, %i) in (%j = %c128, %k = %c3, %l = %c1) "
        "threads(%m, %n, %o) in (%p = %c256, %q = %c1, %r = %c1) dynamic_shared_memory_size %c74824 {\n"
    )
    clustered = Launch(grid=384, cluster=2, threads=256, shared_bytes=74824)
    assert read_mosaic_launch(launch + "gpu.launch, after a pass") == clustered
    alone = re.sub(r"clusters.*?\) in \(.*?\) ", "", launch)
    assert read_mosaic_launch(alone) == dataclasses.replace(clustered, cluster=1)
    with pytest.raises(ValueError, match="format has changed"):
        read_mosaic_launch("module")


def test_read_instructions():
    text = """\
//--------------------- .text.first          --------------------------
\t.section\t.text.first,"ax",@progbits
first:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
.L_x_41:
        /*0020*/              @P1 LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
//--------------------- .text.second --------------------------
        /*0000*/                   UTMALDG.4D [UR8], [UR4] ;
"""
    first, second = read_instructions(text).values()
    assert first == {"LDC": 1, "LDG.E.128.CONSTANT": 2}
    assert Resources(registers=1, spill_bytes=0, instructions=first).features == ("LDG.128",)
    assert Resources(registers=1, spill_bytes=0, instructions=second).features == ("UTMALDG",)
