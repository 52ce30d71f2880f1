"""The result of a benchmark: rows, checks against targets, versions, machine, commit and date."""

import argparse
import dataclasses
import datetime
import importlib
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import rich
from rich.table import Table

from benchmarks.checks import Check, Checked
from jaxinfer.compiled.machine import machine
from jaxinfer.disk_cache import write_atomically

INSTRUCTION_SETS = {"AMX": "amx_int8", "AVX-512": "avx512f", "AVX2": "avx2"}  # name -> the CPU's flag
PACKAGES = ("jaxinfer", "jax", "jaxlib", "flax", "numpy")
ROOT = Path(__file__).parents[1]


class Report(Checked):
    """The rows and checks of a benchmark.

    Args:
      versions: versions of other software than our own packages: {"ctranslate2": "4.8.5"}.
    """

    def __init__(self, versions: Mapping[str, str] | None = None):
        self.rows: list[dict[str, Any]] = []
        self.checks: list[Check] = []
        self.commit, self.date = commit(), today()
        self.versions = {
            "python": platform.python_version(),
            **{name: version(name) for name in PACKAGES},
            **(versions or {}),
        }

    def row(self, **fields: Any) -> None:
        """Add a measurement: its subject and its figures."""
        self.rows.append(fields)

    def add_check(self, check: Check) -> None:
        """Keep a check, for the end of the report."""
        self.checks.append(check)

    def print_header(self) -> None:
        """Print the versions, and the machine."""
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        print(f"{machine_text(machine())}\ncommit {self.commit}, {self.date}; {versions}", flush=True)

    def result(self) -> dict[str, Any]:
        """All that `save` writes."""
        return {
            "machine": machine(),
            "commit": self.commit,
            "date": self.date,
            "versions": self.versions,
            "rows": self.rows,
            "checks": [dataclasses.asdict(check) for check in self.checks],
        }

    def save(self, json_file: Path | None) -> None:
        """Write the result so far to `json_file` if given."""
        if json_file is None:
            return
        json_file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(json_file, (json.dumps(self.result(), indent=1) + "\n").encode())

    def finish(self, json_file: Path | None) -> None:
        """Print the table of checks; write the whole result to `json_file` if given."""
        table = Table("check", "value", "target", "", title=machine_text(machine()))
        for check in self.checks:
            sign = "≥" if check.better == "higher" else "≤"
            color = "yellow" if check.invalid else "green" if check.met else "red"
            verdict = f"[{color}]{check.verdict}[/]"
            table.add_row(check.name, f"{check.value:.3g} {check.unit}", f"{sign} {check.target:g}", verdict)
        rich.print(table)
        self.save(json_file)
        if json_file is not None:
            rich.print(f"Wrote {json_file}")


def run_parts(
    package: str, parts: Iterable[str], args: argparse.Namespace, *, about: dict[str, Any] | None = None
) -> None:
    """Measure parts of a benchmark, each by the `run` of its module, and save the result after each of them.

    args: the options, of which `json` names the file. about: a row that says what is measured.
    Exits if the file has other parts, which would be lost.
    """
    parts = list(parts)
    check_that_no_part_is_lost(args.json, parts)
    report = Report()
    report.print_header()
    if about:
        rich.print(about)
        report.row(**about)
    for part in parts:
        importlib.import_module(f"{package}.{part}").run(report, args)
        report.row(figure="part", part=part, commit=report.commit)
        report.save(args.json)
    report.finish(args.json)


def check_that_no_part_is_lost(json_file: Path | None, parts: Iterable[str]) -> None:
    """Exit before anything is measured if a result has parts besides these."""
    if json_file is None or not json_file.exists():
        return
    rows = json.loads(json_file.read_text())["rows"]
    if lost := {row["part"] for row in rows if row["figure"] == "part"} - set(parts):
        raise SystemExit(
            f"--json {json_file}: it has {', '.join(sorted(lost))} as well, not measured now: name a new file."
        )


def machine_kind(where: Mapping[str, Any]) -> str:
    """Describe a machine by what makes it comparable: "Intel(R) Xeon(R) Processor with AMX, AVX-512, AVX2, 2 cores"."""
    if where["platform"] != "cpu":
        return where["device"]
    sets = [name for name, flag in INSTRUCTION_SETS.items() if flag in where["features"]]
    return f"{where['cpu']}{' with ' if sets else ''}{', '.join(sets)}, {where['cores']} cores"


def machine_text(where: Mapping[str, Any]) -> str:
    """Describe a machine's kind and memory."""
    return f"{machine_kind(where)}, {where['memory_gib']} GiB"


def caption(result: Mapping[str, Any], what: str) -> str:
    """Write a figure's caption: what was measured, the machine, the day and the commit."""
    return f"{what}; {machine_kind(result['machine'])}; {result['date']}, commit {result['commit'][:10]}"


def today() -> str:
    """The date in UTC, as in 2026-01-31."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def version(package: str) -> str:
    """The version of a package, or "not installed"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def commit() -> str:
    """The measured commit, with "+changes" if the working tree differs from it in more than results."""

    def git(*args: str) -> str:
        return subprocess.run(["git", "-C", ROOT, *args], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + (
            "+changes" if git("status", "--porcelain", "-uno", "--", ":!benchmarks/results") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown (not a git checkout)"
