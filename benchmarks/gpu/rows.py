"""The rows of a run: a file of JSON lines that keeps what was written before a crash. Imports no JAX."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from benchmarks.checks import Check, Checked

Row = dict[str, Any]


class Rows(Checked):
    """Appends measurements to a file. Each is on the disk before the next begins.

    Args:
      path: the file of JSON lines.
    """

    def __init__(self, path: Path):
        self.path = path

    def row(self, **fields: Any) -> None:
        """Append a measurement: its part, its subject and its figures."""
        with self.path.open("a") as file:
            file.write(json.dumps(fields, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def add_check(self, check: Check) -> None:
        """Append a check."""
        self.row(part="checks", **dataclasses.asdict(check))

    def read(self) -> list[Row]:
        """Return all rows so far. A worker that was killed may have left an incomplete last line, which is skipped."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]
