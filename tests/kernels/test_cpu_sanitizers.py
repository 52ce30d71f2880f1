"""The CPU kernels without XLA (`*.cc` of this folder): under the compiler's sanitizers, and on an emulated ARM."""

import shutil
from pathlib import Path

import pytest

from jaxinfer.disk_cache.processor import cpu_fields
from jaxinfer.pallas_kernels.cpu.build import FOLDER, BuildError, find_compiler, level_options, levels_of, run
from tests.kernels.cpu_levels import EMULATED_LEVEL, EMULATION

SHARED = [str(FOLDER / "cpu" / name) for name in ("activations.cc", "rows.cc")]
HARNESSES = ("cpu_harness.cc", "attention_threads.cc")
OPTIONS = ["-std=c++17", "-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", "-pthread"]
# gcc's own headers leave vectors undefined.
WARNINGS = ["-Werror", "-Wall", "-Wextra", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]


LEVELS = levels_of(cpu_fields().get("flags", "").split())
CASES = [pytest.param(harness, level, [], id=f"{harness}-{level}") for harness in HARNESSES for level in LEVELS]
if EMULATED_LEVEL in LEVELS:
    CASES.append(pytest.param(HARNESSES[0], EMULATED_LEVEL, ["-include", str(EMULATION)], id="emulated AMX"))


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
@pytest.mark.parametrize(("harness", "level", "emulation"), CASES)
def test_kernels_are_clean(harness, level, emulation, sanitizer, tmp_path):
    try:
        compiler = find_compiler()
        empty, program = tmp_path / "empty.cc", tmp_path / "harness"
        empty.write_text("int main() {}\n")
        options = [*compiler.command, *OPTIONS, f"-fsanitize={sanitizer}", *level_options(level), f"-I{FOLDER}"]
        run([[*options, str(empty), "-o", str(program)]], seconds=60)
        run([[str(program)]], seconds=60)
    except BuildError as error:
        pytest.skip(f"there is no sanitizer for {sanitizer} on {level}: {error}")
    options += emulation
    if "address" in sanitizer:
        options.append("-DJAXINFER_EXACT_BUFFERS")
    run([[*options, *WARNINGS, str(Path(__file__).with_name(harness)), *SHARED, "-o", str(program)]], seconds=300)
    assert run([[str(program)]], seconds=300) == ["right\n"]


@pytest.mark.slow
@pytest.mark.parametrize("harness", HARNESSES)
def test_kernels_are_right_on_arm(harness, tmp_path):
    compiler, emulator = map(shutil.which, ("aarch64-linux-gnu-g++", "qemu-aarch64-static"))
    if compiler is None or emulator is None:
        pytest.skip("this needs Debian's g++-aarch64-linux-gnu and qemu-user-static")
    program = str(tmp_path / "harness")
    options = ["-std=c++17", "-O3", "-pthread", "-static", f"-I{FOLDER}", *WARNINGS]
    run([[compiler, *options, str(Path(__file__).with_name(harness)), *SHARED, "-o", program]], seconds=300)
    assert run([[emulator, program]], seconds=300) == ["right\n"]
