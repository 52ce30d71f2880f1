"""The record of what programs cost: its statistics, what it forgets, and its file under several processes."""

import json
import logging
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.compiled import Costs, LinearFit, cache_folder
from jaxinfer.compiled.costs import MAX_CALLS, PRIOR_CALLS, STALL
from jaxinfer.disk_cache import KeptFiles

ROWS = (("batch", 8), ("pages", 32))
MODEL = {"config": "small", "weights": "float32"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where costs are kept in a test."""
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path))
    return tmp_path / "costs"


def kept_file(folder):
    (path,) = (path for path in folder.iterdir() if not path.name.startswith("."))
    return path


def content(folder):
    """What is kept, as JSON."""
    return json.loads(KeptFiles(folder, max_bytes=1 << 20).get(kept_file(folder).name))


def opened(**model):
    return Costs.open(device="a device", model=MODEL | model)


def record(costs, *seconds, name="decode", bucket=ROWS, passes=1):
    """Calls that count: the first one of a program does not."""
    if not costs._programs.get((name, bucket)) or not costs._programs[name, bucket].called:
        costs.record(name, bucket, 1e6)
    for each in seconds:
        costs.record(name, bucket, each * passes, passes=passes)


# Statistics


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=MAX_CALLS), st.floats(0, 100))
def test_percentiles_are_numpys_within_half_a_step(seconds, percent):
    costs = Costs()
    record(costs, *seconds)
    cost = costs.for_sizes("decode")
    for q in (percent, 0, 50, 95, 100):
        exact = np.percentile(seconds, q, method="inverted_cdf")
        assert cost.percentile(q) == pytest.approx(exact, rel=0.025)
    assert (cost.p50, cost.p95) == (cost.percentile(50), cost.percentile(95))


def test_the_mean_is_exact_and_the_first_call_is_not_in_it():
    costs = Costs()
    costs.record("embed", ROWS, 5.0)
    assert costs.for_sizes("embed") is None
    for seconds, passes in ((0.001, 1), (0.008, 4), (0.006, 2)):
        costs.record("embed", ROWS, seconds, passes=passes)
    cost = costs.for_sizes("embed")
    assert cost.mean == costs.mean("embed", batch=8) == pytest.approx((0.001 + 0.002 + 0.003) / 3)
    assert (cost.calls, cost.passes) == (3, 7)


def test_a_stall_is_bounded_in_the_mean_and_seen_in_percentiles():
    costs = Costs()
    record(costs, *[0.001] * 99, 3600.0)
    cost = costs.for_sizes("decode")
    assert cost.mean == pytest.approx((99 + STALL) * 0.001 / 100)
    assert cost.p50 == pytest.approx(0.001, rel=0.025)
    assert cost.percentile(100) == pytest.approx(3600, rel=0.025)


def test_what_a_call_took_at_most_counts_only_below_the_mean():
    costs = Costs()
    for seconds in (9.0, 0.004):  # the first call of all, and the first that counts
        costs.record("decode", ROWS, seconds, at_most=True)
    assert costs.mean("decode") == pytest.approx(0.004)
    costs.record("decode", ROWS, 0.4, at_most=True)
    assert costs.mean("decode") == pytest.approx(0.004)
    costs.record("decode", ROWS, 0.004, passes=2, at_most=True)
    assert costs.mean("decode") == pytest.approx(0.003)
    assert costs.for_sizes("decode").calls == 2


def test_a_clock_that_stands_still_is_no_error():
    costs = Costs()
    record(costs, 0.0, 0.0)
    assert 0 < costs.for_sizes("decode").p95 < 1e-8


def test_old_calls_are_forgotten():
    costs = Costs()
    record(costs, *[0.001] * 10 * MAX_CALLS)
    assert costs.for_sizes("decode").weight <= MAX_CALLS
    record(costs, *[0.005] * MAX_CALLS)
    cost = costs.for_sizes("decode")
    assert cost.p50 == pytest.approx(0.005, rel=0.025)
    assert cost.mean == pytest.approx(0.005, rel=0.3)
    assert cost.calls == 11 * MAX_CALLS
    record(costs, *[0.005] * 4 * MAX_CALLS)
    assert costs.for_sizes("decode").mean == pytest.approx(0.005, rel=0.03)


def test_sizes_that_are_not_asked_for_are_taken_together():
    costs = Costs()
    for pages, seconds in ((8, 0.001), (16, 0.003)):
        record(costs, seconds, seconds, bucket=(("batch", 4), ("pages", pages)))
    record(costs, 0.1, bucket=(("batch", 2), ("pages", 8)))
    assert costs.for_sizes("decode", batch=4, pages=8).mean == pytest.approx(0.001)
    assert costs.for_sizes("decode", batch=4).calls == 4
    assert costs.for_sizes("decode", batch=4).mean == costs.mean("decode", batch=4) == pytest.approx(0.002)
    assert costs.for_sizes("decode", batch=3) is costs.mean("decode", batch=3) is costs.for_sizes("prefill") is None
    record(costs, 0.005, 0.005, bucket=(("batch", 4), ("pages", 32)))  # after it was asked for
    assert costs.mean("decode", batch=4) == pytest.approx(0.003)


def test_a_line_through_costs_is_numpys():
    costs, rng = Costs(), np.random.default_rng(0)
    sizes, counts = [1, 2, 4, 8], [30, 5, 90, 2]
    for size, count in zip(sizes, counts, strict=True):
        noisy = 0.002 * size + 0.01 + rng.normal(0, 0.001)
        record(costs, *[noisy] * count, bucket=(("batch", size), ("tokens", 16)))
        record(costs, 9.0, bucket=(("batch", size), ("tokens", 32)))
    means = [costs.mean("decode", batch=size, tokens=16) for size in sizes]
    slope, intercept = np.polyfit(sizes, means, 1, w=np.sqrt(counts))
    fit = costs.snapshot().fit("decode", "batch", tokens=16)
    assert fit[:2] == pytest.approx((slope, intercept))
    rest = np.array(means) - slope * np.array(sizes) - intercept
    spread = np.array(means) - np.average(means, weights=counts)
    assert fit.r2 == pytest.approx(1 - np.sum(counts * rest**2) / np.sum(counts * spread**2))
    assert fit.points == 4
    assert costs.snapshot().fit("decode", "batch", "p50", tokens=16).slope == pytest.approx(slope, rel=0.2)


def test_a_snapshot_does_not_change():
    costs = Costs()
    record(costs, 0.001)
    before = costs.snapshot()
    record(costs, 0.003)
    record(costs, 0.5, name="prefill")
    assert (before.mean("decode", batch=8), costs.mean("decode", batch=8)) == pytest.approx((0.001, 0.002))
    assert before.for_sizes("decode").calls == 1
    assert before.for_sizes("prefill") is before.fit("decode", "batch") is None
    costs.replace("decode", ROWS, [9.0])
    assert (before.for_sizes("decode").calls, costs.snapshot().mean("decode")) == (1, pytest.approx(9.0))


def test_a_line_needs_two_sizes():
    known = {("decode", (("batch", size),)): 0.5 for size in (1, 2)} | {("load", (("bytes", 9),)): 1.0}
    table = Costs.fixed(known).snapshot()
    assert table.fit("decode", "batch") == LinearFit(slope=0, intercept=0.5, r2=1, points=2)
    assert table.fit("load", "bytes") is table.fit("decode", "rows") is table.fit("prefill", "batch") is None


def test_a_fixed_record_learns_nothing():
    costs = Costs.fixed({("decode", ROWS): 0.25})
    record(costs, 9.0, 9.0)
    record(costs, 9.0, name="prefill")
    assert costs.mean("decode") == 0.25
    assert costs.for_sizes("prefill") is None


# The file


def test_what_was_learnt_is_the_next_ones_prior(folder):
    first = opened()
    record(first, *[0.001] * 90, *[0.002] * 10)
    first.save()
    second = opened()
    cost, before = second.for_sizes("decode"), first.for_sizes("decode")
    assert cost.weight == pytest.approx(PRIOR_CALLS)
    assert (cost.mean, cost.p50, cost.p95) == pytest.approx((before.mean, before.p50, before.p95))
    assert cost.calls == 100
    assert opened(weights="int8").for_sizes("decode") is None
    assert Costs.open(device="another", model=MODEL).for_sizes("decode") is None
    # A machine that has become slower is learnt anew.
    record(second, *[0.005] * 4 * PRIOR_CALLS)
    assert second.for_sizes("decode").p50 == pytest.approx(0.005, rel=0.025)
    assert second.for_sizes("decode").mean > 0.004


def test_the_version_of_jax_and_its_flags_are_in_the_key(folder, monkeypatch):
    first = opened()
    record(first, 0.001)
    first.save()
    monkeypatch.setenv("XLA_FLAGS", "--xla_of_another_kind")
    assert opened().for_sizes("decode") is None
    monkeypatch.undo()
    monkeypatch.setenv("JAXINFER_CACHE", str(folder.parent))
    monkeypatch.setattr("jax.__version__", "99")
    assert opened().for_sizes("decode") is None


def test_files_are_written_rarely_and_only_with_news(folder):
    costs = opened()
    costs.save()
    assert not folder.exists()
    record(costs, 0.001)
    costs.save(every=3600)
    assert not folder.exists()
    costs.save()
    path = kept_file(folder)
    path.unlink()
    costs.save()
    assert not path.exists()
    assert costs.for_sizes("decode").calls == 1


def test_costs_are_saved_where_they_were_opened(folder, tmp_path, monkeypatch):
    costs = opened()
    record(costs, 0.001)
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path / "elsewhere"))
    costs.save()
    assert kept_file(folder)
    assert not (tmp_path / "elsewhere").exists()


def test_what_is_replaced_is_so_on_disk_once_it_is_saved(folder):
    first = opened()
    record(first, *[0.001] * 10)
    first.save()
    second = opened()
    second.replace("decode", ROWS, [0.004, 0.004])
    assert second.for_sizes("decode").calls == 2
    assert opened().for_sizes("decode").calls == 10
    second.save()
    record(second, 0.010)
    second.save()
    cost = opened().for_sizes("decode")
    assert (cost.calls, cost.mean) == (3, pytest.approx(0.006))


def test_files_keep_no_more_than_their_share(folder):
    for seconds in (0.001, 0.004):
        costs = opened()
        record(costs, *[seconds] * MAX_CALLS)
        costs.save()
    (program,) = content(folder)["programs"]
    assert sum(program["cost"]["counts"].values()) <= MAX_CALLS
    assert program["cost"]["calls"] == 2 * MAX_CALLS
    assert opened().for_sizes("decode").mean == pytest.approx(0.004)


SCRIPT = """
import sys
from jaxinfer.compiled import Costs
costs = Costs.open(device="a device", model={MODEL})
print("ready", flush=True)
sys.stdin.readline()
for turn in range(10):
    for name in ("decode", "decode", "of another " + str(turn), "of another " + str(turn)):
        costs.record(name, {ROWS}, 0.001)
    costs.save()
for _ in range(2):
    costs.record("at its end", {ROWS}, 0.5)
"""


def test_no_call_is_lost_when_processes_save_at_once(folder):
    """Nor those that a process has not saved before it ends."""
    command = [sys.executable, "-c", SCRIPT.format(MODEL=MODEL, ROWS=ROWS)]
    costs, root = opened(), Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("go\n")
        process.stdin.flush()
        for turn in range(10):
            record(costs, 0.001, 0.002)
            record(costs, 0.5, name=f"of one {turn}")
            costs.save()
        process.communicate()
    assert process.returncode == 0
    both = opened()
    for name in (*(f"of {which} {turn}" for which in ("one", "another") for turn in range(10)), "at its end"):
        assert both.for_sizes(name).calls == 1  # the first one of a program does not count
    assert both.for_sizes("decode").calls == 2 * 10 + 2 * 10 - 1


def test_a_process_killed_while_it_writes_leaves_the_record(folder):
    costs = opened()
    record(costs, 0.001)
    costs.save()
    path = kept_file(folder)
    (folder / f".{path.name}.0123.tmp").write_bytes(path.read_bytes()[:40])  # what it leaves
    assert opened().for_sizes("decode").calls == 1
    record(costs, 0.001)
    costs.save()
    assert opened().for_sizes("decode").calls == 2


def damaged(folder, change):
    """The record with other content, whole but for that."""
    found = content(folder)
    change(found["programs"][0]["cost"])
    KeptFiles(folder, max_bytes=1 << 20).put(kept_file(folder).name, json.dumps(found).encode())


@pytest.mark.parametrize(
    "change",
    [
        lambda cost: cost.update(counts={}),
        lambda cost: cost.update(counts={"99999": 1}),
        lambda cost: cost.update(counts={"-99999": 1}),
        lambda cost: cost.update(counts={"1": -1, "2": 3}),
        lambda cost: cost.update(seconds=1e300),
        lambda cost: cost.update(passes=-1),
        lambda cost: cost.clear(),
        lambda cost: cost.update(counts=[1]),
    ],
)
def test_a_record_that_cannot_be_is_replaced(folder, change, caplog):
    costs = opened()
    record(costs, 0.001)
    costs.save()
    path = kept_file(folder)
    damaged(folder, change)
    with caplog.at_level(logging.WARNING):
        fresh = opened()
    assert fresh.for_sizes("decode") is None
    assert [f"{path} is damaged and not used" in message for message in caplog.messages] == [True]
    record(fresh, 0.002)
    fresh.save()
    assert opened().for_sizes("decode").calls == 1


@pytest.mark.parametrize("length", [0, 10, 200])
def test_half_a_record_is_replaced(folder, length):
    costs = opened()
    record(costs, 0.001)
    costs.save()
    os.truncate(kept_file(folder), length)
    fresh = opened()
    assert fresh.for_sizes("decode") is None
    record(fresh, 0.002)
    fresh.save()
    assert opened().for_sizes("decode").calls == 1


def test_the_folder_is_the_users_alone(folder, tmp_path):
    costs = opened()
    record(costs, 0.001)
    costs.save()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(kept_file(folder).stat().st_mode) == 0o600
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in (f"{kept_file(folder).name}.tmp", f"{kept_file(folder).name}.json"):
        (folder / name).symlink_to(victim)
    folder.chmod(0o777)  # others could have put these there
    record(costs, 0.001)
    costs.save()
    assert opened().for_sizes("decode").calls == 1  # what was there is not trusted
    assert victim.read_text() == "precious"


def test_a_full_disk_keeps_what_was_learnt_for_the_next_time(folder, caplog):
    costs = opened()
    record(costs, 0.001)
    record(costs, 0.001, name="prefill")
    costs.save()
    record(costs, 0.001)
    costs.replace("prefill", ROWS, [0.002])
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        with caplog.at_level(logging.INFO):
            costs.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "File too large" in caplog.text
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert opened().for_sizes("decode").calls == 1
    record(costs, 0.001)
    costs.save()
    assert opened().for_sizes("decode").calls == 3
    assert opened().for_sizes("prefill").mean == pytest.approx(0.002)  # in place of what was before


def test_a_folder_that_cannot_be_written_to_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path / "file"))
    costs = opened()
    record(costs, 0.001)
    costs.save()
    assert costs.for_sizes("decode").calls == 1


def test_tests_keep_no_costs():
    assert (cache_folder() / "costs").is_file()
    costs = opened()
    record(costs, 0.001)
    costs.save()
    assert opened().for_sizes("decode") is None
