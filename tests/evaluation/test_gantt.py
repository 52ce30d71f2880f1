"""Charts show every job of a schedule, for as long as it lasts, in a figure and in a terminal."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from jaxinfer import LLM, SamplingParams
from jaxinfer.evaluation import gantt
from jaxinfer.sharding import MeshConfig
from jaxinfer.sharding.schedules import Job, Phase, Schedule, chunked, drained, hybrid, queued

ROOT = Path(__file__).parents[2]
SCHEDULES = {
    "drained": drained(4, 4, 3),
    "hybrid": hybrid(4, 8, 4, 3, prompt_units=16.0),
    "fewer sequences than stages": queued(4, 2, 5),
    "one stage": queued(1, 2, 2),
    "many tokens": queued(2, 2, 15),
    "many micro-batches": queued(2, 11, 2),
    "chunks": chunked(3, [0.7, 1.0, 1.5, 1.6]),
}


def printed(schedules, width=80, *, colours=False):
    system = "standard" if colours else None
    console = Console(file=io.StringIO(), width=width, force_terminal=colours, color_system=system)
    console.print(gantt.TerminalGantt(schedules))
    return console.file.getvalue()


def rows(text):
    return [line.split(maxsplit=2)[2].split() for line in text.splitlines() if line.startswith("stage ")]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_terminal_shows_all_jobs_that_fit(name):
    schedule = SCHEDULES[name]
    text = printed({name: schedule})
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith(f"{name}: {schedule.length:.4g} units, {schedule.idle_share:.1%} idle\n")
    assert "cut" not in text
    expected = [[job for tick in schedule.ticks if (job := tick[stage])] for stage in range(schedule.stages)]
    labels = re.compile(r"\d+[a-z]?")
    for row, jobs in zip(rows(text), expected, strict=True):
        shown = labels.findall(" ".join(row))
        assert [int(re.match(r"\d+", label)[0]) for label in shown] == [job.chunk or job.micro_batch for job in jobs]
        letters = [label.lstrip("0123456789") for label in shown]
        assert letters == ["" if name == "chunks" else "abcdefghijklmnopqrstuvwxyz"[job.token] for job in jobs]


def test_a_terminal_draws_jobs_as_long_as_they_last():
    text = printed({"a": hybrid(2, 2, 2, 2, prompt_units=8.0)}, width=40)
    assert text.splitlines()[1:3] == [
        "stage 0 0a----- 1a----- ....... 0b1b. ",
        "stage 1 ....... 0a----- 1a----- . 0b1b",
    ]


def test_what_is_too_long_is_cut_and_said():
    text = printed({"long": queued(4, 4, 30), "short": queued(4, 4, 3)})
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("... cut after 36 of 123 units") == text.count("cut") == 1
    assert printed({"long": queued(4, 4, 30)}, width=300).count("cut") == 0


def test_schedules_share_their_time():
    short, long = (printed({name: SCHEDULES[name] for name in names}) for names in (["drained"], ["drained", "hybrid"]))
    assert re.search(r"^time +0 +2 .* 20$", short, re.MULTILINE)
    assert re.search(r"^time +0 .* 30$", long, re.MULTILINE)


def test_tokens_differ_by_colour():
    text = printed({"a": queued(2, 2, 2)}, colours=True)
    assert "\x1b[37;44m0a" in text
    assert "\x1b[30;43m1b" in text
    assert "\x1b" not in printed({"a": queued(2, 2, 2)})


def bars(axes):
    """The (stage, start, units, colour) of each bar."""
    shown = []
    for collection in axes.collections:
        colour = tuple(collection.get_facecolor()[0])
        for path in collection.get_paths():
            (left, top), (right, bottom) = path.vertices.min(axis=0), path.vertices.max(axis=0)
            shown.append((round((top + bottom) / 2), round(left, 6), round(right - left, 6), colour))
    return shown


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_figure_shows_all_jobs(name):
    figures = pytest.importorskip("jaxinfer.evaluation.figures", reason="needs the extra `bench`")
    from matplotlib.colors import to_rgba

    schedule, (axes,) = SCHEDULES[name], gantt.draw_schedules({name: SCHEDULES[name]}).axes
    idle = to_rgba("#e4e4e4")
    jobs, start = [], 0.0
    for tick, duration in zip(schedule.ticks, schedule.durations, strict=True):
        for stage, job in enumerate(tick):
            if job is not None:
                colour = to_rgba(figures.SEQUENCE[job.token % len(figures.SEQUENCE)])
                jobs.append((stage, round(start, 6), round(job.units, 6), colour))
        start += duration
    drawn = bars(axes)
    assert sorted(bar for bar in drawn if bar[3] != idle) == sorted(jobs)
    assert sum(bar[3] == idle for bar in drawn) == schedule.slots
    labels = [text.get_text() for text in axes.texts]
    assert len(labels) == len(jobs)
    assert axes.get_title(loc="left") == gantt.heading(name, schedule)


@pytest.mark.slow
def test_a_figure_has_a_panel_for_each_schedule_with_one_time_axis():
    figures = pytest.importorskip("jaxinfer.evaluation.figures", reason="needs the extra `bench`")
    figure = gantt.draw_schedules(SCHEDULES, "a caption")
    assert len(figure.axes) == len(SCHEDULES)
    assert {axes.get_xlim() for axes in figure.axes} == {(0, max(s.length for s in SCHEDULES.values()))}
    svg = figures.render(figure, "svg")
    assert svg == figures.render(gantt.draw_schedules(SCHEDULES, "a caption"), "svg")
    assert b">token 0, 6, 12<" in svg
    assert b">a caption<" in svg


def test_what_a_ring_recorded_is_drawn():
    """A micro-batch that both stages have, and ticks without any."""
    table = [[[0, 0, 0]] * 2, [[5, 0, 1], [0, 0, 0]], [[0, 0, 0], [5, 0, 1]]]
    recorded = Schedule.from_ring(table, lambda micro_batch, number: Job(micro_batch, Phase.GENERATION, number + 2))
    assert rows(printed({"recorded": recorded})) == [["5", "."], [".", "5"]]


@pytest.mark.slow
def test_what_a_compiled_ring_did_is_its_schedule_and_is_drawn(monkeypatch):
    """At each step of some requests: prompts in chunks, and passes of decoding."""
    llm = LLM(ROOT / "examples/demo_model", mesh=MeshConfig(pipeline=2), max_batch=4, context=128, chunk_size=16)
    passes, steps = llm.engine.executor.passes, []
    run = passes.run

    def run_and_record(commands, state):
        results = run(commands, state)
        steps.append(passes.recorded())
        return results

    monkeypatch.setattr(passes, "run", run_and_record)
    llm.generate(["import os\n" * 5, "class Point:\n"], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    llm.close()
    sizes = [tuple((step[step[..., 2] == 1].max(axis=0)[:2] + 1).tolist()) for step in steps]
    assert max(micro_batches for micro_batches, _ in sizes) == 2
    assert min(number for _, number in sizes) == 1 < max(number for _, number in sizes)
    for step, (micro_batches, number) in zip(steps, sizes, strict=True):
        schedule = Schedule.from_ring(step)
        assert schedule == queued(2, micro_batches, number)
    assert "stage 1 .. 0a" in printed({"the last step": Schedule.from_ring(steps[-1])})


@pytest.mark.parametrize("draw", [gantt.TerminalGantt, gantt.draw_schedules])
@pytest.mark.parametrize("schedules", [{}, {"idle": Schedule(1, ((None,),))}])
def test_nothing_is_refused(draw, schedules):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="needs at least one schedule, and each at least one job"):
        draw(schedules)
