"""The readers of what XLA, Mosaic and NVIDIA's tools write."""

import dataclasses
import re

import pytest

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


def test_an_instruction_without_a_name_gets_its_users():
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
