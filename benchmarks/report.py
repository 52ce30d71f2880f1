"""The result of a benchmark: rows, checks against targets, versions and machine."""

import dataclasses
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import rich
from rich.table import Table

from jaxinfer.cli.bench.machine import machine

PACKAGES = ("jaxinfer", "jax", "jaxlib", "flax", "numpy")
ROOT = Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One figure with a target, met by values at least ("higher") or at most ("lower") as large."""

    name: str
    value: float
    unit: str
    target: float
    better: Literal["higher", "lower"]

    @property
    def met(self) -> bool:
        return self.value >= self.target if self.better == "higher" else self.value <= self.target


class Report:
    """Collects a benchmark's rows and checks; `finish` prints the checks and writes the JSON.

    Args:
      versions: of other software than our own packages: {"ctranslate2": "4.8.5"}.
    """

    def __init__(self, versions: Mapping[str, str] | None = None):
        self.rows: list[dict[str, Any]] = []
        self.checks: list[Check] = []
        self.versions = {
            "python": platform.python_version(),
            **{name: version(name) for name in PACKAGES},
            **(versions or {}),
        }

    def row(self, **fields: Any) -> None:
        """Add a measurement: what was measured, and its figures."""
        self.rows.append(fields)

    def check(
        self, name: str, value: float, unit: str, *, target: float, better: Literal["higher", "lower"] = "higher"
    ) -> None:
        """Add a figure with a target."""
        self.checks.append(Check(name=name, value=round(value, 4), unit=unit, target=target, better=better))

    def finish(self, json_file: Path | None) -> None:
        """Print the table of checks; write the whole result to `json_file` if given."""
        where = machine()
        on_cpu = where["platform"] == "cpu"
        title = f"{where['cpu']}, {where['cores']} cores" if on_cpu else where["device"]
        table = Table("check", "value", "target", "", title=title)
        for check in self.checks:
            sign = "≥" if check.better == "higher" else "≤"
            verdict = "[green]met[/]" if check.met else "[red]missed[/]"
            table.add_row(check.name, f"{check.value:.3g} {check.unit}", f"{sign} {check.target:g}", verdict)
        rich.print(table)
        if json_file is None:
            return
        result = {
            "machine": where,
            "commit": commit(),
            "versions": self.versions,
            "rows": self.rows,
            "checks": [dataclasses.asdict(check) for check in self.checks],
        }
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(result, indent=1) + "\n")
        rich.print(f"Wrote {json_file}")


def version(package: str) -> str:
    """The version of a package, or "not installed"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def commit() -> str:
    """The commit that was measured, with "+changes" if the working tree differs from it."""

    def git(*args: str) -> str:
        return subprocess.run(["git", "-C", ROOT, *args], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown (not a git checkout)"
