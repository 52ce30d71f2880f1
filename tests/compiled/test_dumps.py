"""The readers of what XLA, Mosaic and NVIDIA's tools write."""

import dataclasses

import pytest
from jax.interpreters import mlir

from jaxinfer.compiled.dumps import (
    Buffer,
    Launch,
    MosaicCall,
    Resources,
    read_aliases,
    read_collectives,
    read_instructions,
    read_mosaic_calls,
    read_op_names,
    read_predicates,
    read_resources,
    read_temporaries,
    read_thunk_names,
    read_thunks,
)

THUNKS = """\
000: kCopy         [source | next=001 (1)] kCopy
001: kCommandBuffer [prev=000 (1) | sink]
    002: kWhile        [source | sink        ]
condition:
        003: kCustomKernel [source | sink] loop_and_fusion grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
      body:
        004: kCustomKernel [source       | sink (2)] dot_7 grid: [4, 2, 1] threads: [64, 1, 1]  shared_memory: 768 bytes
        005: kConditional [source | sink]
          false_branch:
            006: kConditional [source | sink]
              branch_0:
                No thunks.
              branch_1:
                No thunks.
              branch_2:
                007: kCopy [source | sink] kCopy
          true_branch:
            008: kCopy [source | sink] kCopy
009: kGemm [source | sink] kGemm
"""


def test_read_thunks():
    thunks = {thunk.id: thunk for thunk in read_thunks(THUNKS)}
    assert [thunk.kind for thunk in thunks.values()] == [
        "kCopy", "kCommandBuffer", "kWhile", "kCustomKernel", "kCustomKernel",
        "kConditional", "kConditional", "kCopy", "kCopy", "kGemm",
    ]  # fmt: skip
    assert [thunks[number].parents for number in (0, 2, 3, 4, 9)] == [(), (1,), (1, 2), (1, 2), ()]
    assert (thunks[7].parents, thunks[7].branches) == ((1, 2, 5, 6), (0, 0, 0, 2))
    assert (thunks[8].parents, thunks[8].branches) == ((1, 2, 5), (0, 0, 1))
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


def test_an_instruction_without_a_name_gets_its_users():
    names = read_op_names(HLO)
    assert names["p"] == "x"
    assert names["dot.1"] == names["add"] == "jit(step)/layers.3/add"


def test_read_predicates():
    branches = "branch_computations={%a, %b}"
    text = f"  %c.1 = f32[] conditional(%p, %x, %x), true_computation=%a, false_computation=%b\n  %c.2 = {branches}\n"
    assert read_predicates(text) == {"c.1"}


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


LAUNCH = """\
module {{
  "stable_mosaic_gpu.func.func"() ({{
    %token = "stable_mosaic_gpu.wait"() : () -> !gpu.async.token
    %one = "stable_mosaic_gpu.arith.constant"() {{value = 1 : index}} : () -> index
    %two = "stable_mosaic_gpu.arith.constant"() {{value = 2 : index}} : () -> index
    %threads = "stable_mosaic_gpu.arith.constant"() {{value = 128 : index}} : () -> index
    %bytes = "stable_mosaic_gpu.arith.constant"() {{value = 74824 : i32}} : () -> i32
    "stable_mosaic_gpu.gpu.launch"(%token, %threads, %two, %one, %threads, %two, %one, {cluster}%bytes)
      {{operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, {clustered}, 1, 0>}} :
      (!gpu.async.token, index, index, index, index, index, index, {types}i32) -> ()
  }}) {{name = "step_2_mosaic_gpu", dumps = "step_2_17"}} : () -> ()
}}
"""


def kernel(text):
    """A module of Mosaic's as the optimised module has it."""
    with mlir.make_ir_context() as context:
        context.allow_unregistered_dialects = True
        bytecode = mlir.module_to_bytecode(mlir.ir.Module.parse(text))
    escaped = "".join(chr(b) if 32 <= b < 127 and chr(b) not in '"\\' else f"\\{b:02X}" for b in bytecode)
    return (
        f'  ROOT %m.3 = f32[8]{{0}} custom-call(%x), custom_call_target="mosaic_gpu_v2", x={{module = "{escaped}"}}\n'
    )


def test_read_mosaic_calls():
    launch = Launch(grid=256, threads=256, shared_bytes=74824)
    alone = kernel(LAUNCH.format(cluster="", clustered="0, 0, 0", types=""))
    clustered = kernel(LAUNCH.format(cluster="%two, %one, %one, ", clustered="1, 1, 1", types="index, index, index, "))
    assert read_mosaic_calls(alone) == {"m.3": MosaicCall(dump="step_2_17", launch=launch)}
    (call,) = read_mosaic_calls(f"HloModule\n{clustered}  %y = f32[8]{{0}} add(%x, %x)").values()
    assert call.launch == dataclasses.replace(launch, cluster=2)
    with pytest.raises(ValueError, match=r"m\.3: its format has changed; see read_mosaic_calls"):
        read_mosaic_calls(alone.replace("step_2_17", "?"))
    with pytest.raises(ValueError, match=r"No launch found .* see read_mosaic_launch"):
        read_mosaic_calls(alone.replace("gpu.launch", "gpu.lunch_"))


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


COLLECTIVES = """HloModule jit_step, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(f32[] %a, f32[] %b)
}

%rare (p: (f32[8])) -> (f32[8]) {
  %all = f32[32]{0} all-gather(f32[8]{0} %x), replica_groups=[1,4]<=[4], dimensions={0}, metadata={op_name="jit(f)/cond/gather"}
}

%usual (p: (f32[8])) -> (f32[8]) {
  ROOT %t = (f32[8]{0}) tuple(f32[8]{0} %x)
}

%body (state: (s32[], f32[8])) -> (s32[], f32[8]) {
  %pair = (f32[8]{0}, bf16[2,3]{1,0}) all-reduce(f32[8]{0} %x, bf16[2,3]{1,0} %y), replica_groups={{0,1},{2,3}}, to_apply=%add, metadata={op_name="jit(f)/layers.0/psum"}
  %chosen = (f32[8]{0}) conditional(s32[] %i, (f32[8]{0}) %p, (f32[8]{0}) %p), branch_computations={%usual, %rare}, metadata={op_name="jit(f)/cond"}
  ROOT %t = (s32[], f32[8]{0}) tuple(s32[] %i, f32[8]{0} %x)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %loop = (s32[], f32[8]{0}) while((s32[], f32[8]{0}) %init), condition=%add, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %start = (f32[8]{0}, f32[16]{0}) all-gather-start(f32[8]{0} %x), replica_groups=mesh['data'=2,'tensor'=2] {'tensor'}, dimensions={0}
  %done = f32[16]{0} all-gather-done((f32[8]{0}, f32[16]{0}) %start)
  %sum = ((f32[5]{0}), f32[5]{0}) all-reduce-start(%z), replica_groups={{0,1},{2,3}}, to_apply=%add, output_to_operand_aliasing={{1}: (0, {})}
  %summed = f32[5]{0} all-reduce-done(%sum)
  %moved = s32[4]{0} collective-permute(s32[4]{0} %i), source_target_pairs={{0,1},{1,0}}
  %every = pred[4]{0} all-reduce(pred[4]{0} %p), replica_groups={}, to_apply=%add
  ROOT %scattered = f32[2]{0} reduce-scatter(f32[8]{0} %x), replica_groups=[1,4]<=[4], to_apply=%add
}
"""  # noqa: E501


def test_collectives_with_their_loops_and_conditions():
    collectives = read_collectives(COLLECTIVES, 4)
    found = {(c.kind, c.dtype, c.shape): c for c in collectives}
    summed = found["all-reduce", "f32", (8,)]
    assert (summed.participants, summed.trips, summed.conditions) == (2, 5, ())
    assert summed.op_name == "jit(f)/layers.0/psum"
    assert found["all-reduce", "bf16", (2, 3)].bytes == 12  # combined with the other: one for each array
    rare = found["all-gather", "f32", (32,)]
    assert (rare.participants, rare.trips, rare.conditions) == (4, 5, ("jit(f)/cond",))
    assert found["all-gather", "f32", (16,)].participants == 2  # what is started has its operand before its result
    assert found["collective-permute", "s32", (4,)].wire_bytes == 16
    assert found["collective-permute", "s32", (4,)].pairs == ((0, 1), (1, 0))
    assert summed.pairs == ()
    assert found["all-reduce", "pred", (4,)].participants == 4  # all devices
    assert found["reduce-scatter", "f32", (2,)].wire_bytes == 3 * 8
    assert summed.wire_bytes == 32
    assert rare.wire_bytes == 96
    assert found["all-reduce", "f32", (5,)].trips == 1
    assert len(found) == len(collectives) == 8


def test_groups_in_an_unknown_form_are_an_error():
    with pytest.raises(ValueError, match="Unknown groups in a collective"):
        read_collectives(COLLECTIVES.replace("replica_groups={}", "replica_groups=others"), 4)
