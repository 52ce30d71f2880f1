"""What a benchmark writes, what it says of an engine that cannot run, and the pages made of the results."""

import argparse
import json
import subprocess
import sys

import pytest

from benchmarks import pages, report
from benchmarks.engine import __main__ as engine
from benchmarks.engine.settings import Settings
from benchmarks.engine.ways import Memory
from benchmarks.pages.checks import CHECKS
from benchmarks.report import Report, machine_kind, today
from benchmarks.workers import EngineError, Worker, find_peers, run_parts

INTEL = {
    "cpu": "Intel(R) Xeon(R) Processor",
    "cores": 2,
    "features": ["amx_bf16", "amx_int8", "avx2", "avx512f"],
    "memory_gib": 23.5,
    "platform": "cpu",
}
AMD = INTEL | {"cpu": "AMD EPYC 7763", "features": ["avx2"]}


def test_kinds_of_machines_differ_in_cpu_instructions_and_cores():
    assert machine_kind(INTEL) == "Intel(R) Xeon(R) Processor with AMX, AVX-512, AVX2, 2 cores"
    assert machine_kind(AMD | {"cores": 8}) == "AMD EPYC 7763 with AVX2, 8 cores"
    assert machine_kind(INTEL | {"features": []}) == "Intel(R) Xeon(R) Processor, 2 cores"
    assert machine_kind(INTEL | {"platform": "gpu", "device": "NVIDIA H200"}) == "NVIDIA H200"


def test_parts_that_a_file_has_besides_are_not_lost(tmp_path, monkeypatch):
    (tmp_path / "measured").mkdir()
    for part in ("one", "two", "three"):
        (tmp_path / "measured" / f"{part}.py").write_text(
            "def run(report, args):\n    report.row(figure='a', ms=1.5)\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    args = argparse.Namespace(json=tmp_path / "result.json")
    report.run_parts("measured", ["one", "two"], args)
    before = args.json.read_text()
    with pytest.raises(SystemExit, match=r"result.json: it has two as well, not measured now: name a new file\."):
        report.run_parts("measured", ["one"], args)
    assert args.json.read_text() == before
    report.run_parts("measured", ["one", "two", "three"], args)
    assert [row["part"] for row in json.loads(args.json.read_text())["rows"][1::2]] == ["one", "two", "three"]


def test_results_are_saved_as_they_come(tmp_path):
    file, report = tmp_path / "folder" / "result.json", Report({"peer": "peer 1.2"})
    report.row(figure="a", ms=1.5)
    report.save(file)
    first = json.loads(file.read_text())
    assert (first["rows"], first["checks"], first["date"]) == ([{"figure": "a", "ms": 1.5}], [], today())
    assert first["versions"]["peer"] == "peer 1.2"
    assert first["machine"]["cores"]
    report.check("b", 2.0, "x", target=1.0)
    report.finish(file)
    assert [check["name"] for check in json.loads(file.read_text())["checks"]] == ["b"]
    assert list(file.parent.iterdir()) == [file]


def test_a_result_that_is_written_anew_is_no_change_of_what_is_measured(tmp_path, monkeypatch):
    result, source = tmp_path / "benchmarks/results/amd/streaming.json", tmp_path / "source.py"
    result.parent.mkdir(parents=True)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.com"]
    for file in (result, source):
        file.write_text("1")
    for command in (["init"], ["add", "."], ["commit", "-m", "one"]):
        subprocess.run([*git, *command], check=True, capture_output=True)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    before = report.commit()
    result.write_text("2")
    assert report.commit() == before
    source.write_text("2")
    assert report.commit() == f"{before}+changes"


def settings(tmp_path, **options):
    defaults = {"quick": True, "rounds": 1, "folder": tmp_path, "demo": tmp_path, "peer_python": None, "threads": 1}
    return Settings(**defaults | options, search=False, memory=Memory(tmp_path / "ways.json"))


def test_a_part_whose_peer_cannot_run_is_reported_and_the_others_go_on(tmp_path):
    def broken(report, settings):
        find_peers(settings.peer_python)

    def sound(report, settings):
        report.row(figure="sound")

    parts, file = {"broken": broken, "sound": sound}, tmp_path / "engine.json"
    given = settings(tmp_path, peer_python=tmp_path / "python")
    with pytest.raises(SystemExit, match=r"broken: No interpreter at .*make peers") as error:
        run_parts(parts, list(parts), Report(), given, file)
    rows = json.loads(file.read_text())["rows"]
    assert [row["figure"] for row in rows] == ["part", "sound", "part"]
    assert rows[0]["absent"] == str(error.value)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit(3)", "ended with status 3; .*run `make peers`"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "was ended by SIGILL; .*run `make peers`"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", r"was killed \(SIGKILL\), perhaps because memory"),
    ],
)
def test_an_engine_that_ends_says_why_and_what_may_help(code, message):
    with pytest.raises(EngineError, match=f"llama.cpp in int8 {message}"):
        Worker("llama.cpp", "int8", [sys.executable, "-c", code])


@pytest.mark.parametrize("code", ["", "; sys.stdin.readline()"], ids=["before", "after"])
def test_an_engine_that_ends_before_or_after_a_request_is_reported(code):
    ready = """import sys; print('{"version": "1", "ways": []}', flush=True)"""
    worker = Worker("llama.cpp", "int8", [sys.executable, "-c", ready + code])
    if not code:
        worker.process.wait()
    with pytest.raises(EngineError, match="ended with status 0"):
        worker.ask(do="prefill")
    assert worker.close() == 0


@pytest.mark.parametrize("text", ["0", "-1", "two"])
def test_rounds_that_are_no_number_are_refused(text, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["engine", "--rounds", text])
    with pytest.raises(SystemExit):
        engine.main()
    assert f"{text!r} is not a number of at least 1" in capsys.readouterr().err


# Pages


@pytest.mark.parametrize("name", pages.PAGES)
def test_pages_quote_the_results(name):
    """Otherwise: python -m benchmarks.pages --write."""
    page = (pages.FOLDER / name).read_text()
    assert pages.insert(page, pages.render(pages.RESULTS, pages.PAGES[name])) == page


def test_every_section_is_on_a_page():
    assert sorted(name for names in pages.PAGES.values() for name in names) == sorted(pages.SECTIONS)


def write(folder, name, machine, **fields):
    folder.mkdir(exist_ok=True)
    versions = {"python": "3.12.1", "jax": "0.11.2", "transformers": "transformers 5.23.0, torch 2.13.0"}
    result = {"machine": machine, "commit": "a" * 40, "date": "2026-01-31", "versions": versions, "checks": []}
    (folder / f"{name}.json").write_text(json.dumps(result | fields))


def unwrapped(page):
    """Return a page in one line."""
    return " ".join(page.split())


def rate(engine, tokens_per_s):
    way = {"batch": 64, "order": "output"}
    row = {"figure": "throughput", "engine": engine, "dtype": "float32", "requests": 64, "way": way}
    return row | {"tokens_per_s": tokens_per_s}


def test_every_kind_of_machine_has_its_own_tables(tmp_path):
    check = {"name": "compile_misses", "value": 1, "unit": "programs", "target": 0, "better": "lower"}
    rows = [rate("jaxinfer", 90.0), rate("transformers", 100.04)]
    write(tmp_path / "intel", "engine", INTEL, rows=rows, checks=[check])
    write(tmp_path / "amd", "engine", AMD, rows=rows[:1], commit="b" * 40 + "+changes")
    page = pages.render(tmp_path, pages.SECTIONS)
    amd, intel = page.split("## ")[1:]
    assert amd.startswith("AMD EPYC 7763 with AVX2, 2 cores, 23.5 GiB\n")
    source = "commit bbbbbbbbbb with changes, 2026-01-31; jax 0.11.2, transformers 5.23.0, torch 2.13.0."
    assert source in unwrapped(amd)
    assert "commit aaaaaaaaaa, 2026-01-31" in unwrapped(intel)
    lines = intel.splitlines()
    fastest = lines.index("| transformers | float32 | 64 | batch 64, order output | **100.0** |")
    assert lines[fastest + 1] == "| **jaxinfer** | float32 | 64 | batch 64, order output | 90.0 |"
    assert f"| {CHECKS['compile_misses']} | 1 programs | ≤ 0 programs | missed |" in lines
    before = f"above\n{pages.BEGIN}\nold\n{pages.END}\nbelow\n"
    assert pages.insert(before, page) == f"above\n{page}\nbelow\n"


def test_a_column_that_only_some_dtypes_have_is_empty_in_the_others(tmp_path):
    rows = [
        {"figure": "settings", "rounds": 7},
        {"figure": "prefill 512", "engine": "jaxinfer", "dtype": "float32", "ms": 938.85},
        {"figure": "decode batch 1", "engine": "jaxinfer", "dtype": "float32", "ms": 38.88},
        {"figure": "decode batch 1", "engine": "peer", "dtype": "float32", "ms": 38.0},
        {"figure": "prefill 512", "engine": "jaxinfer", "dtype": "bfloat16", "ms": 418.07},
    ]
    write(tmp_path / "intel", "cpu_decode", INTEL, rows=rows)
    lines = pages.render(tmp_path, pages.SECTIONS).splitlines()
    assert "| **jaxinfer** | float32 | **938.9** | 38.9 |" in lines
    assert "| peer | float32 |  | **38.0** |" in lines
    assert "| **jaxinfer** | bfloat16 | **418.1** |  |" in lines


def test_the_shape_of_another_model_is_named(tmp_path):
    rows = [
        {"figure": "settings", "rounds": 7, "model": "qwen3-0.6b"},
        {"figure": "prefill 512", "engine": "jaxinfer", "dtype": "float32", "ms": 938.85},
    ]
    write(tmp_path / "intel", "cpu_decode-qwen3-0.6b", INTEL, rows=rows)
    text = unwrapped(pages.render(tmp_path, pages.PAGES["language-models.md"]))
    assert "One request or batch, the shape of qwen3-0.6b in random weights: milliseconds" in text
    assert "`benchmarks.cpu_decode --model qwen3-0.6b`, commit" in text


def test_parts_of_another_commit_are_named(tmp_path):
    parts = {"a": "a" * 40, "b": "b" * 40, "c": "b" * 40}
    rows = [{"figure": "part", "part": part, "commit": commit} for part, commit in parts.items()]
    write(tmp_path / "intel", "streaming", INTEL, rows=rows)
    text = unwrapped(pages.render(tmp_path, pages.SECTIONS))
    assert "commit aaaaaaaaaa (but b, c: commit bbbbbbbbbb), 2026-01-31" in text


def test_results_of_two_machines_in_one_folder_are_refused(tmp_path):
    write(tmp_path / "mixed", "engine", INTEL, rows=[rate("jaxinfer", 1.0)])
    write(tmp_path / "mixed", "quality", AMD, rows=[{"name": "float32", "bytes": 1000, "bits_per_byte": 1.0}])
    with pytest.raises(SystemExit, match=r"mixed should have results of one kind of machine; it has .*AMD.*Intel"):
        pages.render(tmp_path, pages.SECTIONS)
    with pytest.raises(SystemExit, match="lacks the lines between which the tables stand"):
        pages.insert("a page without markers", f"{pages.BEGIN}\n{pages.END}")


@pytest.mark.slow
def test_the_commands_say_what_they_do():
    command = [sys.executable, "-m", "benchmarks.pages"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=pages.ROOT).stdout
    assert printed.startswith(pages.BEGIN)
