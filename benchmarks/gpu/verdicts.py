"""The checks of a run, from its rows. A check about many items is invalid unless all were measured. Imports no JAX."""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from benchmarks.checks import Check
from benchmarks.gpu.rows import Row

_FIELDS = tuple(field.name for field in dataclasses.fields(Check))


def checks(rows: Sequence[Row]) -> list[Check]:
    """Return the checks of all kernels, then those that stages wrote."""
    written = [Check(**{name: row[name] for name in _FIELDS}) for row in rows if row["part"] == "checks"]
    return [*_numerics(rows), *_kernels(rows), *written]


def _numerics(rows: Iterable[Row]) -> Iterator[Check]:
    """Yield the largest error, if the stage has run."""
    planned = _planned(rows, "numerics")
    if not planned:
        return
    measured = [row for row in rows if row["part"] == "numerics" and "error" in row]
    fallbacks = [row for row in measured if row["kernel"] is False]
    invalid = ""
    if len(measured) < len(planned):
        invalid = f"only {len(measured)} of {len(planned)} cases ran"
    elif fallbacks:
        invalid = f"{len(fallbacks)} of {len(planned)} cases ran no kernel"
    worst = max((row["error"] / row["tolerance"] for row in measured), default=0.0)
    yield Check(name="worst_error_of_tolerance", value=worst, unit="", target=1.0, better="lower", invalid=invalid)


def _kernels(rows: Iterable[Row]) -> Iterator[Check]:
    """Yield each operation's smallest speedup over XLA's code."""
    planned = collections.Counter(title.partition(":")[0] for title in _planned(rows, "kernels"))
    times: dict[tuple[str, str], dict[str, float]] = collections.defaultdict(dict)
    for row in rows:
        if row["part"] == "kernels" and "us" in row:
            times[row["op"], row["case"]][row["way"]] = row["us"]
    for op, cases in planned.items():
        both = [ways for (name, _), ways in times.items() if name == op and ways.keys() >= {"jaxinfer", "XLA"}]
        worst = min((ways["XLA"] / ways["jaxinfer"] for ways in both), default=0.0)
        invalid = "" if len(both) == cases else f"only {len(both)} of {cases} cases ran"
        yield Check(name=f"{op}_worst_vs_xla", value=worst, unit="x", target=1.0, better="higher", invalid=invalid)


def _planned(rows: Iterable[Row], stage: str) -> list[str]:
    """Return the titles of the items of a stage; none if it has not begun."""
    return [title for row in rows if row["part"] == "plan" and row["stage"] == stage for title in row["items"]]
