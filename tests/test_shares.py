"""Shares of the slow tests, as `make slow-share` selects them: each test is in one, but soaks, which are in none."""

import itertools
import re
import subprocess
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest

def test_quick():
    pass

@pytest.mark.slow
@pytest.mark.parametrize("number", range(10))
def test_slow(number):
    pass

@pytest.mark.slow
@pytest.mark.soak
def test_soak():
    pass

@pytest.mark.slow
@pytest.mark.gpu
def test_gpu():
    pass
"""


@pytest.fixture
def collect(pytester, monkeypatch):
    """Names of the tests that pytest selects with some options, and what it says."""
    monkeypatch.setenv("XLA_FLAGS", "")  # to which the conftest adds
    pytester.makeconftest((ROOT / "tests/conftest.py").read_text())
    pytester.makepyprojecttoml((ROOT / "pyproject.toml").read_text().replace('["tests"]', '["."]'))
    pytester.makepyfile(test_some=TESTS)

    def collect(*options):
        done = pytester.runpytest_inprocess("--collect-only", "-q", *options)
        return [line.partition("::")[2] for line in done.outlines if "::" in line], done

    return collect


def test_every_slow_test_is_in_one_share(collect):
    made = subprocess.run(["make", "--dry-run", "slow-share"], cwd=ROOT, capture_output=True, text=True, check=True)
    (expression,) = re.findall(r"-m '(.+)' --share", made.stdout)
    (count,) = re.findall(r"% (\d+) \+ 1\)\)/\1$", made.stdout, re.MULTILINE)
    assert int(count) > 1
    shares = [collect("-m", expression, "--share", f"{k}/3")[0] for k in (1, 2, 3)]
    assert sorted(len(share) for share in shares) == [3, 3, 4]
    assert sorted(itertools.chain(*shares)) == sorted(f"test_slow[{i}]" for i in range(10))


@pytest.mark.parametrize("share", ["0/2", "3/2", "2", "1/2/3"])
def test_a_share_that_is_none_is_refused(collect, share):
    _, done = collect("--share", share)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines([f"*--share is K/N with 1 <= K <= N, like 2/5, got '{share}'.*"])
