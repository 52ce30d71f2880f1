"""An HTML page on recorded runs: tables, and the figures of OTAS's evaluation."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jinja2
from matplotlib.figure import Figure

from jaxinfer.disk_cache.files import write_atomically
from jaxinfer.evaluation.elastic import plots
from jaxinfer.evaluation.elastic.runs import Run
from jaxinfer.evaluation.elastic.summaries import summarise
from jaxinfer.evaluation.elastic.tables import HEADINGS, by_cell, rows_of, title_of
from jaxinfer.evaluation.figures import render

TEMPLATE = "report.html.jinja"


class Section(NamedTuple):
    """A part of the page: a table of policies, if there are rows, and figures."""

    title: str
    rows: Sequence[Sequence[str]]
    figures: Sequence[str]


def write_report(file: Path, runs: Sequence[Run]) -> None:
    """Write an HTML page with embedded figures."""
    write_atomically(file, page(runs).encode())


def page(runs: Sequence[Run]) -> str:
    """Render the page as a string: an index, the levels, and a section for each load."""
    profile = runs[-1].profile
    sections = [Section("The levels", (), _svgs([plots.draw_levels(profile), plots.draw_batches(profile)]))]
    for cell, cell_runs in by_cell(runs).items():
        summary, title = summarise(cell_runs), title_of(cell)
        outcomes = {name: policy.outcomes for name, policy in summary.policies.items()}
        chosen = {name: policy.levels for name, policy in summary.policies.items()}
        figures = [draw(summary, title) for draw in plots.OVER_TIME.values()]
        figures += [plots.draw_outcomes(outcomes, title), plots.draw_chosen(chosen, summary.levels, title)]
        sections.append(Section(title, rows_of(cell_runs), _svgs(figures)))
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    template = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined).get_template(
        TEMPLATE
    )
    return template.render(headings=HEADINGS, sections=sections)


def _svgs(figures: Iterable[Figure]) -> list[str]:
    """Render figures for a page: without the XML declaration."""
    return ["<svg" + render(figure, "svg").decode().partition("<svg")[2] for figure in figures]
