"""Style of figures: a colour each, the same files each time, and those of docs/ as the committed results say."""

import itertools
import re
from pathlib import Path

import pytest

from jaxinfer.elastic.scheduling.policies import POLICIES

figures = pytest.importorskip("jaxinfer.evaluation.figures", reason="needs the extra `bench`")
ROOT = Path(__file__).parents[2]


def drawn():
    figure = figures.Figure(figsize=(4, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot([0.25, 2], [1, 2], label="elastic", **figures.line_style("elastic", figures.COLOURS["elastic"]))
    axes.set_xscale("log")
    figures.plain_ticks(axes.xaxis, (0.25, 0.5, 1, 2))
    figures.legend_outside(figure, axes, axes)
    return figures.finish(figure, "this machine, this load")


def test_every_policy_has_a_colour_and_no_two_that_are_compared_share_one():
    names = [*POLICIES, "infaas", "level-8", "level-5", "level+2"]
    colours = figures.colours_of(names)
    assert len(set(colours.values())) == len(names)
    assert colours["elastic"] == figures.OURS == figures.colours_of(["ours"])["ours"]
    greys = [float(colours[name]) for name in ("level-8", "level-5", "level+2")]
    assert greys == sorted(greys, reverse=True)
    with pytest.raises(KeyError):
        figures.colours_of(["a policy of nobody's"])


def test_systems_of_experts_differ_by_colour_or_by_dashes():
    from benchmarks.coserve.tables import NAMES

    colours = figures.colours_of(NAMES.values())
    for one, other in itertools.combinations(NAMES.values(), 2):
        assert (colours[one], one in figures.DASHED) != (colours[other], other in figures.DASHED)


def test_a_figure_is_the_same_file_each_time_with_text_as_text(tmp_path):
    figures.write_figure(tmp_path / "new" / "a.svg", drawn())
    text = (tmp_path / "new" / "a.svg").read_text()
    assert text == figures.render(drawn(), "svg").decode()
    labels = re.findall(r"<text[^>]*>([^<]*)</text>", text)
    assert labels.count("elastic") == 1
    assert {"0.25", "0.5", "1", "2", "this machine, this load"} <= set(labels)
    assert "<dc:date>" not in text
    assert figures.render(drawn(), "png").startswith(b"\x89PNG")


@pytest.mark.slow
def test_figures_of_the_docs_are_those_of_the_results(tmp_path):
    from benchmarks.figures import draw

    draw(tmp_path)
    names = sorted(file.relative_to(tmp_path) for file in tmp_path.rglob("*.svg"))
    assert names == sorted(file.relative_to(ROOT / "docs") for file in (ROOT / "docs").rglob("*.svg"))
    for name in names:
        text = (tmp_path / name).read_text()
        assert len(text) < 400_000
        committed = (ROOT / "docs" / name).read_text()
        assert _words(text) == _words(committed), name  # lines may move with matplotlib's version


def _words(svg):
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)
