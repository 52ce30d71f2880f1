"""Every family against `transformers`, in float32, on every path that generation uses."""

import numpy as np
import pytest

from tests.models import goldens


def way_of_attending(name):
    """What differs in how a decoder reads its cache: positions, windows, caps, norms, and which heads share."""
    config = goldens.config_of(name)
    kinds = [kind.attention for kind in config.pattern if kind.has_attention]
    attention = kinds[0]
    return (
        bool(config.state_layers),
        config.learned_positions is not None,
        attention.positions.kind,
        frozenset(kind.window is not None for kind in kinds),
        attention.softcap is not None,
        attention.qk_norm and attention.qk_norm_scope,
        len({kind.scale for kind in kinds}) > 1,
        attention.group > 1,
    )


CHEAPEST_FIRST = sorted(
    goldens.DECODERS, key=lambda name: (name in goldens.EXPERTS, goldens.config_of(name).layers, name.endswith("plain"))
)
CACHED = {way_of_attending(name): name for name in reversed(CHEAPEST_FIRST)}
"""For each way of attending one decoder, which runs through the cache often; the others do without it."""


AWKWARD_LAST = sorted(goldens.DECODERS, key=lambda name: name.endswith("awkward"))
OF_FAMILIES = {goldens.read_config(name)["model_type"]: name for name in [*AWKWARD_LAST, *CACHED.values()]}
"""For each family one decoder, which runs with every change: through a cache if it is `CACHED`, else without."""


def decoders(often):
    """All decoders, of which those that do not run often are slow. All leaves of each are read often."""
    return [pytest.param(name, marks=[] if name in often else pytest.mark.slow) for name in goldens.DECODERS]


def close(actual, expected, name=""):
    """The same numbers. Where a delta rule's output is small, the norm after it makes its rounding errors large."""
    states = name in goldens.WITH_STATES
    np.testing.assert_allclose(actual, expected, atol=1e-3 if states else 1e-4, rtol=0)
    assert not states or np.median(np.abs(actual - expected)) < 1e-5


@pytest.mark.parametrize("name", goldens.NAMES)
def test_every_leaf_has_the_model_s_shape(name):
    golden = goldens.load(name)
    model = goldens.abstract(golden.config, goldens.WeightFormat())
    assert {leaf: array.shape for leaf, array in golden.leaves.items()} == goldens.leaf_shapes(model)


@pytest.mark.parametrize("name", decoders({*OF_FAMILIES.values()} - {*CACHED.values()}))
def test_decoder_without_cache(name):
    golden = goldens.load(name)
    logits, _ = goldens.forward_by_layers(*goldens.build(golden), golden.tokens, golden.positions)
    close(np.asarray(logits)[golden.positions >= 0], golden.expected, name)


@pytest.mark.parametrize("name", decoders(CACHED.values()))
def test_decoder_through_paged_cache(name):
    golden = goldens.load(name)
    close(goldens.through_cache(golden, goldens.build(golden), chunk=1), golden.expected, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", CACHED.values())
def test_decoder_in_chunks_through_paged_cache(name):
    golden = goldens.load(name)
    close(goldens.through_cache(golden, goldens.build(golden), chunk=7), golden.expected, name)


@pytest.mark.parametrize("name", goldens.ENCODERS)
def test_encoder(name):
    golden = goldens.load(name)
    real = golden.positions >= 0
    hidden, pooled = goldens.encode(*goldens.build(golden), golden.tokens, golden.positions, golden.token_types)
    close(np.asarray(hidden)[real], golden.expected)
    rows = np.split(golden.expected, np.cumsum(real.sum(axis=1))[:-1])
    means = np.stack([row.mean(axis=0) for row in rows])
    close(pooled, means / np.linalg.norm(means, axis=1, keepdims=True))


@pytest.mark.parametrize(
    "name", ["llama_linear", "gpt2_awkward", "opt_projected"]
)  # a tied table, an untied head, projections
def test_int8_stays_close(name):
    golden = goldens.load(name)
    logits, _ = goldens.forward(*goldens.build(golden, int8=True), golden.tokens, golden.positions)
    actual = np.asarray(logits)[golden.positions >= 0]
    error = np.sqrt(np.mean((actual - golden.expected) ** 2) / np.mean(golden.expected**2))
    assert 1e-4 < error < 0.05  # not float in disguise, and not broken
