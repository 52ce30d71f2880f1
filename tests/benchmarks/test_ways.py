"""Which ways of an engine are tried, remembered and timed, on simulated runs."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from benchmarks.engine.throughput import best_way
from benchmarks.engine.ways import BEHIND, Memory, Trial, limit_after, race
from benchmarks.peers import worker
from benchmarks.peers.worker import Stopwatch, timed_throughput

WAYS = [{"batch": batch} for batch in (64, 32, 16, 8)]


@dataclasses.dataclass
class Runs:
    """Simulated runs: batch size -> seconds. Records what was asked for."""

    seconds: dict[int, float]
    asked: list[tuple[int, float | None]] = dataclasses.field(default_factory=list)

    def __call__(self, way, limit):
        self.asked.append((way["batch"], limit))
        needed = self.seconds[way["batch"]]
        stopped = limit is not None and needed > limit
        return Trial(way=way, seconds=limit if stopped else needed, stopped=stopped)


def batches(trials):
    return [trial.way["batch"] for trial in trials]


def trials_of(**seconds):
    return [Trial(way={"batch": int(name[1:])}, seconds=value) for name, value in seconds.items()]


def test_all_ways_are_tried_once_and_those_clearly_behind_are_stopped():
    runs = Runs({64: 10.0, 32: 8.0, 16: 9.0, 8: 40.0})
    trials = race(WAYS, [], runs)
    assert batches(trials) == [32, 16, 64, 8]
    assert runs.asked == [(64, None), (32, BEHIND * 10.0), (16, BEHIND * 8.0), (8, BEHIND * 8.0)]
    assert [trial.stopped for trial in trials] == [False, False, False, True]
    assert trials[-1].seconds == BEHIND * 8.0


def test_a_way_that_was_stopped_never_ranks_before_one_that_finished():
    trials = race(WAYS[:3], [], Runs({64: 20.0, 32: 10.0, 16: 13.0}))
    assert batches(trials) == [32, 64, 16]


def test_only_the_two_best_are_tried_again():
    runs = Runs({64: 10.0, 32: 8.0, 16: 9.0, 8: 40.0})
    assert batches(race(WAYS, trials_of(b32=8.0, b16=9.0, b64=10.0, b8=10.0), runs)) == [32, 16]
    assert [batch for batch, _ in runs.asked] == [32, 16]


def test_other_ways_are_tried_again_when_the_best_have_become_slower():
    runs = Runs({64: 10.0, 32: 16.0, 16: 15.0, 8: 40.0})
    trials = race(WAYS, trials_of(b32=8.0, b16=9.0, b64=10.0, b8=11.0), runs)
    assert [batch for batch, _ in runs.asked] == [32, 16, 64]
    assert batches(trials) == [64, 16, 32]


def test_all_ways_are_tried_again_when_the_machine_was_busy_before():
    runs = Runs({64: 2.0, 32: 3.0, 16: 2.9, 8: 2.5})
    assert batches(race(WAYS, trials_of(b32=8.0, b16=9.0, b64=10.0, b8=11.0), runs)) == [64, 8, 16, 32]


def test_ways_that_are_not_remembered_are_tried_first():
    runs = Runs({64: 10.0, 32: 8.0, 16: 9.0, 8: 7.0})
    race(WAYS, trials_of(b32=8.0, b16=9.0, b64=10.0), runs)
    assert [batch for batch, _ in runs.asked] == [8, 32]


def test_trials_are_remembered_by_subject_and_replace_older_ones(tmp_path):
    file = tmp_path / "folder" / "ways.json"
    assert Memory(file).recall("a") == []
    Memory(file).remember("a", trials_of(b64=10.0, b32=8.0))
    Memory(file).remember("b", trials_of(b64=1.0))
    newer = [Trial(way={"batch": 32}, seconds=12.5, stopped=True, date="2026-01-31")]
    Memory(file).remember("a", newer)
    assert Memory(file).recall("a") == trials_of(b64=10.0) + newer
    assert Memory(file).recall("b") == trials_of(b64=1.0)
    assert json.loads(file.read_text())["a"][1] == {
        "way": {"batch": 32},
        "seconds": 12.5,
        "stopped": True,
        "date": "2026-01-31",
    }
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a": [{"way": 3}]}'])
def test_a_damaged_memory_is_said_and_means_trying_all_ways_again(tmp_path, capsys, content):
    file = tmp_path / "ways.json"
    file.write_text(content)
    assert Memory(file).recall("a") == []
    assert "every way is tried again" in " ".join(capsys.readouterr().out.split())
    Memory(file).remember("a", trials_of(b64=10.0))
    assert Memory(file).recall("a") == trials_of(b64=10.0)


def test_the_figure_of_an_engine_is_that_of_its_better_way():
    rounds = [*trials_of(b64=10.0, b32=9.0), Trial(way={"batch": 64}, seconds=7.0), *trials_of(b32=9.5)]
    assert (best_way(rounds).way, best_way(rounds).seconds) == ({"batch": 64}, 8.5)
    stopped = Trial(way={"batch": 8}, seconds=1.0, stopped=True)
    assert best_way([*rounds, stopped]).way == {"batch": 64}


def test_limits_are_relative_to_the_fastest_that_has_finished():
    assert limit_after([]) is None
    assert limit_after([Trial(way={}, seconds=1.0, stopped=True)]) is None
    assert limit_after([Trial(way={}, seconds=1.0, stopped=True), Trial(way={}, seconds=4.0)]) == BEHIND * 4.0


def test_a_run_over_its_limit_is_answered_without_tokens():
    class Engine:
        def throughput(self, prompts, outputs, watch, *, batch):
            watch.start()
            watch.check()
            return prompts

    request = {"prompts": [[3]], "outputs": [1], "way": {"batch": 1}}
    assert timed_throughput(Engine(), request | {"limit": None})["tokens"] == [[3]]  # type: ignore[arg-type]
    assert timed_throughput(Engine(), request | {"limit": -1.0}).keys() == {"seconds"}  # type: ignore[arg-type]


def test_a_stopwatch_without_limit_is_never_over(monkeypatch):
    now = [5.0]
    monkeypatch.setattr(worker, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    free, limited = Stopwatch(None), Stopwatch(10.0)
    free.start(), limited.start()
    now[0] = 15.0
    assert (limited.seconds(), limited.is_over()) == (10.0, False)
    now[0] = 15.5
    assert (free.is_over(), limited.is_over()) == (False, True)
    with pytest.raises(TimeoutError):
        limited.check()
