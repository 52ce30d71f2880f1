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

    q: np.ndarray
    pages: KVPages
    page_table: np.ndarray
    positions: np.ndarray
    k: np.ndarray
    v: np.ndarray


@functools.cache
def make_case(rows: int, tokens: int, *, kv_heads=1, width=20, dtype=np.float32, int8=False, seed=0) -> Case:
    """Rows of `tokens` queries each, at the end of contexts of random lengths up to `width` pages."""
    rng = np.random.default_rng(seed)
    num_pages = rows * width + 3
    page_table = rng.permutation(num_pages)[: rows * width].reshape(rows, width).astype(np.int32)
    shapes = KVPages.shapes(num_pages, SIZE, kv_heads, DIM, np.dtype(dtype), int8=int8)
    stale = jax.tree.map(lambda x: rng.integers(-9, 9, x.shape).astype(x.dtype), shapes)
    k, v = rng.normal(size=(2, rows, width * SIZE, kv_heads, DIM)).astype(dtype)
    new_k, new_v = (x.reshape(-1, kv_heads, DIM) for x in (k, v))
    slots = np.repeat(page_table, SIZE), np.tile(np.arange(SIZE, dtype=np.int32), rows * width)
    pages = jax.device_get(jax.jit(write_pages)(stale, new_k, new_v, *slots))
    first = rng.integers(0, width * SIZE - tokens + 1, rows)
    positions = (first[:, None] + np.arange(tokens)).astype(np.int32)
    return Case(rng.normal(size=(rows, tokens, HEADS, DIM)).astype(dtype), pages, page_table, positions, k, v)


@functools.partial(jax.jit, static_argnames="name")
def every_attention(case: Case, name: str):
    """Of contiguous keys; of pages by the operation; and by its reference."""
    options = {"scale": SCALE, **OPTIONS[name]}
    lengths = jnp.full(len(case.k), case.k.shape[1])
    paged = case.q, case.pages, case.page_table, case.positions
    return (
        attention(case.q, case.k, case.v, case.positions, lengths, **options),
        paged_attention(*paged, **options),
        paged_attention_reference(*paged, **options),
    )


def check(case: Case, atol: float, name: str = "plain"):
    results = every_attention(case, name)
    assert all(result.dtype == case.q.dtype for result in results)
    expected, *paged = (np.asarray(result, np.float32) for result in results)
    valid = case.positions >= 0
    for actual in paged:
        assert np.isfinite(actual).all()
        np.testing.assert_allclose(actual[valid], expected[valid], atol=atol)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("plain", 1), ("all", 1), ("window", 5), ("all", 5)],
)
def test_options(name, tokens):
    check(make_case(3, tokens, kv_heads=2), 1e-5, name)


@pytest.mark.parametrize(
    ("rows", "tokens", "kv_heads", "width"),
    [
        (1, 1, 1, 1),
        (16, 1, 4, 20),  # two groups of rows
        (4, 3, 2, 3),
        (2, 64, 2, 9),
    ],
)
def test_shapes_and_groups(rows, tokens, kv_heads, width):
    """Tables that are not a multiple of a tile, too."""
    check(make_case(rows, tokens, kv_heads=kv_heads, width=width), 1e-5)


@pytest.mark.parametrize(("name", "tokens"), [("all", 1), ("plain", 5)])
def test_bfloat16(name, tokens):
    check(make_case(3, tokens, dtype=jnp.bfloat16), 0.03, name)


@pytest.mark.parametrize(("name", "tokens"), [("plain", 1), ("all", 5)])
def test_int8(name, tokens):
    check(make_case(3, tokens, kv_heads=2, int8=True), 0.05, name)


def test_padding():
    """Padding tokens, rows of padding, and a whole group of such rows."""
    case = make_case(16, 1, kv_heads=4)
    positions = case.positions.copy()
    positions[[3, *range(8, 16)]] = -1
    check(case._replace(positions=positions), 1e-5)
    case = make_case(3, 5, kv_heads=2)
    positions = case.positions.copy()
    positions[0, 3:] = positions[1] = -1
    check(case._replace(positions=positions), 1e-5, "window")


@settings(max_examples=15)
@given(name=st.sampled_from(["plain", "all"]), int8=st.booleans(), seed=st.integers(0, 1 << 30))
def test_any_contexts(name, int8, seed):
    check(make_case(3, {"plain": 1, "all": 5}[name], kv_heads=2, int8=int8, seed=seed), 0.1 if int8 else 1e-5, name)


@pytest.mark.slow
@settings(max_examples=5)
@given(
    rows=st.integers(1, 9),
    tokens=st.sampled_from([1, 2, 17]),
    width=st.integers(2, 20),
    name=st.sampled_from(sorted(OPTIONS)),
    int8=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_any_shape(rows, tokens, width, name, int8, seed):
    check(make_case(rows, tokens, kv_heads=2, width=width, int8=int8, seed=seed), 0.1 if int8 else 1e-5, name)


@pytest.mark.parametrize(("tokens", "name", "int8"), [(1, "plain", True), (5, "all", False)])
def test_other_rows_and_the_table_change_no_bit(tokens, name, int8):
    case = make_case(3, tokens, kv_heads=2, int8=int8)
    short = np.tile(np.arange(10, 10 + tokens, dtype=np.int32), (3, 1))
    long = short + np.int32([[0], [300], [300]])
    _, alone, _ = every_attention(case._replace(positions=short, page_table=case.page_table[:, :2]), name)
    _, among_longer, _ = every_attention(case._replace(positions=long), name)
    np.testing.assert_array_equal(np.asarray(alone)[0], np.asarray(among_longer)[0])


def test_keys_beyond_the_longest_row_are_not_read():
    case = make_case(3, 1, kv_heads=2)
    case = case._replace(positions=np.int32([[20], [100], [7]]))
    beyond = case.page_table[:, 8:]  # all but the first tile
    k, v = case.pages.k.copy(), case.pages.v.copy()
    k[beyond] = v[beyond] = np.nan
    _, expected, _ = every_attention(case, "plain")
    _, actual, _ = every_attention(case._replace(pages=case.pages._replace(k=k, v=v)), "plain")
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("tokens", "name"), [(1, "plain"), (5, "all")])
def test_what_other_requests_left_changes_no_bit(tokens, name, int8):
    """NaN and infinity after each row's last token: in its last page, in later pages of its table, in all others. One
    row waits for a longer one, one is padding."""
    case = make_case(3, tokens, kv_heads=2, int8=int8)
    positions = np.arange(tokens, dtype=np.int32) + np.int32([[7], [200], [0]])
    positions[0, 3:] = positions[2] = -1

    def results(value: float) -> list[np.ndarray]:
        pages = with_stale_slots(case.pages, case.page_table, positions.max(axis=1) + 1, value)
        _, *paged = every_attention(case._replace(pages=pages, positions=positions), name)
        return [np.asarray(result) for result in paged]

    expected = results(0.0)
    assert all(np.isfinite(result).all() for result in expected)
    for value in (np.nan, np.inf, -np.inf):
        for actual, without in zip(results(value), expected, strict=True):
            np.testing.assert_array_equal(actual, without)


@pytest.mark.parametrize(("tokens", "int8"), [(1, False), (5, True)])
def test_a_gpu_without_kernels_runs_the_reference(tokens, int8):
    """A CPU loops over tiles of keys; the reference, which XLA:GPU reads pages in place with, has no loop."""
    case = make_case(3, tokens, kv_heads=2, int8=int8)

    def lowered(platform):
        program = jax.jit(functools.partial(paged_attention, scale=SCALE))
        traced = program.trace(case.q, case.pages, case.page_table, case.positions)
        return traced.lower(lowering_platforms=(platform,)).as_text()

    assert "stablehlo.while" in lowered("cpu")
    with targeting(Target.load("a100").gpu):
        assert "stablehlo.while" not in lowered("cuda")
