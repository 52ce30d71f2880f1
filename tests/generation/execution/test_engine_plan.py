"""A plan is plain data: what one process has decided, another runs."""

import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.execution.placement import plan_placement
from jaxinfer.generation.execution.plan import Plan, Way
from jaxinfer.models.devices import build_mesh
from jaxinfer.models.files.loading import open_model
from jaxinfer.sharding import MeshConfig
from jaxinfer.streaming.config import MemoryConfig
from tests.tiny import CONFIG as TINY
from tests.tiny import save_tiny

ROOT = Path(__file__).parents[3]
CONFIG = EngineConfig(max_batch=4, context=64, page_size=8, chunk_size=8, token_budget=32)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SCRIPT = """
import pickle, sys
from jaxinfer import SamplingParams
from jaxinfer.generation.api.build import build_engine
from jaxinfer.models.files.loading import load_model

config, plan = pickle.load(sys.stdin.buffer)
engine = build_engine(load_model(sys.argv[1]), None, config, plan)
(sequence,) = engine.prepare([1, 2, 3], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)).sequences()
for _ in engine.run([[sequence]]):
    pass
print(sequence.token_ids[3:], engine.scheduler.pages.count)
engine.close()
"""


def values(x):
    """All that a plan consists of."""
    if dataclasses.is_dataclass(x):
        return [leaf for field in dataclasses.fields(x) for leaf in values(getattr(x, field.name))]
    return [leaf for part in x for leaf in values(part)] if isinstance(x, tuple | list) else [x]


@pytest.mark.parametrize("way", Way)
def test_a_plan_is_plain_data(tmp_path, way):
    mesh = build_mesh(MeshConfig(pipeline=2) if way is Way.RING else None, None)[0]
    folder = save_tiny(tmp_path / "four", config=dataclasses.replace(TINY, layers=4))
    opened = open_model(folder, mesh=mesh)
    memory = MemoryConfig(weights="host" if way is Way.CHAIN else "device")
    plan = Plan.of_model(opened, CONFIG, num_pages=9, placement=plan_placement(opened, CONFIG, memory))
    assert plan.way is way
    assert plan.stages == (2 if way is Way.RING else 1)
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert {type(x) for x in values(plan)} <= {int, float, str, bool, type(None), Way}


def test_programs_take_as_many_chunks_as_fit(model_dir):
    plan = Plan.of_model(open_model(model_dir), CONFIG, max_chunks=2)
    assert plan.decoder_buckets.chunks == (1, 4)
    assert plan.pass_buckets == dataclasses.replace(plan.decoder_buckets, chunks=(1,))
    assert dataclasses.replace(plan, max_chunks=None).pass_buckets == plan.decoder_buckets


@pytest.mark.slow
def test_another_process_runs_a_plan(model_dir):
    with LLM(model_dir, max_batch=4, context=64, page_size=8) as llm:
        expected = llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids
        plan = llm._loaded.plan
        sent = pickle.dumps((llm.engine.config, plan))
    command = [sys.executable, "-c", SCRIPT, str(model_dir)]
    done = subprocess.run(command, input=sent, capture_output=True, cwd=ROOT, timeout=300, check=True)
    assert done.stdout.decode().split("\n")[0] == f"{expected} {plan.num_pages}"
