"""The library of CPU kernels is compiled once for a machine, and left out, with a reason, where that does not work."""

import errno
import functools
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxinfer.compiled import cpu_checks, cpu_library, spec
from jaxinfer.compiled.cpu_library import LibraryState, begin_library, find_library, forget_failures, library_state
from jaxinfer.disk_cache import KeptFiles
from jaxinfer.pallas_kernels.cpu.build import LEVELS
from jaxinfer.pallas_kernels.cpu.library import DEFAULT_ROWS
from tests.compiled.test_program import Add, spec_of
from tests.kernels.cpu_levels import EMULATED_AMX, library_of, machine_state
from tests.kernels.test_cpu_library import ROOM, needs_compiler, script

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of libraries, in a process that has none yet."""
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("JAXINFER_CPU_LIBRARY_FOLDER", raising=False)
    monkeypatch.setenv("JAXINFER_CPU_LIBRARY", "unmeasured")
    monkeypatch.setattr(cpu_library, "_states", [])
    monkeypatch.setattr(cpu_library, "_builders", [])
    return tmp_path / "cache" / "cpu_kernels"


def compiler(tmp_path, compiles):
    """A compiler that writes a line for every file that it compiles, as the statement `compiles` says."""
    log = tmp_path / "compiled"
    log.touch()
    path = script(
        tmp_path / "compiler",
        "import hashlib, os, shutil, subprocess, sys, time\n"
        "arguments = sys.argv[1:]\n"
        f"{COMPILE.format(compiler=shutil.which('c++'), kept=str(tmp_path.parent / 'object'))}\n"
        "if '--version' in arguments: print('mine 1.0')\n"
        "elif '-c' in arguments:\n"
        f"    open({str(log)!r}, 'a').write('compiled\\n')\n"
        f"    {compiles}\n"
        f"else: sys.exit(subprocess.call([{shutil.which('c++')!r}, *arguments]) if '-shared' in arguments else 0)\n",
    )
    return str(path), log


COMPILE = """
def compile():
    target = arguments[-1]
    kept = {kept!r} + hashlib.sha256(repr(arguments[:-1]).encode()).hexdigest()
    if not os.path.exists(kept):
        subprocess.check_call([{compiler!r}, *arguments, "-O0"])
        shutil.copy(target, kept)
    shutil.copy(kept, target)
"""
"""Compiles as the compiler that is there, or copies what it made of the same file for an earlier test."""


@pytest.mark.slow
@needs_compiler
def test_it_is_compiled_once_however_slow_the_compiler_and_whatever_the_current_folder_has(
    tmp_path, monkeypatch, folder
):
    """Only CPU time is limited. A program is started in any folder, such as one of a downloaded model's files."""
    path, log = compiler(tmp_path, "time.sleep(2); compile()")
    monkeypatch.setenv("CXX", path)
    monkeypatch.setattr(cpu_library, "CPU_SECONDS", 30.0)
    there = tmp_path / "there"
    there.mkdir()
    for name in ("statistics", "numpy", "jax", "bisect"):
        (there / f"{name}.py").write_text("open('executed', 'w').close()")
    monkeypatch.chdir(there)
    first = find_library(folder=ROOM)
    assert first.reason == ""
    assert not (there / "executed").exists()
    assert first.compiler == "mine 1.0"
    assert first.file.parent == folder
    assert str(first) == f"{first.library.level}, by mine 1.0"
    assert find_library(folder=ROOM) == first
    assert log.read_text() == "compiled\n"
    first.file.write_bytes(first.file.read_bytes()[:-100])  # as a full disk or a crash of the machine may leave it
    assert find_library(folder=ROOM) == first
    assert log.read_text() == 2 * "compiled\n"


@pytest.mark.slow
@needs_compiler
def test_processes_that_start_at_once_compile_once(tmp_path, monkeypatch, folder):
    path, log = compiler(tmp_path, "time.sleep(1); compile()")
    text = (
        "from pathlib import Path\n"
        "from jaxinfer.compiled.cpu_library import find_library\n"
        f"print(find_library(folder=Path({str(ROOM)!r})).library)\n"
    )
    environment = os.environ | {"CXX": path, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1"}
    processes = [
        subprocess.Popen([sys.executable, "-c", text], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith("Library(")
    assert log.read_text() == "compiled\n"


def test_without_a_compiler_xla_runs_and_the_reason_is_said_once(tmp_path, monkeypatch, caplog, folder):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert find_library(folder=ROOM).library is None
    with caplog.at_level(logging.WARNING, "jaxinfer.compiled"):
        assert library_state().library is library_state().library is None
    (message,) = [record.message for record in caplog.records]
    assert "install g++ or clang++" in message
    assert "\n" not in message
    assert str(library_state()).startswith("none: there is no C++ compiler")


@pytest.mark.slow
def test_an_error_of_the_compiler_is_remembered_until_it_is_forgotten(tmp_path, monkeypatch, folder):
    path, log = compiler(tmp_path, "sys.exit('a.cc:1: error: wrong')")
    monkeypatch.setenv("CXX", path)
    monkeypatch.setenv("JAXINFER_CPU_LIBRARY", "")
    monkeypatch.setattr(cpu_library, "START_SECONDS", 300.0)
    for _ in range(2):
        state = find_library(folder=ROOM)
        assert state.library is None
        assert state.reason.startswith(f"{path} fails: a.cc:1: error: wrong (tried again after a day")
        assert log.read_text() == "compiled\n"
    forget_failures()
    assert find_library(folder=ROOM).library is None
    assert log.read_text() == 2 * "compiled\n"


@pytest.mark.parametrize(
    "compiles",
    ["sys.exit('c++: fatal error: Killed signal terminated program cc1plus')", "os.kill(os.getpid(), 9)"],
)
def test_what_may_be_otherwise_the_next_time_is_not_remembered(compiles, tmp_path, monkeypatch, folder):
    path, log = compiler(tmp_path, compiles)
    monkeypatch.setenv("CXX", path)
    for tries in (1, 2):
        assert "ails" in find_library(folder=ROOM).reason
        assert log.read_text() == tries * "compiled\n"
    assert not [file for file in folder.iterdir() if file.name != ".lock"]


def test_a_compiler_that_uses_too_much_time_is_given_up(tmp_path, monkeypatch, folder):
    path, log = compiler(tmp_path, "while True: pass")
    monkeypatch.setenv("CXX", path)
    monkeypatch.setattr(cpu_library, "CPU_SECONDS", 1.0)
    assert find_library(folder=ROOM).reason == f"{path} fails: signal {signal.SIGKILL:d}"
    assert log.read_text() == "compiled\n"


def test_a_compiler_that_hangs_is_given_up(tmp_path, monkeypatch, folder):
    path, log = compiler(tmp_path, "time.sleep(600)")
    monkeypatch.setenv("CXX", path)
    monkeypatch.setattr(cpu_library, "GIVE_UP_SECONDS", 1.0)
    state = find_library(folder=ROOM)
    assert state.library is None
    assert state.reason == f"{path} took longer than 1 s"
    assert log.read_text() == "compiled\n"


@needs_compiler
@pytest.mark.slow
def test_a_process_decides_once_and_the_next_one_finds_what_was_compiled_meanwhile(tmp_path, monkeypatch, folder):
    go = tmp_path / "go"
    path, log = compiler(tmp_path, f"while not os.path.exists({str(go)!r}): time.sleep(0.05)\n    compile()")
    monkeypatch.setenv("CXX", path)
    monkeypatch.setenv("JAXINFER_CPU_LIBRARY", "")
    monkeypatch.setattr(cpu_library, "START_SECONDS", 0.2)
    monkeypatch.setattr(cpu_library, "find_library", functools.partial(find_library, folder=ROOM))
    begin_library(folder=ROOM)
    state = library_state()
    assert state.library is None
    assert "still compiling" in state.reason
    (builder,) = cpu_library._builders
    assert os.getpgid(builder.pid) != os.getpgid(0)  # a Ctrl-C here does not reach it
    go.touch()
    assert builder.wait(300) == 0
    assert library_state() is state  # of all later calls of this process
    cpu_library._states.clear()
    assert library_state().reason == ""  # of the next process
    assert log.read_text() == "compiled\n"


@pytest.mark.parametrize("command", ["g++ 'x", sys.executable, "/bin/true", "/bin/false", "/nowhere/c++"])
def test_what_is_no_compiler_leaves_the_library_out(command, monkeypatch, folder):
    monkeypatch.setenv("CXX", command)
    state = find_library(folder=ROOM)
    assert state.library is None
    assert state.reason
    assert "\n" not in state.reason


@needs_compiler
@pytest.mark.parametrize("record", [b"[]", b"{}", b"no JSON", b'{"failure": 1}', b'{"compiler": "c", "time": "t"}'])
def test_a_record_of_something_else_counts_as_none(record, tmp_path, monkeypatch, folder):
    path, _ = compiler(tmp_path, "compile()")
    monkeypatch.setenv("CXX", path)
    files = KeptFiles(folder, max_bytes=1 << 20)
    maker = cpu_library._Maker(cpu_library.find_compiler(), ROOM, None)
    files.write(maker.name, record)
    assert maker.kept() is None


@pytest.mark.slow
@needs_compiler
def test_a_library_that_cannot_be_loaded_is_compiled_once(tmp_path, monkeypatch, folder):
    """As where memory cannot be executed."""
    path, log = compiler(tmp_path, "compile()")
    monkeypatch.setenv("CXX", path)

    def load(library, content):
        raise OSError("not permitted")

    monkeypatch.setattr(cpu_library, "load_library", load)
    monkeypatch.delenv("JAXINFER_CPU_LEVEL", raising=False)
    assert "cannot be loaded" in find_library(folder=ROOM).reason
    assert "cannot be loaded" in cpu_library._Maker(cpu_library.find_compiler(), ROOM, None).kept().reason
    assert log.read_text() == "compiled\n"


def test_an_unknown_instruction_set_is_refused(monkeypatch, folder):
    monkeypatch.setenv("JAXINFER_CPU_LEVEL", "avx3")
    with pytest.raises(ValueError, match=r"JAXINFER_CPU_LEVEL must be one of amx, .*, generic, got 'avx3'\."):
        find_library(folder=ROOM)


def test_another_process_that_does_not_end_is_not_waited_for(tmp_path, monkeypatch, folder):
    path, log = compiler(tmp_path, "sys.exit(1)")
    monkeypatch.setenv("CXX", path)
    monkeypatch.setattr(cpu_library, "GIVE_UP_SECONDS", 0.1)
    with KeptFiles(folder, max_bytes=1).locked(seconds=5):
        assert "lock" in find_library(folder=ROOM).reason
    assert not log.read_text()


@needs_compiler
@pytest.mark.parametrize("place", ["a file", "full", "almost full"])
def test_where_nothing_can_be_kept_xla_runs(place, tmp_path, monkeypatch, folder):
    path, log = compiler(tmp_path, "compile()")
    monkeypatch.setenv("CXX", path)
    if place == "a file":
        folder.parent.mkdir()
        folder.write_text("in the way")
    elif place == "full":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 1 << 40, 0))
    else:

        def write(files, name, content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(KeptFiles, "write", write)
    state = find_library(folder=ROOM)
    assert state.library is None
    assert state.reason
    assert "\n" not in state.reason
    assert log.read_text() == ("compiled\n" if place == "almost full" else "")


@needs_compiler
def test_a_check_that_fails_leaves_the_library_out(tmp_path, monkeypatch, folder):
    path, _ = compiler(tmp_path, "compile()")
    monkeypatch.setenv("CXX", path)
    monkeypatch.setattr(cpu_library, "_CHECKS", "jaxinfer.compiled.no_such_module")
    state = find_library(folder=ROOM)
    assert state.library is None
    assert state.reason.startswith("the kernels cannot be checked")
    assert "no_such_module" in state.reason
    assert len(list(folder.iterdir())) == 2  # the record, and the lock


@pytest.mark.slow
@needs_compiler
def test_a_check_that_is_given_up_leaves_what_was_compiled(tmp_path, monkeypatch, folder):
    """Here for the instruction set that the environment names."""
    path, log = compiler(tmp_path, "compile()")
    monkeypatch.setenv("CXX", path)
    monkeypatch.setenv("JAXINFER_CPU_LEVEL", "generic")
    with monkeypatch.context() as patch:
        patch.setattr(
            cpu_library._Maker, "_checked", lambda maker, record: cpu_library.run([["sleep", "9"]], seconds=0.1)
        )
        assert "took longer" in find_library(folder=ROOM).reason
    assert find_library(folder=ROOM).library.level == "generic"
    assert log.read_text() == "compiled\n"


@pytest.mark.slow
@needs_compiler
def test_a_difference_leaves_the_library_out_for_good(tmp_path, monkeypatch, folder):
    """A library whose linear layers return zeros."""
    path, log = compiler(tmp_path, "compile()")
    monkeypatch.setenv("CXX", path)
    monkeypatch.setattr(cpu_library, "RETRY_SECONDS", 0.0)
    for _ in range(2):
        state = find_library(folder=ROOM.with_name("cpu_zeros"))
        assert state.library is None
        assert "kernels by mine 1.0 differ from XLA's results: norm_linear" in state.reason
        assert "\n" not in state.reason
        assert state.operations == ("linear_residual", "norm_linear", "small_batch_linear")
        assert "differs" in state.verdicts.values()
        assert "verified" not in state.verdicts.values()
    assert log.read_text() == "compiled\n"


def test_a_process_without_a_library(monkeypatch):
    monkeypatch.setenv("JAXINFER_CPU_LIBRARY", "0")
    assert find_library(folder=ROOM) == LibraryState()
    assert str(LibraryState()) == "none"


def test_an_unknown_setting_is_refused(monkeypatch):
    monkeypatch.setenv("JAXINFER_CPU_LIBRARY", "off")
    with pytest.raises(ValueError, match=r"JAXINFER_CPU_LIBRARY must be 1, 0 .* or unmeasured, got 'off'\."):
        find_library(folder=ROOM)


def test_programs_without_kernels_ask_for_no_library(monkeypatch):
    asked = []
    monkeypatch.setattr(spec, "cpu_library", lambda: asked.append(1))
    program = spec_of(lambda x: x + 1, jnp.zeros(3))
    program.compile(Add(), kernels=False)
    assert not asked
    program.compile(Add())
    assert asked


@pytest.mark.parametrize(
    ("slower_from", "expected"),
    [(1, 0), (2, 1), (32, 16), (64, 32), (256, 128)],
)
def test_up_to_how_many_rows_the_library_runs(slower_from, expected, monkeypatch):
    def times(library, dtype, rows):
        return [1.0 if rows < slower_from else 2.0], [1.5]

    monkeypatch.setattr(cpu_checks, "_times", times)
    assert cpu_checks.limits(None) == dict.fromkeys(cpu_checks.FORMATS, expected)


def test_beyond_the_default_it_must_be_clearly_faster_and_below_it_may_be_a_little_slower(monkeypatch):
    monkeypatch.setattr(cpu_checks, "_times", lambda library, dtype, rows: ([1.1], [1.0]))
    assert set(cpu_checks.limits(None).values()) == {DEFAULT_ROWS}
    monkeypatch.setattr(cpu_checks, "_times", lambda library, dtype, rows: ([1.0], [1.1]))
    assert set(cpu_checks.limits(None).values()) == {DEFAULT_ROWS}
    monkeypatch.setattr(cpu_checks, "_times", lambda library, dtype, rows: None)  # the library refuses
    assert set(cpu_checks.limits(None).values()) == {0}
    assert set(cpu_checks.limits(None, seconds=-1).values()) == {DEFAULT_ROWS}  # there was no time


def test_products_are_measured(monkeypatch):
    """With matrices of a few rows, as the machine's speed matters to no test."""
    library = machine_state().library
    monkeypatch.setattr(cpu_checks, "MATRIX_BYTES", 1 << 20)
    monkeypatch.setattr(cpu_checks, "TURN_SECONDS", 1e-3)
    monkeypatch.setattr(cpu_checks, "ROUNDS", 2)
    for dtype in cpu_checks.FORMATS:
        ours, theirs = cpu_checks._times(library, dtype, 1)
        assert 1 <= len(ours) == len(theirs) <= 2
        assert min(ours + theirs) > 0


def test_the_library_of_this_machine_is_compared_with_xla():
    state = machine_state()
    assert state.verdicts[state.library.level] == "verified"
    operations = {"cached_attention", "decode_attention", "expert_mlp", "gated_delta_rule", "linear_residual"}
    assert operations | {"norm_linear"} <= set(state.operations)
    assert state.file.exists()


@pytest.mark.slow
@pytest.mark.parametrize("level", [*LEVELS, EMULATED_AMX])
def test_no_instruction_set_differs_from_xla(level):
    operations, differences = cpu_checks.compare(library_of(level))
    assert not differences
    assert {"decode_attention", "expert_mlp", "gated_delta_rule", "norm_linear"} <= set(operations)
