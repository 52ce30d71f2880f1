"""Starting: the first process says what it compiles, the second traces nothing, whoever else starts or is killed."""

import dataclasses
import json
import os
import signal
import subprocess
import sys

import pytest

from jaxinfer import LLM, SamplingParams
from tests.tiny import CONFIG, save_tiny

PROGRAM = """
import collections, json, os, sys
import jax

traced, compiled = collections.Counter(), collections.Counter()

def listen(event, seconds, **details):
    if event == "/jax/core/compile/jaxpr_trace_duration":
        traced[details["fun_name"]] += 1
    if event == "/jax/core/compile/backend_compile_duration":
        compiled[details["fun_name"]] += 1

jax.monitoring.register_event_duration_secs_listener(listen)
from jaxinfer import LLM, SamplingParams

told = {}  # what -> how far it came, and the total

def tell(what, done, total):
    told[what] = done, total

def run():
    llm = LLM(sys.argv[1], context=64, max_batch=1, token_budget=16, chunk_size=16, progress=tell)
    outputs = llm.generate(["one", "two and three"], SamplingParams(temperature=0, max_tokens=4))
    programs = {program.name: program.kept for program in llm.engine.executor.programs}
    return [output.outputs[0].token_ids for output in outputs], programs

before, traced_before = None, None
if "AGAIN" in os.environ:  # the same in one process
    before, _ = run()
    traced_before = dict(traced)
    traced.clear()
    jax.clear_caches()
ids, programs = run()
heavy = [name for name in ("flax", "jax.experimental.pallas.mosaic_gpu") if name in sys.modules]
print(
    json.dumps(
        {
            "before": before, "traced_before": traced_before, "traced": traced, "compiled": compiled,
            "programs": programs, "ids": ids, "heavy": heavy, "told": told,
        }
    )
)
"""
PROGRAMS = {"admit", "copy_pages", "prefill", "decode"}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A model of one layer: every process here compiles or loads its programs."""
    return save_tiny(tmp_path_factory.mktemp("models") / "thin", config=dataclasses.replace(CONFIG, layers=1))


def start(model_dir, cache, *, stderr=None, **variables):
    """A process that generates from the model."""
    command = [sys.executable, "-c", PROGRAM, str(model_dir)]
    environment = {**os.environ, "JAXINFER_CACHE": str(cache), **variables}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True)


def ended(process):
    """What a process traced, compiled and generated."""
    output, _ = process.communicate()
    assert process.returncode == 0
    return json.loads(output)


def test_the_first_start_says_what_it_does_and_the_second_traces_nothing(model_dir, tmp_path):
    first, second = ended(start(model_dir, tmp_path)), ended(start(model_dir, tmp_path))
    assert first["told"].keys() >= {"loading weights", "compiling programs"}
    assert all(done == total for done, total in first["told"].values())
    assert second["ids"] == first["ids"]
    assert first["traced"]
    assert second["traced"] == second["compiled"] == {}
    assert second["programs"] == dict.fromkeys(PROGRAMS, True)
    assert not second["heavy"]


@pytest.mark.slow
def test_without_a_compiler(model_dir, tmp_path):
    """It generates, says so once, and the next engine of such a machine traces nothing."""
    environment = {"CXX": "no-such-compiler", "JAXINFER_CPU_LIBRARY": "unmeasured", "AGAIN": "1"}
    with (tmp_path / "log").open("w") as log:
        found = ended(start(model_dir, tmp_path, stderr=log, **environment))
    assert found["programs"] == dict.fromkeys(PROGRAMS, True)
    assert (tmp_path / "log").read_text().count("XLA runs instead of CPU kernels") == 1
    assert found["before"] == found["ids"]
    assert found["traced_before"]
    assert not found["traced"]


EDITED = """
@dataclasses.dataclass(frozen=True)
class Boost:
    token: int

    def __call__(self, scores, history, length):
        return scores.at[:, self.token].add(BOOST)
"""


@pytest.mark.slow
def test_a_logits_processor_that_was_edited_is_the_one_that_runs(model_dir, tmp_path, monkeypatch):
    """Its class and its fields are what they were; only the body of the method is another."""
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path))
    params = SamplingParams(temperature=0, max_tokens=1, logits_processors=("boost",), ignore_eos=True)
    found = []
    for boost in (1000.0, -1000.0):
        defined = {"dataclasses": dataclasses, "BOOST": boost, "__name__": "edited"}
        exec(EDITED, defined)
        llm = LLM(
            model_dir,
            context=64,
            max_batch=1,
            token_budget=16,
            chunk_size=16,
            logits_processors={"boost": defined["Boost"](5)},
        )
        found += llm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids
    assert found[0] == 5 != found[1]


@pytest.mark.slow
def test_ten_processes_start_on_an_empty_cache(model_dir, tmp_path):
    found = [ended(process) for process in [start(model_dir, tmp_path) for _ in range(10)]]
    assert len({json.dumps(one["ids"]) for one in found}) == 1
    last = ended(start(model_dir, tmp_path))
    assert last["ids"] == found[0]["ids"]
    assert not last["traced"]


@pytest.mark.slow
def test_a_start_that_is_killed_harms_none_after_it(model_dir, tmp_path):
    for wanted in range(1, 6):
        process = start(model_dir, tmp_path)
        folder = tmp_path / "executables"
        while process.poll() is None and not (folder.exists() and len(os.listdir(folder)) >= wanted):
            pass
        process.send_signal(signal.SIGKILL)
        process.communicate()
    first, second = ended(start(model_dir, tmp_path)), ended(start(model_dir, tmp_path))
    assert second["ids"] == first["ids"]
    assert not second["traced"]
