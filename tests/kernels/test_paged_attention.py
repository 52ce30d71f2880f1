"""Paged attention, tiled and gathered, against `attention` over the same keys, contiguous."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.compiled.target import Target
from jaxinfer.pallas_kernels import KVPages, attention, paged_attention, write_pages
from jaxinfer.pallas_kernels.attention.reference import paged_attention as paged_attention_reference
from jaxinfer.pallas_kernels.target import targeting
from tests.kernels.stale import with_stale_slots

SIZE, HEADS, DIM, SCALE = 16, 4, 8, 0.4
ALIBI = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
OPTIONS = {
    "plain": {},
    "window": {"window": 40},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi": ALIBI},
    "all": {"window": 150, "softcap": 1.5, "alibi": ALIBI},
}


class Case(NamedTuple):
    """Queries over ragged rows, whose pages are shuffled among pages with unrelated keys."""

    q: jax.Array
    pages: KVPages
    page_table: jax.Array
    positions: jax.Array
    k: jax.Array
    v: jax.Array


@functools.cache
def make_case(rows: int, tokens: int, *, kv_heads=1, width=20, dtype=np.float32, int8=False, seed=0) -> Case:
    """Rows of `tokens` queries each, at the end of contexts of random lengths up to `width` pages."""
    rng = np.random.default_rng(seed)
    num_pages = rows * width + 3
    page_table = jnp.asarray(rng.permutation(num_pages)[: rows * width].reshape(rows, width), jnp.int32)
    shapes = KVPages.shapes(num_pages, SIZE, kv_heads, DIM, np.dtype(dtype), int8=int8)
    stale = jax.tree.map(lambda x: jnp.asarray(rng.integers(-9, 9, x.shape), x.dtype), shapes)
    k, v = (jnp.asarray(x, dtype) for x in rng.normal(size=(2, rows, width * SIZE, kv_heads, DIM)))
    new_k, new_v = (x.reshape(-1, kv_heads, DIM) for x in (k, v))
    pages = jax.jit(write_pages)(
        stale, new_k, new_v, jnp.repeat(page_table, SIZE), jnp.tile(jnp.arange(SIZE), rows * width)
    )
    first = rng.integers(0, width * SIZE - tokens + 1, rows)
    positions = jnp.asarray(first[:, None] + np.arange(tokens), jnp.int32)
    return Case(jnp.asarray(rng.normal(size=(rows, tokens, HEADS, DIM)), dtype), pages, page_table, positions, k, v)


def run(function, *args, **options) -> np.ndarray:
    result = jax.jit(functools.partial(function, scale=SCALE, **options))(*args)
    assert result.dtype == args[0].dtype
    return np.asarray(result, np.float32)


def check(case: Case, atol: float, **options):
    lengths = jnp.full(len(case.k), case.k.shape[1])
    expected = run(attention, case.q, case.k, case.v, case.positions, lengths, **options)
    valid = case.positions >= 0
    for function in (paged_attention, paged_attention_reference):
        actual = run(function, case.q, case.pages, case.page_table, case.positions, **options)
        assert np.isfinite(actual).all()
        np.testing.assert_allclose(actual[valid], expected[valid], atol=atol)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, tokens):
    check(make_case(3, tokens, kv_heads=2), 1e-5, **OPTIONS[name])


@pytest.mark.parametrize("kv_heads", [2, *(pytest.param(heads, marks=pytest.mark.slow) for heads in (1, 4))])
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (8, 1), (4, 3), (2, 64)])
def test_shapes_and_groups(rows, tokens, kv_heads):
    check(make_case(rows, tokens, kv_heads=kv_heads), 1e-5)


@pytest.mark.parametrize("tokens", [1, 5])
def test_bfloat16(tokens):
    check(make_case(3, tokens, dtype=jnp.bfloat16), 0.03)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("name", ["plain", "all"])
def test_int8(name, tokens):
    check(make_case(3, tokens, kv_heads=2, int8=True), 0.05, **OPTIONS[name])


@pytest.mark.parametrize("width", [1, 3, 9])
def test_tables_that_are_not_a_multiple_of_a_tile(width):
    check(make_case(2, 4, width=width), 1e-5)


@pytest.mark.parametrize("window", [None, 7])
def test_padding(window):
    """Padding tokens, rows of padding, and a whole group of such rows."""
    case = make_case(16, 1)
    check(case._replace(positions=case.positions.at[jnp.array([3, *range(8, 16)])].set(-1)), 1e-5, window=window)
    case = make_case(2, 5)
    check(case._replace(positions=case.positions.at[0, 3:].set(-1).at[1].set(-1)), 1e-5, window=window)


@settings(max_examples=5, deadline=None)
@given(
    rows=st.integers(1, 9),
    tokens=st.sampled_from([1, 2, 17]),
    width=st.integers(2, 20),
    window=st.sampled_from([None, 1, 129]),
    int8=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_any_shape(rows, tokens, width, window, int8, seed):
    case = make_case(rows, tokens, kv_heads=2, width=width, int8=int8, seed=seed)
    check(case, 0.1 if int8 else 1e-5, window=window)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("tokens", "name"), [(1, "plain"), (5, "all")])
def test_other_rows_and_the_table_change_no_bit(tokens, name, int8):
    case = make_case(3, tokens, kv_heads=2, int8=int8)
    short = jnp.tile(jnp.arange(10, 10 + tokens), (3, 1))
    long = short.at[1:].add(300)
    alone = run(paged_attention, case.q, case.pages, case.page_table[:, :2], short, **OPTIONS[name])
    among_longer = run(paged_attention, case.q, case.pages, case.page_table, long, **OPTIONS[name])
    np.testing.assert_array_equal(alone[0], among_longer[0])


def test_keys_beyond_the_longest_row_are_not_read():
    case = make_case(2, 1)
    positions = jnp.array([[20], [100]])
    beyond = case.page_table[:, 8:]  # all but the first tile
    poisoned = case.pages._replace(k=case.pages.k.at[beyond].set(jnp.nan), v=case.pages.v.at[beyond].set(jnp.nan))
    expected = run(paged_attention, case.q, case.pages, case.page_table, positions)
    np.testing.assert_array_equal(run(paged_attention, case.q, poisoned, case.page_table, positions), expected)


@pytest.mark.parametrize("function", [paged_attention, paged_attention_reference])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("tokens", "name"), [(1, "plain"), (5, "all")])
def test_what_other_requests_left_changes_no_bit(tokens, name, int8, function):
    """NaN and infinity after each row's last token: in its last page, in later pages of its table, in all others. One
    row waits for a longer one, one is padding."""
    case = make_case(3, tokens, kv_heads=2, int8=int8)
    positions = jnp.arange(tokens) + jnp.array([[7], [200], [0]])
    positions = positions.at[0, 3:].set(-1).at[2].set(-1)
    compiled = jax.jit(functools.partial(function, scale=SCALE, **OPTIONS[name]))

    def result(value: float) -> np.ndarray:
        pages = with_stale_slots(case.pages, case.page_table, np.asarray(positions.max(axis=1)) + 1, value)
        return np.asarray(compiled(case.q, pages, case.page_table, positions))

    expected = result(0.0)
    assert np.isfinite(expected).all()
    for value in (np.nan, np.inf, -np.inf):
        np.testing.assert_array_equal(result(value), expected)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("int8", [False, True])
def test_a_gpu_without_kernels_runs_the_reference(tokens, int8):
    """A CPU loops over tiles of keys; the reference, which XLA:GPU reads pages in place with, has no loop."""
    case = make_case(2, tokens, int8=int8)

    def lowered(platform):
        program = jax.jit(functools.partial(paged_attention, scale=SCALE))
        traced = program.trace(case.q, case.pages, case.page_table, case.positions)
        return traced.lower(lowering_platforms=(platform,)).as_text()

    assert "stablehlo.while" in lowered("cpu")
    with targeting(Target.load("a100").gpu):
        assert "stablehlo.while" not in lowered("cuda")
