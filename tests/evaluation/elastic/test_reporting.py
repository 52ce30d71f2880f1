"""Runs that are measured, served live or simulated, recorded and reported."""

import dataclasses
import html.parser
import io
import re
import sys
from collections import Counter

import msgspec
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from jaxinfer.cli import app
from jaxinfer.elastic import Service
from jaxinfer.elastic.scheduling.policies import make_policy
from jaxinfer.elastic.scheduling.query import Outcome, Query
from jaxinfer.evaluation.elastic.dashboard import Dashboard
from jaxinfer.evaluation.elastic.live import send_queries
from jaxinfer.evaluation.elastic.measurements import Measurements, measure
from jaxinfer.evaluation.elastic.runs import Run, batches_of, read_run, read_runs, write_run
from jaxinfer.evaluation.elastic.simulator import simulate
from jaxinfer.evaluation.elastic.summaries import CellSummary, summarise
from jaxinfer.evaluation.elastic.tables import HEADINGS, by_cell, rows_of, terminal_table
from jaxinfer.evaluation.elastic.workloads import make_queries, poisson_arrivals, table_ii
from tests.elastic.serving import TASKS, profile
from tests.elastic.vits import stripes

PROFILE = profile()


def run_of(policy, *, load=1.2, seed=0, seconds=4):
    queries = make_queries(poisson_arrivals(load * PROFILE.capacity(), seconds, seed=seed), table_ii(TASKS), seed=seed)
    served = simulate(queries, make_policy(policy, PROFILE), PROFILE, seed=seed)
    measured = Measurements(profile=PROFILE, samples={}, right={}, capacity=PROFILE.capacity(), scale=1.0)
    return Run.from_served(served, measured, policy=policy, arrivals="poisson", load=load, seed=seed, clock="simulated")


@pytest.fixture(scope="module")
def runs():
    return [run_of(policy, seed=seed) for policy in ("level-15", "pets", "elastic", "paper") for seed in (0, 1)]


def test_policies_have_names():
    assert make_policy("level+8", PROFILE).least_seconds(64) == PROFILE.batch_seconds(8, 64)
    assert make_policy("elastic", PROFILE, scale=0.1).batching.max_wait == pytest.approx(0.05)
    with pytest.raises(ValueError, match="no policy 'best'; known: elastic, paper, paper_profiled, pets, slack"):
        make_policy("best", PROFILE)
    with pytest.raises(ValueError, match="level -3 is not in the profile"):
        make_policy("level-3", PROFILE)


def test_runs_are_written_and_read(tmp_path, runs):
    for run in runs:
        write_run(tmp_path, run)
    found = {run.name: run for run in read_runs(tmp_path)}
    assert list(found) == sorted(run.name for run in runs)
    run, again = runs[4], found["simulated-poisson-1.20x-elastic-0"]
    assert (again.profile, again.served, again.name) == (PROFILE, run.served, run.name)
    batches = batches_of(again.served.answers)
    assert sum(map(len, batches.values())) == sum(answer.level is not None for answer in again.served.answers)
    assert all(len({answer.level for answer in batch}) == 1 for batch in batches.values())


def test_damaged_runs(tmp_path, runs):
    with pytest.raises(ValueError, match=r"no runs \(\*.jsonl\); record some with"):
        read_runs(tmp_path)
    file = write_run(tmp_path, runs[0])
    lines = file.read_text().splitlines()
    for damaged, message in (
        ("", ":1: not a recorded run"),
        ("[]\n", ":1: not a recorded run"),
        (lines[0].replace('"format":2', '"format":1') + "\n", "has format 1, and this version reads 2"),
        ("\n".join([*lines[:2], "[1, 2]"]), ":3: not a served query"),
        ("\n".join([lines[0], re.sub('"outcome":[1-4]', '"outcome":9', lines[1])]), ":2: not a served query"),
    ):
        file.write_text(damaged)
        with pytest.raises(ValueError, match=message):
            read_run(file)


def test_a_report_without_matplotlib_is_one_line(tmp_path, runs, monkeypatch):
    write_run(tmp_path, runs[0])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = CliRunner().invoke(app, ["elastic", "report", str(tmp_path)])
    line = "error: elastic report needs matplotlib, of the extra bench: pip install matplotlib\n"
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", line)


def test_tables(runs):
    ((cell, own),) = by_cell(runs).items()
    assert cell == ("simulated", "poisson", 1.2)
    rows = rows_of(own)
    assert [row[:2] for row in rows] == [(name, "2") for name in ("elastic", "paper", "pets", "level-15")]
    for row in rows:
        assert len(row) == len(HEADINGS)
        assert sum(map(float, row[3:7])) == pytest.approx(100, abs=0.03)
    assert float(rows[0][2]) > float(rows[2][2]) + 0.1  # at 1.2 times its capacity level 0 loses much
    assert rows[3][-1] == "-15.0"
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(terminal_table(cell, own))
    assert "poisson at 1.20x the capacity of level 0, simulated" in console.export_text()


def test_a_summary_is_of_all_seeds_and_lines_of_the_first(runs):
    ((_, cell_runs),) = by_cell(runs).items()
    cell = summarise(cell_runs)
    again = msgspec.json.decode(msgspec.json.encode(cell), type=CellSummary)
    assert again == cell
    assert list(cell.policies) == ["elastic", "paper", "pets", "level-15"]
    assert (cell.arrivals, cell.load, cell.levels) == ("poisson", 1.2, list(PROFILE.levels))
    assert np.mean(cell.rates) * cell.rates_until == pytest.approx(len(cell_runs[0].served.answers), rel=1e-3)
    for name, policy in cell.policies.items():
        first, second = (run.served for run in cell_runs if run.header.policy == name)
        assert policy.outcomes == pytest.approx([(first.share(o) + second.share(o)) / 2 for o in Outcome], abs=1e-4)
        assert policy.earned[0] == 0
        assert policy.earned[-1] == pytest.approx(first.normalised, abs=1e-4)
        assert policy.earned == sorted(policy.earned)
        assert policy.batch_accuracy == sorted(policy.batch_accuracy)
    assert cell.policies["level-15"].levels == {-15: 1.0}


class _Page(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.counts, self.ids, self.links = Counter(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.counts[tag] += 1
        given = dict(attrs)
        if tag == "section":
            self.ids.append(given["id"])
        if tag == "a":
            self.links.append(given["href"])


def test_a_report_has_an_index_and_the_figures_of_each_load(tmp_path, runs):
    report = pytest.importorskip("jaxinfer.evaluation.elastic.report")
    header = msgspec.structs.replace(runs[0].header, arrivals="<b>.jsonl")
    report.write_report(tmp_path / "report.html", [*runs, Run(header, runs[0].served)])
    text = (tmp_path / "report.html").read_text()
    page = _Page(text)
    assert (page.counts["svg"], page.counts["table"], page.counts["h2"]) == (12, 2, 3)
    assert page.links == [f"#{name}" for name in page.ids] == ["#section-1", "#section-2", "#section-3"]
    assert "<b>" not in text  # what users name is escaped
    assert "&lt;b&gt;.jsonl at 1.20x" in text
    assert not re.search(r"""(src|href)=["']?(http|//)""", text)


@pytest.fixture(scope="module")
def service(vit, registered, options):
    """One of our own: measuring changes what a service knows of its latencies."""
    return Service.from_checkpoint(vit, repository=registered, **options)


@pytest.fixture(scope="module")
def measured(service):
    return measure(service, {"stripes": stripes(20, seed=5)}, samples=5)


def test_measured(service, measured):
    assert measured.profile.levels == (-4, 0, 2)
    assert set(measured.samples) == {(level, size) for level in (-4, 0, 2) for size in (1, 2)}
    assert all(len(found) == 5 and found.min() > 0 for found in measured.samples.values())
    assert measured.capacity == pytest.approx(2 / np.median(measured.samples[0, 2]))
    test = stripes(20, seed=5)
    right = [
        a.label == test.names[y] for a, y in zip(service.classify(test.images, "stripes"), test.labels, strict=True)
    ]
    assert measured.right["stripes", 0].tolist() == right
    only = measure(service, {"stripes": test}, levels=[0], samples=5)
    assert (only.profile.levels, set(only.samples)) == ((0,), {(0, 1), (0, 2)})


def test_simulated_with_what_was_measured(measured):
    queries = measured.queries(np.arange(50) / 100, seed=1)
    assert {query.latency for query in queries} == {measured.scale * seconds for seconds in (0.6, 1.0)}
    served = measured.simulate(queries, make_policy("level+0", measured.profile, scale=measured.scale), seed=1)
    again = measured.simulate(queries, make_policy("pets", measured.profile, scale=measured.scale), seed=1)
    assert served == again
    for answer in served.answers:
        if answer.outcome in (Outcome.CORRECT, Outcome.WRONG):
            assert (answer.outcome is Outcome.CORRECT) == measured.right["stripes", 0][answer.query.payload]
    best = max(measured.right["stripes", level].mean() for level in (-4, 0, 2))
    assert served.best == pytest.approx(best * sum(query.utility for query in queries))


def test_served_live(vit, registered, options, measured):
    """Every query ends once, with the answer that its image has."""
    test, sent = stripes(20, seed=5), []
    queries = [
        Query(id=i, task="stripes", arrival=0.002 * i, latency=0.0 if i % 10 == 9 else 5.0, utility=1.0, payload=i % 20)
        for i in range(100)
    ]

    def make(profile):
        return make_policy("level-4", profile)

    with Service.from_checkpoint(vit, repository=registered, policy=make, max_waiting=80, **options) as service:
        service.measure_latency()
        answers = send_queries(service, queries[::-1], {"stripes": test}, watch=sent.append)
        statistics = service.stats()
    assert [answer.query.id for answer in answers] == list(range(100))
    assert sent[-1] == 100
    assert sent == sorted(sent)
    for answer in answers:
        if answer.query.latency == 0:
            assert answer.outcome is Outcome.SHED
        elif answer.outcome in (Outcome.CORRECT, Outcome.WRONG):
            assert (answer.outcome is Outcome.CORRECT) == measured.right["stripes", -4][answer.query.payload]
            assert answer.ended > answer.began >= answer.query.arrival
    ran = [answer for answer in answers if answer.level is not None]
    assert len(batches_of(ran)) <= statistics.batches
    assert statistics.answered == len(ran)
    assert send_queries(service, [], {}) == []


def test_dashboard(service):
    dashboard, console = (
        Dashboard(service, "elastic: bursty", 1000),
        Console(width=140, record=True, file=io.StringIO()),
    )
    dashboard.watch(250)
    dashboard.__rich__()
    console.print(dashboard)
    text = console.export_text()
    for part in ("elastic: bursty", "250 of 1,000", "queries/s", "fallbacks", "-4", "+2"):
        assert part in text


def test_a_service_counts_what_it_does(vit, registered, options):
    with Service.from_checkpoint(vit, repository=registered, **options) as service:
        service.measure_latency()
        assert (service.num_requests, service.stats().utility) == (0, 0.0)
        service.submit(stripes(1).images[0], "stripes", deadline=60.0, utility=0.5).result()
        assert (service.num_requests, service.stats().utility) == (0, 0.5)
        assert dataclasses.asdict(service.stats())["fallbacks"] == 0
