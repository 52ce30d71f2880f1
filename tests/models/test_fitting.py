"""A model fitted to a mesh has sizes that divide, and gives what the original gives."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.checkpoints import Leaf
from jaxinfer.models import WeightFormat
from jaxinfer.models.config import MoeConfig, RouterConfig
from jaxinfer.models.fitting import fit
from jaxinfer.models.leaves import canonical_leaves
from jaxinfer.sharding import MeshConfig, ShardingRules
from tests.tiny import CONFIG

FLOAT, INT4 = WeightFormat(), WeightFormat(quantized="int4")


def fitted(config, tensor=1, *, weights=FLOAT, rules=None, stored=None, **mesh):
    mesh = MeshConfig(tensor=tensor, **mesh).abstract()
    return fit(config, weights, mesh, rules or ShardingRules(), stored=stored)


def with_heads(q_heads, kv_heads, **changes):
    return CONFIG.with_attention(q_heads=q_heads, kv_heads=kv_heads, head_dim=8, **changes)


@pytest.mark.parametrize(
    ("heads", "tensor", "expected"),
    [
        ((8, 8), 4, (8, 8)),
        ((25, 25), 2, (26, 26)),  # GPT-2 XL
        ((9, 3), 2, (12, 4)),  # SmolLM: one empty KV head is cheaper than copies
        ((28, 4), 8, (32, 8)),  # Qwen2.5 7B: each KV head twice, with four of its seven queries
        ((32, 1), 4, (32, 4)),  # multi-query: a copy each
        ((64, 8), 8, (64, 8)),
        ((14, 2), 4, (16, 4)),
    ],
)
def test_heads(heads, tensor, expected):
    attention = fitted(with_heads(*heads), tensor).config.layer(0).attention
    assert (attention.q_heads, attention.kv_heads) == expected


@given(kv_heads=st.integers(1, 9), group=st.integers(1, 9), tensor=st.sampled_from([1, 2, 3, 4, 8]))
def test_any_heads_divide_and_keep_their_keys_and_slopes(kv_heads, group, tensor):
    config = with_heads(kv_heads * group, kv_heads)
    fitting = fitted(config, tensor)
    new, old = fitting.config.layer(0).attention, config.layer(0).attention
    assert new.kv_heads % tensor == 0
    width, new_width = old.group + 2, new.group + 2
    # Number every row of qkv by its head, and follow each query head to its key and value.
    rows = fitting.take("layers.0.attention.qkv", np.arange(1, kv_heads * width + 1).repeat(8), 0)[::8].reshape(
        new.kv_heads, new_width
    )
    outs = fitting.take("layers.1.attention.out", np.arange(1, old.q_heads + 1).repeat(8), 0)[::8].reshape(
        new.kv_heads, new.group
    )
    seen = []
    for head in range(new.kv_heads):
        for index, query in enumerate(outs[head]):
            slope = new.slopes[head * new.group + index]
            if query == 0:
                assert rows[head, index] == 0
                continue
            seen.append(query)
            kv_head, place = divmod(query - 1, old.group)
            assert rows[head, index] == kv_head * width + place + 1
            assert list(rows[head, -2:]) == [kv_head * width + old.group + 1, kv_head * width + old.group + 2]
            assert slope == old.slopes[query - 1]
    assert sorted(seen) == list(range(1, old.q_heads + 1))  # each once: what leaves is a sum over heads
    keys, real = rows[:, -2], new.kv_heads if new.real_kv_heads is None else new.real_kv_heads
    assert all(keys[:real])
    assert not any(keys[real:])
    assert len(set(np.bincount(keys[:real])[old.group + 1 :: width])) == 1  # as many copies of each


def test_hidden_width_and_vocabulary_are_padded():
    config = CONFIG.with_mlp(hidden=50)
    fitting = fitted(config, 4)
    assert (fitting.config.layer(0).mlp.hidden, fitting.config.vocab, fitting.config.vocab_rows) == (52, 257, 384)
    assert list(fitting.take("layers.0.mlp.gate_up", np.ones(100), 0)) == [1] * 100 + [0] * 4  # gate and up alternate
    assert list(fitting.take("layers.0.mlp.down", np.ones(50), 0)) == [1] * 50 + [0] * 2
    assert fitting.take("head", np.ones((257, 2)), 0).sum() == 514


MOE = MoeConfig(router=RouterConfig(experts=6, experts_per_token=2), shared_hidden=10)
MIXED = CONFIG.with_mlps((CONFIG.layer(0).mlp, dataclasses.replace(CONFIG.layer(0).mlp, hidden=7, moe=MOE)))


def test_experts_shared_and_dense_mlps_are_padded_each_for_itself():
    mesh = MeshConfig(data=3, expert=2, tensor=2).abstract()
    fitting = fit(MIXED, FLOAT, mesh, ShardingRules())
    dense, mixture = (fitting.config.layer(layer).mlp for layer in (0, 1))
    assert (dense.hidden, mixture.hidden, mixture.moe.shared_hidden) == (CONFIG.layer(0).mlp.hidden, 8, 12)
    assert mixture.moe.router == MOE.router
    down = Leaf((6, 32, 7), "float32", ("experts", "embed", "expert_mlp"))
    *whole, take = fitting.of_leaf("layers.1.mlp.experts.down.weight", down)
    assert (whole, list(take)) == ([None, None], [*range(7), -1])
    *whole, take = fitting.of_leaf("layers.1.mlp.experts.down.weight@5", down.part)  # one expert
    assert (whole, list(take)) == ([None], [*range(7), -1])
    assert len(fitting.take("layers.1.mlp.shared.gate_up", np.ones(20), 0)) == 24
    assert len(fitting.take("layers.0.mlp.gate_up", np.ones(5), 0)) == 5  # it divides
    assert fitting.size("layers.1.mlp.experts.gate_up") == 16


def test_experts_that_do_not_divide_are_refused():
    with pytest.raises(
        ValueError, match="mesh data=2, expert=2: the 6 experts of layer 1 do not divide over data x"
    ) as e:
        fit(MIXED, FLOAT, MeshConfig(data=2, expert=2).abstract(), ShardingRules())
    assert "data x expert = 4 devices. The nearest that works is 3; or keep all" in str(e.value)
    rules = ShardingRules(experts=None)
    assert (
        fit(MIXED, FLOAT, MeshConfig(data=2, expert=2).abstract(), rules).config.layer(1).mlp.moe.router == MOE.router
    )


def test_an_exchange_of_experts_that_a_model_has_not_is_refused():
    with pytest.raises(ValueError, match="exchange='pcc' is for a mixture of experts, and this model is dense"):
        fitted(CONFIG, 2, rules=ShardingRules(exchange="pcc"))


def test_rules_say_what_is_split():
    fitting = fitted(CONFIG, 4, rules=ShardingRules(vocab=None, heads=None, kv_heads=None))
    assert fitting.config == CONFIG
    assert not fitting.takes
    assert fit(CONFIG, FLOAT, None, ShardingRules()).config is CONFIG


def test_int4_groups_stay_whole():
    config = CONFIG.with_attention(q_heads=6, kv_heads=6, head_dim=64).with_mlp(hidden=384)
    fitting = fitted(config, 2, weights=INT4, stored="int4")
    assert fitting.config.layer(0).mlp.hidden == 512  # two groups on each device
    assert fitting.config.layer(0).attention.q_heads == 8
    words, scales = Leaf((32, 96), "uint16", ("embed", "mlp")), Leaf((3, 32), "bfloat16", ("mlp", "embed"))
    assert fitting.of_leaf("layers.0.mlp.down.weight", words)[0] is None
    assert list(fitting.of_leaf("layers.0.mlp.down.weight", words)[1]) == [*range(96)] + [-1] * 32
    assert list(fitting.of_leaf("layers.0.mlp.down.scale", scales)[0]) == [0, 1, 2, -1]


def test_int4_groups_that_heads_would_share_are_refused():
    config = CONFIG.with_attention(q_heads=6, kv_heads=2, head_dim=64)
    with pytest.raises(
        ValueError,
        match=r"tensor=4: layers\.0\.attention\.out: int4 has one scale .* nearest .* 3 ways",
    ):
        fitted(config, 4, weights=INT4, stored="int4")
    assert fitted(config, 4, weights=INT4).config.layer(0).attention.kv_heads == 4  # quantised after fitting


def test_a_quantised_matrix_keeps_its_format():
    """int4 needs groups of 128 inputs; a matrix stored in int8 for lack of them must not get them by padding."""
    config = CONFIG.with_mlp(hidden=1278)
    assert fitted(config, 4, weights=INT4).config.layer(0).mlp.hidden == 1284


def test_heads_that_lack_a_whole_group_for_int4():
    """SmolLM's 9 heads of 64 are stored in int8; any even number of them would be whole groups, and so int4."""
    config = CONFIG.with_attention(q_heads=9, kv_heads=3, head_dim=64)
    with pytest.raises(ValueError, match=r"attention.out is int8 for want of whole groups .* nearest .* 3 ways"):
        fitted(config, 4, weights=INT4)
    assert fitted(config, 3, weights=INT4).config.layer(0).attention.q_heads == 9
    with pytest.raises(ValueError, match=r"mlp.down is int8 for want .* nearest that works is 127 ways"):
        fitted(CONFIG.with_mlp(hidden=100), 128, weights=INT4, rules=ShardingRules(heads=None, kv_heads=None))


# Mixtures of experts


def with_experts(hidden=50, *, dense=None, shared=0, experts=8, layers=2):
    """A mixture of experts; its first layer is dense if that has a width."""
    router = RouterConfig(experts=experts, experts_per_token=2)
    moe = dataclasses.replace(CONFIG.layer(0).mlp, hidden=hidden, moe=MoeConfig(router=router, shared_hidden=shared))
    first = moe if dense is None else dataclasses.replace(CONFIG.layer(0).mlp, hidden=dense)
    return dataclasses.replace(CONFIG, layers=layers).with_mlps((first, *[moe] * (layers - 1)))


def numbered(shape):
    return np.arange(1, np.prod(shape) + 1).reshape(shape)


def by_takes(fitting, name, stored, array):
    """A leaf, fitted as loading does it."""
    for dim, take in enumerate(fitting.of_leaf(name, stored)):
        if take is not None:
            shape = [-1 if at == dim else 1 for at in range(array.ndim)]
            array = np.take(array, np.maximum(take, 0), axis=dim) * (take >= 0).reshape(shape)
    return array


@settings(max_examples=12)  # leaves of a new config take long to describe
@given(
    st.integers(1, 60),
    st.integers(1, 60),
    st.integers(0, 60),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2]),
)
def test_any_widths_of_experts_divide_each_by_its_own_ways(hidden, dense, shared, expert, tensor, data):
    if data * expert > 8:
        return
    config, mesh = with_experts(hidden, dense=dense, shared=shared), {"data": data, "expert": expert, "tensor": tensor}
    fitting = fitted(config, **mesh)
    rules, mesh = ShardingRules(), MeshConfig(**mesh).abstract()
    first, second = (fitting.config.layer(layer).mlp for layer in range(2))
    assert first.hidden == -(-dense // (expert * tensor)) * expert * tensor
    assert second.hidden == -(-hidden // tensor) * tensor
    assert second.moe.shared_hidden == -(-shared // (expert * tensor)) * expert * tensor
    assert second.moe.router == config.layer(1).mlp.moe.router
    stored, leaves = canonical_leaves(config, FLOAT), canonical_leaves(fitting.config, FLOAT)
    for name, leaf in leaves.items():
        rules.sharding(mesh, leaf.axes, leaf.shape)
        if ".mlp." in name:  # what is stored comes first, and zeros follow
            array = numbered(stored[name].shape)
            padding = [(0, new - old) for new, old in zip(leaf.shape, array.shape, strict=True)]
            np.testing.assert_array_equal(by_takes(fitting, name, stored[name], array), np.pad(array, padding))


def test_int4_groups_of_experts_stay_whole():
    config = with_experts(hidden=384, dense=640, shared=256)
    fitting = fitted(config, 2, expert=2, weights=INT4, stored="int4")
    first, second = (fitting.config.layer(layer).mlp for layer in range(2))
    assert (first.hidden, second.hidden, second.moe.shared_hidden) == (1024, 512, 512)
    stored, leaves = canonical_leaves(config, INT4), canonical_leaves(fitting.config, INT4)
    down = "layers.1.mlp.experts.down"
    scale, weight = (fitting.of_leaf(f"{down}.{part}", stored[f"{down}.{part}"]) for part in ("scale", "weight"))
    assert (scale[0], weight[0], list(scale[1])) == (None, None, [0, 1, 2, -1])
    assert list(weight[2]) == [*range(96)] + [-1] * 32
    assert leaves[f"{down}.weight"].shape == (8, CONFIG.embed, 128)
