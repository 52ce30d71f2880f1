"""On a GPU: `pytest -m gpu`."""

import jax
import pytest

from jaxinfer.generation import LLM, SamplingParams
from jaxinfer.sharding import MeshConfig

PROMPTS = [[1, 2, 3], list(range(60))]


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"quantize": "int8"}], ids=["float32", "int8"])
def test_a_gpu_generates_what_the_cpu_does(model_dir, options):
    assert jax.default_backend() == "gpu", "no GPU: install jaxinfer[cuda12] on a machine that has one"
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    cpu = MeshConfig().build(jax.devices("cpu")[:1])
    with jax.default_matmul_precision("float32"):  # not TF32
        here, there = (LLM(model_dir, mesh=mesh, max_batch=2, **options) for mesh in (None, cpu))
        outputs = [[o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)] for llm in (here, there)]
    assert outputs[0] == outputs[1]
