"""The report: a Markdown page of tables and plots, made from the rows alone.

`python -m benchmarks.gpu.rendering FOLDER` makes it again.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import Row, Rows
from benchmarks.gpu.verdicts import checks

# The parts of a result: titles and columns.
SECTIONS = {
    "machine": ("Machine", "what value"),
    "demo": ("The demo model", "what load_s generate_s same_as_first text"),
    "rates": ("Ceilings", "what rate unit"),
    "ceilings": ("How the ceilings were measured", "what way ms spread"),
    "end to end": ("Generation", "model format batch way ms_per_step of_floor tokens_per_s spread"),
    "generation of peers": ("Generation next to transformers", "model batch way ms_per_step of_floor spread"),
    "request": ("A prompt and its output (the paper's Fig. 6)", "model way prompt output ms spread"),
    "breakdown": ("Gain of each optimisation (the paper's Fig. 10a)", "model format way ms_per_step of_floor spread"),
    "kernels": ("Kernels", "op case way us of_ceiling spread"),
    "kernels of peers": ("Kernels next to other libraries", "op case way us of_ceiling spread"),
    "streaming": ("Streamed layers", "what prefetch ms overlap rate unit"),
    "numerics": ("Errors against float64", "op case kernel error fallback_error tolerance"),
    "autotune": ("Tuned tiles", "op key heuristic_us best_us tiles"),
}


def render(folder: Path) -> Path:
    """Write `report.md` and its plots next to the rows, and return the page. Without matplotlib there are no plots."""
    rows = Rows(folder / "rows.jsonl").read()
    command = next(row["command"] for row in rows if "command" in row)
    machine = next((row for row in rows if row["part"] == "machine" and "versions" in row), _UNKNOWN)
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    parts = [
        f"# GPU benchmark: {machine['machine']['device']}",
        f"`python -m benchmarks.gpu {command}`, commit {machine['commit']}, {machine['date']}; {versions}.",
        checks_table(rows),
        *_plots(rows, folder),
    ]
    for part, (title, columns) in SECTIONS.items():
        first = columns.split()[:2]
        measured = [row for row in rows if row["part"] == part and "absent" not in row and row.keys() >= {*first}]
        if measured:
            parts += [
                f"## {title}",
                _table([c for c in columns.split() if any(c in row for row in measured)], measured),
            ]
    absent = [row for row in rows if "absent" in row]
    if absent:
        parts += ["## Not measured", "\n".join(sorted({f"- {_what(row)}: {row['absent']}" for row in absent}))]
    page = folder / "report.md"
    page.write_text("\n\n".join(parts) + "\n")
    return page


def _what(row: Row) -> str:
    names = (row.get(name) for name in ("part", "op", "case", "key", "what", "way"))
    return ", ".join(str(name) for name in names if name is not None)


_UNKNOWN = {"machine": {"device": "unknown device"}, "commit": "unknown", "date": "unknown date", "versions": {}}
"""The machine, if the stage that describes it has failed."""


def checks_table(rows: Sequence[Row]) -> str:
    """Return the table of checks."""
    lines = [
        {
            "check": check.name,
            "value": f"{check.value:.3g} {check.unit}",
            "target": f"{'≥' if check.better == 'higher' else '≤'} {check.target:g}",
            "": check.verdict if check.met else f"**{check.verdict}**",
        }
        for check in checks(rows)
    ]
    return _table(("check", "value", "target", ""), lines)


def _table(columns: Iterable[str], rows: Iterable[Row]) -> str:
    def cell(value: Any) -> str:
        return f"{value:.3g}" if isinstance(value, float) and abs(value) < 1e-3 else str(value)

    names = list(columns)
    lines = [names, ["---"] * len(names), *([cell(row.get(name, "")) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plots(rows: Sequence[Row], folder: Path) -> list[str]:
    """Draw the plots for which there is data, and return Markdown links to them."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return [
            "(No plots: matplotlib is not installed; `python -m benchmarks.gpu.rendering FOLDER` draws them later.)"
        ]

    def bars(part: str, value: str, label: Any, title: str, file: str) -> list[str]:
        drawn = [row for row in rows if row["part"] == part and value in row]
        if not drawn:
            return []
        ways = list(dict.fromkeys(row["way"] for row in drawn))
        labels = list(dict.fromkeys(label(row) for row in drawn))
        figure = Figure(figsize=(9, 1.2 + 0.22 * len(labels) * len(ways)), layout="constrained")
        axes, height = figure.subplots(), 0.8 / len(ways)
        for index, way in enumerate(ways):
            chosen = [row for row in drawn if row["way"] == way]
            places = [labels.index(label(row)) + (index - (len(ways) - 1) / 2) * height for row in chosen]
            axes.barh(places, [row[value] for row in chosen], height, label=way)
        axes.set_yticks(range(len(labels)), labels, fontsize=7)
        axes.invert_yaxis()
        axes.set(xlabel=title, xlim=(0, None))
        axes.grid(axis="x", alpha=0.3)
        axes.legend()
        figure.savefig(folder / file, dpi=120)
        return [f"![{title}]({file})"]

    def model(row: Row) -> str:
        return f"{row['model']} {row['format']} batch {row['batch']}"

    return [
        *bars("end to end", "of_floor", model, "minimum time / time of a decode step", "generation.png"),
        *bars("breakdown", "ms_per_step", model, "milliseconds per step", "breakdown.png"),
        *bars("kernels", "of_ceiling", lambda r: f"{r['op']}: {r['case']}", "fraction of the ceiling", "kernels.png"),
    ]


if __name__ == "__main__":
    print(render(Path(sys.argv[1])))
