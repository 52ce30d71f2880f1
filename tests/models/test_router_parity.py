"""Routers with the rule that a family's config has, against those of `transformers` (`make_router_goldens.py`)."""

import json

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
    return FAMILIES[fields["model_type"]].config(fields).mlp.moe.router


def test_every_family_with_experts_is_compared():
    shared = {"granitemoeshared"}  # a relative with the same router
    assert {goldens.read_config(name)["model_type"] for name in goldens.EXPERTS} - shared <= FIELDS.keys()


def route(case: str, tokens: int):
    """The routing of the first tokens, whose logits are the columns of the router's matrix."""
    rule = rule_of(case.partition("/")[0])
    router = Router(12, rule, rngs=nnx.Rngs(0))
    weight = TENSORS[f"{case}/weight"]
    if case.endswith("/nan"):
        weight = np.where(weight < -1e38, np.nan, weight)
    router.weight[...] = jnp.asarray(weight)
    if rule.selection_bias:
        router.selection_bias[...] = jnp.asarray(TENSORS[f"{case}/bias"])
    return router(jnp.eye(12)[:tokens], None)


@pytest.mark.parametrize("tokens", [12, 1])  # one token: fewer than experts
@pytest.mark.parametrize("case", CASES)
def test_experts_and_weights_are_those_of_transformers(case, tokens):
    """Of experts that tie, any may be chosen; one whose logit is NaN is as unlikely as any can be."""
    routing = route(case, tokens)
    chosen = np.zeros((tokens, 8), np.float32)
    np.put_along_axis(chosen, np.asarray(routing.experts), np.asarray(routing.weights), axis=1)
    expected = TENSORS[f"{case}/chosen"][:tokens]
    if case.endswith("/one"):
        assert int(routing.sizes.max()) == tokens
    if case.endswith("/ties"):
        chosen, expected = np.sort(chosen), np.sort(expected)
    np.testing.assert_allclose(chosen, expected, rtol=2e-5, atol=1e-12)
