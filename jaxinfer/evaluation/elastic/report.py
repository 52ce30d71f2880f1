"""An HTML page on recorded runs: tables, and the figures of OTAS's evaluation."""

import html
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from jaxinfer.disk_cache.files import write_atomically
from jaxinfer.evaluation.elastic import plots
from jaxinfer.evaluation.elastic.runs import Run
from jaxinfer.evaluation.elastic.tables import HEADINGS, by_cell, rows_of, title_of

_STYLE = """body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse } td, th { padding: .15rem .8rem; text-align: right }
td:first-child, th:first-child { text-align: left } tr:nth-child(even) { background: #f4f4f4 }
svg { max-width: 100%; height: auto }"""


def write_report(file: Path, runs: Sequence[Run]) -> None:
    """Write an HTML page with embedded figures."""
    write_atomically(file, page(runs).encode())


def page(runs: Sequence[Run]) -> str:
    """Render the page as a string."""
    profile = runs[-1].profile
    parts = ["<h1>Elastic tokens</h1>", "<h2>The levels</h2>"]
    parts += [_svg(plots.draw_levels(profile)), _svg(plots.draw_batches(profile))]
    for cell, cell_runs in by_cell(runs).items():
        parts += [f"<h2>{html.escape(title_of(cell))}</h2>", _table(rows_of(cell_runs))]
        parts += [
            _svg(figure)
            for figure in (
                plots.draw_arrivals(cell_runs[0]),
                plots.draw_utility(cell_runs),
                plots.draw_outcomes(cell_runs),
                plots.draw_chosen(cell_runs),
                plots.draw_accuracies(cell_runs),
            )
        ]
    parts.append(
        "<p>Utility is a share of what all queries would have earned in time, each at the level that is best for its "
        "task. Lines and distributions are of each policy's first seed, bars and tables of all.</p>"
    )
    body = "\n".join(parts)
    return f'<!doctype html>\n<meta charset="utf-8">\n<title>Elastic tokens</title>\n<style>{_STYLE}</style>\n{body}\n'


def _table(rows: Sequence[Sequence[str]]) -> str:
    def line(tag: str, cells: Iterable[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>\n" + "\n".join([line("th", HEADINGS), *(line("td", row) for row in rows)]) + "\n</table>"


def _svg(figure: Figure) -> str:
    drawn = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": str(id(figure))}):
        figure.savefig(drawn, format="svg")
    return drawn.getvalue().partition("<svg")[2].join(("<svg", ""))
