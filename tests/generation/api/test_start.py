"""Starting: a second process traces no program, and says what it compiles."""

import json
import subprocess
import sys

PROGRAM = """
import collections, json, sys
import jax

traced, compiled = collections.Counter(), collections.Counter()

def listen(event, seconds, **details):
    if event == "/jax/core/compile/jaxpr_trace_duration":
        traced[details["fun_name"]] += 1
    if event == "/jax/core/compile/backend_compile_duration":
        compiled[details["fun_name"]] += 1

jax.monitoring.register_event_duration_secs_listener(listen)
from jaxinfer import LLM, SamplingParams

llm = LLM(sys.argv[1], context=64, max_batch=2, **json.loads(sys.argv[2]))
outputs = llm.generate(["one", "two and three"], SamplingParams(temperature=0, max_tokens=4))
programs = {program.name: program.kept for program in llm.engine.executor.programs}
ids = [output.outputs[0].token_ids for output in outputs]
print(json.dumps({"traced": traced, "compiled": compiled, "programs": programs, "ids": ids}))
"""


def start(model_dir, **options):
    """What a process traced and compiled, and what it generated."""
    command = [sys.executable, "-c", PROGRAM, str(model_dir), json.dumps(options)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_a_warm_start_traces_and_compiles_nothing(model_dir):
    first, second = start(model_dir), start(model_dir)
    assert second["ids"] == first["ids"]
    assert second["traced"] == second["compiled"] == {}
    assert second["programs"].keys() == {"admit", "copy_pages", "prefill", "decode"}
    assert all(second["programs"].values())
