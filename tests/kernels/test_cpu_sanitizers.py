"""The CPU kernels under the compiler's sanitizers: addresses, undefined behaviour, races (`*.cc` of this folder)."""

from pathlib import Path

import pytest

from jaxinfer.disk_cache.processor import cpu_fields
from jaxinfer.pallas_kernels.cpu.build import FOLDER, BuildError, find_compiler, level_options, levels_of, run

HARNESSES = ("cpu_harness.cc", "attention_threads.cc")
OPTIONS = ["-std=c++17", "-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", "-pthread"]
# gcc's own headers leave vectors undefined.
WARNINGS = ["-Werror", "-Wall", "-Wextra", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]


@pytest.mark.slow
@pytest.mark.parametrize("level", levels_of(cpu_fields().get("flags", "").split()))
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
@pytest.mark.parametrize("harness", HARNESSES)
def test_kernels_are_clean(harness, sanitizer, level, tmp_path):
    try:
        compiler = find_compiler()
        empty, program = tmp_path / "empty.cc", tmp_path / "harness"
        empty.write_text("int main() {}\n")
        options = [*compiler.command, *OPTIONS, f"-fsanitize={sanitizer}", *level_options(level), f"-I{FOLDER}"]
        run([[*options, str(empty), "-o", str(program)]], seconds=60)
        run([[str(program)]], seconds=60)
    except BuildError as error:
        pytest.skip(f"there is no sanitizer for {sanitizer} on {level}: {error}")
    run([[*options, *WARNINGS, str(Path(__file__).with_name(harness)), "-o", str(program)]], seconds=300)
    assert run([[str(program)]], seconds=300) == ["right\n"]
