"""A pass through the decoder in parts."""

import jax
import numpy as np
import pytest
from flax import nnx

from jaxinfer.models import Decoder, TokenRows
from tests.models import goldens


@pytest.mark.parametrize("name", ["gemma2_awkward", "opt_tied"])
def test_ranges_of_layers_make_the_whole_pass(name):
    golden = goldens.load(name)
    model = nnx.merge(*goldens.build(golden))
    assert isinstance(model, Decoder)
    caches, page_table = goldens.empty_cache(golden.config, *golden.tokens.shape)
    groups = (TokenRows(golden.tokens, golden.positions, page_table),)
    whole, new_caches = model.forward(groups, caches)
    x, forward_context = model.enter(groups)
    x, first_caches = model.run_layers(x, forward_context, caches[:1], first=0, last=0)
    x, other_caches = model.run_layers(x, forward_context, caches[1:], first=1)
    np.testing.assert_array_equal(whole[0], model.leave(x, forward_context)[0])
    jax.tree.map(np.testing.assert_array_equal, new_caches, first_caches + other_caches)
