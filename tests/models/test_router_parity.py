"""Routers with the rule that a family's config has, against those of `transformers` (`make_router_goldens.py`)."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open

from jaxinfer.models.config import GroupScore, RouterConfig, RouterKind
from jaxinfer.models.families import FAMILIES
from jaxinfer.models.layers.moe import Router
from tests.models import goldens

NOT_IMPLEMENTED = {  # as families, for their attention
    "deepseek_v2": RouterConfig(experts=8, experts_per_token=3, normalize=False, scale=16.0),
    "deepseek_v2_groups": RouterConfig(
        experts=8, experts_per_token=3, normalize=False, scale=16.0, groups=4, groups_per_token=2
    ),
    "deepseek_v3": RouterConfig(
        experts=8,
        experts_per_token=3,
        kind=RouterKind.SIGMOID,
        scale=2.5,
        selection_bias=True,
        groups=4,
        groups_per_token=2,
        group_score=GroupScore.TOP_2_SUM,
    ),
}
FILE = goldens.DIRECTORY / "routers.safetensors"
with safe_open(FILE, "np") as file:
    FIELDS = file.metadata()
    TENSORS = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
CASES = sorted({name.rpartition("/")[0] for name in TENSORS})


def rule_of(name: str) -> RouterConfig:
    fields = json.loads(FIELDS[name])
    if name in NOT_IMPLEMENTED:
        return NOT_IMPLEMENTED[name]
    return FAMILIES[fields["model_type"]].config(fields).layer(-1).mlp.moe.router


def test_every_family_with_experts_is_compared():
    shared = {  # relatives of granitemoe, of glm4_moe, of qwen3_moe and of mixtral with the same router
        *("granitemoeshared", "minimax_m2", "exaone_moe", "hy_v3", "solar_open", "mellum", "hunyuan_v1_moe", "afmoe"),
        *("qwen3_5_moe", "qwen3_next", "gemma4"),  # the last with a factor for each expert
    }
    assert {goldens.read_config(name)["model_type"] for name in goldens.EXPERTS} - shared <= FIELDS.keys()


@functools.partial(jax.jit, static_argnums=0)
def route(rule: RouterConfig, weight, bias):
    """The routing of all tokens, whose logits are the columns of the router's matrix, and of the first one alone."""
    router = nnx.eval_shape(lambda: Router(12, rule, rngs=nnx.Rngs(0)))
    router.weight.set_value(weight)
    if rule.selection_bias:
        router.selection_bias.set_value(bias)
    return router(jnp.eye(12), None), router(jnp.eye(12)[:1], None)  # one token: fewer than experts


@pytest.mark.parametrize("case", CASES)
def test_experts_and_weights_are_those_of_transformers(case):
    """Of experts that tie, any may be chosen; one whose logit is NaN is as unlikely as any can be."""
    weight = TENSORS[f"{case}/weight"]
    if case.endswith("/nan"):
        weight = np.where(weight < -1e38, np.nan, weight)
    for routing in route(rule_of(case.partition("/")[0]), weight, TENSORS.get(f"{case}/bias")):
        tokens = len(routing.experts)
        chosen = np.zeros((tokens, 8), np.float32)
        np.put_along_axis(chosen, np.asarray(routing.experts), np.asarray(routing.weights), axis=1)
        expected = TENSORS[f"{case}/chosen"][:tokens]
        if case.endswith("/one"):
            assert int(routing.sizes.max()) == tokens
        if case.endswith("/ties"):
            chosen, expected = np.sort(chosen), np.sort(expected)
        np.testing.assert_allclose(chosen, expected, rtol=2e-5, atol=1e-12)
