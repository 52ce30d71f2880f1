"""What a step has the devices do is decided on the host, and any executor of the same model can do it."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams, StructuredOutputsParams
from jaxinfer.generation.engine.protocols import InFlightStep
from jaxinfer.generation.execution.programs.admit import Admit
from jaxinfer.generation.execution.programs.copy_pages import CopyPages
from jaxinfer.generation.execution.programs.passes import Pass
from jaxinfer.generation.execution.programs.place_adapter import PlaceAdapter
from jaxinfer.generation.execution.programs.ring import Ring
from jaxinfer.sharding import MeshConfig
from tests.generation.sampled import SIZES
from tests.peft import random_pair, save_adapter
from tests.tiny import CONFIG, save_tiny

pytestmark = pytest.mark.xdist_group("ways")

PROMPTS = [[5, 6, 7, 8, 9] * 4, [7, 3, 250, 9], [5] * 9]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, logit_bias=dict.fromkeys((5, 6, 7, 8, 9), 6.0)),
    SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=6, adapter="a"),
    SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(regex="[a-f]{4}[0-9]+"), max_tokens=8),
]


STREAMED = {"weights": "host", "num_speculative_tokens": 3}
IN_STAGES = {"mesh": MeshConfig(pipeline=2), "num_speculative_tokens": 3}


def two_engines(model_dir, tmp_path, options):
    pair = random_pair(CONFIG.embed, CONFIG.embed, 3, np.random.default_rng(0))
    adapters = {"a": save_adapter(tmp_path / "a", {"model.layers.0.self_attn.q_proj": pair})}
    return (LLM(model_dir, adapters=adapters, **SIZES, **options) for _ in range(2))


@pytest.mark.parametrize(
    "options", [{}, *(pytest.param(options, marks=pytest.mark.slow) for options in (STREAMED, IN_STAGES))], ids=str
)
def test_commands_of_one_executor_run_on_another(ways, model_dir, tmp_path, monkeypatch, options):
    if options is IN_STAGES:  # each of them has layers of both kinds
        model_dir = save_tiny(tmp_path / "four", config=dataclasses.replace(CONFIG, layers=4))
    if options:
        first, second = two_engines(model_dir, tmp_path, options)
    else:
        first, second = ways.make(), ways.make()
        for llm in (first, second):
            llm.engine.executor.device.cache = ways["whole"].engine.executor.programs
    executor, other = first.engine.executor, second.engine.executor
    run, collect, recorded = executor.run, executor.collect, []

    def recording(commands):
        recorded.append(commands)
        return run(commands)

    def comparing(step):
        """Run the step's commands on the other executor."""
        output, commands = collect(step), recorded.pop(0)
        assert not any(isinstance(x, jax.Array) for command in commands for x in jax.tree.leaves(command.inputs))
        kinds.update(type(command.sizes) for command in commands)
        again = other.collect(InFlightStep(step.batch, (step.output[0], other.run(commands)), launched=0.0))
        tokens.extend(one.token_ids for one in output.outputs)
        assert [list(one.token_ids) for one in again.outputs] == [list(one.token_ids) for one in output.outputs]
        return output

    kinds, tokens = set(), []
    monkeypatch.setattr(executor, "run", recording)
    monkeypatch.setattr(executor, "collect", comparing)
    outputs = first.generate(PROMPTS, PARAMS)
    assert kinds == {Admit, CopyPages, PlaceAdapter, Ring if options is IN_STAGES else Pass}
    assert sum(map(len, tokens)) == sum(len(c.token_ids) for output in outputs for c in output.outputs)
