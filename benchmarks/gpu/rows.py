"""The rows of a run: a file of JSON lines that keeps what was written before a crash. Imports no JAX."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, Literal

from benchmarks.checks import Check

Row = dict[str, Any]


class Rows:
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

    def check(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        target: float,
        better: Literal["higher", "lower"] = "higher",
        invalid: str = "",
    ) -> None:
        """Append a figure with a target, as in `Check`."""
        check = Check(name=name, value=round(value, 4), unit=unit, target=target, better=better, invalid=invalid)
        self.row(part="checks", **dataclasses.asdict(check))

    def read(self) -> list[Row]:
        """Return all rows so far. A worker that was killed may have left an incomplete last line, which is skipped."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]
