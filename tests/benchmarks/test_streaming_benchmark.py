"""The streaming benchmark: its parts, with runs and fio that answer at once."""

import argparse
import itertools

import numpy as np
import pytest

from benchmarks.report import Report
from benchmarks.streaming import curve, disk, overlap
from benchmarks.streaming.disk import Way
from benchmarks.streaming.settings import Settings
from benchmarks.streaming.summary import summary

main = pytest.importorskip("benchmarks.streaming.__main__", reason="needs the extra `bench`")


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setattr(Settings, "large_model", lambda self: self.folder)
    return Settings(quick=False, folder=tmp_path, demo=tmp_path, peer_python=None)


def rows_of(report, figure):
    return [row for row in report.rows if row["figure"] == figure]


def test_parts_are_chosen_by_name():
    assert main.read_parts("host,disk") == ["host", "disk"]
    with pytest.raises(argparse.ArgumentTypeError, match=f"unknown ssd; there are {', '.join(main.PARTS)}"):
        main.read_parts("host,ssd")


# Disk


class Opened:
    def bytes_per_device(self):
        return 8_000


@pytest.fixture
def measure_disk(settings, monkeypatch):
    """The report of runs that read so fast, with fio in its best way as fast as these samples, and half in others."""
    best = Way("8m", 4, huge_pages=True)

    def measure(ours, fio):
        runs = ({"seconds": [9.0, 2.0, 2.1], "bandwidth": {"disk": rate}, "peak": 800} for rate in (1.0, *ours))
        cpu = {"reader_cpu_seconds": 1.0, "fetch_seconds": 4.0, "overlap": 1.0}
        monkeypatch.setattr(disk, "run_ours", lambda model, batch: next(runs) | cpu)
        samples, lengths = iter(fio), set()

        def read(folder, way, seconds):
            lengths.add(seconds)
            return next(samples) if way == best else fio[0] / 2

        monkeypatch.setattr(disk, "fio", read)
        monkeypatch.setattr(disk, "open_model", lambda model: Opened())
        monkeypatch.setattr(disk, "layer_folder", lambda opened: settings.folder)
        monkeypatch.setattr(disk.shutil, "which", lambda name: name)
        disk.disk(report := Report(), settings)
        assert lengths == {4}
        assert next(samples, None) is None
        return report, next(check for check in report.checks if check.name == "disk_of_fio")

    return measure


@pytest.mark.parametrize(
    "fio", [(3e9, 4e9, 5e9, 1e9, 2e9, 3e9), (1e9, 2e9, 3e9, 3e9, 4e9, 5e9)], ids=["sweep", "paired"]
)
def test_the_ceiling_is_the_better_median_of_fio(measure_disk, fio):
    report, check = measure_disk((2e9, 3e9, 4e9), fio)
    (row,) = rows_of(report, "ceiling")
    assert (row["gb_per_s"], row["our_gb_per_s"], row["samples"], row["huge_pages"]) == (4.0, 3.0, 3, True)
    assert (check.value, check.verdict) == (0.75, "missed")
    assert len(rows_of(report, "fio")) == len(disk.WAYS)
    assert "`fio` 4.00" in summary(report.rows)[1]


def test_a_ceiling_below_ours_is_none(measure_disk):
    _, check = measure_disk((5.1e9, 6e9, 7e9), (3e9, 4e9, 5e9, 1e9, 2e9, 3e9))
    assert (check.met, check.verdict) == (False, "the ceiling was not reached by fio")
    _, check = measure_disk((4.9e9, 6e9, 7e9), (3e9, 4e9, 5e9, 1e9, 2e9, 3e9))
    assert (check.value, check.verdict) == (1.5, "met")


# Overlap


def test_overlap_is_measured_where_computing_takes_half_as_long_as_fetching_and_as_long(settings, monkeypatch):
    def of_tokens(model, tokens, *, prefetch):
        fetch, compute = 64, 16 + tokens / 4
        return {
            "fetch": fetch,
            "compute": compute,
            "layer": max(fetch, compute) + (0 if prefetch else 8),
            "overlap": 1.0,
        }

    monkeypatch.setattr(overlap, "of_tokens", of_tokens)
    overlap.overlap(report := Report(), settings)
    half, balance = rows_of(report, "overlapped")
    assert (half["tokens"], balance["tokens"]) == (64, 176)
    assert half["hidden"] == 0.25
    assert balance["throughput"] == 1.0
    assert [check.name for check in report.checks] == [
        f"{what}_{point}" for point in ("half", "balance") for what in ("hidden", "throughput")
    ]


# Batch


def run_of(batch, compute):
    return {"seconds": [1.0, 4.0, 4.0], "fetch_seconds": 8.0, "compute_seconds": 2 * compute * batch, "peak": 1}


def test_the_curve_ends_where_computing_takes_twice_as_long(settings, monkeypatch):
    monkeypatch.setattr(curve, "run_ours", lambda model, cap, *, batch, **sizes: run_of(batch, 0.06))
    curve.curve(report := Report(), settings)
    assert [row["batch"] for row in rows_of(report, "curve")] == [1, 4, 16, 64, 128, 256]
    assert [row["batch"] for row in rows_of(report, "knee")] == [67]
    assert "computing takes as long as fetching at 67" in summary(report.rows)[0]
    pytest.importorskip("matplotlib")
    result = report.result()
    (axes,) = curve.draw_curves([result]).axes
    bound, ours, knee = axes.lines
    batches = np.array([1, 4, 16, 64, 128, 256])
    np.testing.assert_allclose(bound.get_ydata(), batches / np.maximum(4, 0.06 * batches))
    np.testing.assert_allclose(ours.get_ydata(), batches / 4)
    assert knee.get_label() == "compute = fetch at 67"
    peer = {"figure": "peer", "engine": "accelerate", "batch": 8, "seconds_a_pass": 4.0}
    left, right = curve.draw_curves([result, {**result, "rows": [*report.rows, peer]}]).axes
    assert [points.get_offsets().tolist() for points in right.collections] == [[[8.0, 2.0]]]
    assert not left.collections


# One commit


def test_each_part_says_of_which_commit_it_is(settings, monkeypatch):
    commits = itertools.count()
    monkeypatch.setattr(main, "commit", lambda: f"commit {next(commits)}")
    monkeypatch.setattr(main, "PARTS", {"a": lambda report, settings: None, "b": lambda report, settings: None})
    report = Report()
    for name in main.PARTS:
        main.run_part(name, report, settings, None)
    assert [row["commit"] for row in report.rows] == ["commit 0", "commit 1"]
