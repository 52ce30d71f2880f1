"""A pass through the decoder in parts."""

import pytest
from flax import nnx

from jaxinfer.models import TokenRows
from tests.models import goldens


@pytest.mark.parametrize("name", ["gemma2_awkward", "opt_tied"])
def test_ranges_of_layers_make_the_whole_pass(name):
    """It is the same program."""
    golden = goldens.load(name)
    graph, state = goldens.build(golden)
    caches, page_table = goldens.empty_cache(golden.config, *golden.tokens.shape)
    groups = (TokenRows(golden.tokens, golden.positions, page_table),)

    def whole(state, groups, caches):
        return nnx.merge(graph, state).forward(groups, caches)

    def in_parts(state, groups, caches):
        model = nnx.merge(graph, state)
        x, forward_context = model.enter(groups)
        x, first_caches = model.run_layers(x, forward_context, caches[:1], first=0, last=0)
        x, other_caches = model.run_layers(x, forward_context, caches[1:], first=1)
        return model.leave(x, forward_context), first_caches + other_caches

    assert goldens.program(in_parts, state, groups, caches) == goldens.program(whole, state, groups, caches)
