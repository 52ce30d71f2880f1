"""`jaxinfer plan --devices --trace` as a user runs it."""

import json
import re

import pytest
from typer.testing import CliRunner

from jaxinfer.cli import app
from jaxinfer.evaluation.generation import fleet
from jaxinfer.sharding import read_mesh

MODEL = ("--model", "llama-3.1-8b", "--devices", "h200:1")
SLO = ("--slo", "ttft=500ms,tpot=50ms")


def run(*arguments, code=0):
    done = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done


@pytest.fixture(autouse=True)
def few_requests(monkeypatch):
    monkeypatch.setattr(fleet, "JUDGED", 40)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """A few requests without lengths, for few steps."""
    file = tmp_path_factory.mktemp("traces") / "trace.txt"
    file.write_text("# milliseconds\n" + "100\n" * 40)
    return file


def test_a_fleet_with_its_bill(trace, tmp_path):
    mesh = tmp_path / "mesh.toml"
    lengths = ("--prompt", 300, "--generate", 4)
    text = run(*MODEL, "--trace", trace, *SLO, "--rate", 2000, *lengths, "--price", 4, "--write", mesh).stdout
    title = "llama-3.1-8b (8.0B, 16 bits) on h200 for 2,000 requests/s of 300 + 4 tokens (means), 99% within ttft=500ms"
    assert title in " ".join(text.split())
    row = next(line for line in text.splitlines() if line.startswith(" data=1 "))
    count, spares, devices = map(int, re.match(r" data=1 +(\d+) \+ (\d+) +(\d+) ", row).groups())
    assert devices == count + spares
    assert spares >= 0
    bill = float(row.split()[-1])
    assert bill == pytest.approx(devices * 4 / 3600 / (2000 * 4) * 1e6, rel=0.01)
    assert float(row.split()[-2].rstrip("%")) >= 99
    assert read_mesh(mesh).mesh.tensor == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rate", 5), "--rate is only used with --devices"),
        ((*MODEL, "--trace", "TRACE"), "A fleet needs --slo too, such as --slo ttft=500ms,tpot=50ms."),
        ((*MODEL, *SLO), "A fleet needs --trace too"),
        ((*MODEL, "--trace", "TRACE", "--slo", "e2e=5s"), "--slo must be times such as"),
        ((*MODEL, "--trace", "TRACE", "--slo", "ttft=1s,ttft=2s"), "each once"),
        ((*MODEL, "--trace", "TRACE", *SLO, "--rate", 0), "--rate must be requests a second, > 0, got 0.0"),
        ((*MODEL, "--trace", "TRACE", *SLO, "--batch", 8), "does not take options of one batch: leave out --batch"),
        ((*MODEL, "--trace", "absent.csv", *SLO), "absent.csv cannot be read"),
        ((*MODEL, "--trace", "TRACE", "--slo", "tpot=1ms"), "no mesh keeps the objective"),
    ],
)
def test_what_is_wrong_is_named(trace, arguments, message):
    assert message in run(*[trace if each == "TRACE" else each for each in arguments], code=2).stderr


def test_traces_that_say_all_or_too_little(tmp_path):
    lines = [{"arrival": at, "prompt_tokens": 8, "output_tokens": 2} for at in (0.0, 1.0)]
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert (
        "has the lengths of its requests; leave --prompt out"
        in run(*MODEL, "--trace", file, *SLO, "--prompt", 8, code=2).stderr
    )
    file.write_text(json.dumps(lines[0]) + "\n")
    assert "all requests arrive at once" in run(*MODEL, "--trace", file, *SLO, code=2).stderr
