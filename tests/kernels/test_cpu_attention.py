"""Attention in C++ against the reference: heads, and the cache that it writes in place."""

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jaxinfer.pallas_kernels import KVPages, cached_attention, paged_attention
from jaxinfer.pallas_kernels.attention import reference
from jaxinfer.pallas_kernels.cpu.library import Library, use_library
from jaxinfer.pallas_kernels.dispatch import recorded_implementations
from tests.kernels.cpu_levels import LEVELS_OF_TESTS, library_of
from tests.kernels.stale import with_stale_slots
from tests.kernels.test_decode_attention import Case, close
from tests.kernels.test_decode_attention import reference as exact_reference


@pytest.fixture(scope="module", params=LEVELS_OF_TESTS)
def library(request) -> Library:
    return library_of(request.param)


def run(library: Library | None, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with use_library(library), recorded_implementations() as used:
        result = jax.jit(functools.partial(function, **options))(*args)
    assert {kind.name for kinds in used.values() for kind in kinds} == {"xla" if library is None else "ffi"}
    return result


def call(library: Library | None, case: Case, args: tuple[Any, ...]) -> tuple[jax.Array, KVPages]:
    """Return heads and cache of `cached_attention`."""
    qkv, pages, table, positions, rotary, norms = args
    return run(library, cached_attention, qkv, pages, table, positions, rotary=rotary, norms=norms, **case.options)


def expected_of(case: Case, args: tuple[Any, ...]) -> tuple[jax.Array, KVPages]:
    options = dict(case.options)
    alibi = options.pop("alibi")
    return jax.jit(functools.partial(reference.cached_attention, **options))(*args, alibi)


def check(library: Library, case: Case, args: tuple[Any, ...] | None = None) -> None:
    """Check heads, and what the cache is afterwards.

    A key that is rotated may differ in its last bit, so that an int8 value may differ by 1 where it is a tie.
    """
    args = case.args() if args is None else args
    heads, pages = call(library, case, args)
    expected, expected_pages = expected_of(case, args)
    assert heads.dtype == case.dtype
    tolerance = 0.02 if case.dtype == jnp.bfloat16 else 0.02 if case.int8 and case.rotary_half else 3e-6
    close(heads, np.asarray(expected, np.float64), args[3], tolerance)
    for actual, page in zip(jax.tree.leaves(pages), jax.tree.leaves(expected_pages), strict=True):
        assert actual.dtype == page.dtype
        error = 1 if actual.dtype == jnp.int8 else 0.03 if actual.dtype == jnp.bfloat16 else 2e-6
        x, y = (np.asarray(z, np.float32) for z in (actual, page))
        np.testing.assert_allclose(x, y, atol=error, rtol=0)
        assert np.mean(x != y) < (0.05 if case.rotary_half or case.norms else 1e-9)


SMALL = Case(positions=(0, 63, 64, -1), kv_heads=2, group=2, dtype=jnp.float32)
CASES = {
    "one token": SMALL,
    "bfloat16": dataclasses.replace(SMALL, dtype=jnp.bfloat16, rotary_half=32, norms=True),
    "int8": dataclasses.replace(SMALL, tokens=2, int8=True),
    "bfloat16 pages": dataclasses.replace(SMALL, tokens=2, pages_dtype=jnp.bfloat16),
    "int8 and bfloat16": dataclasses.replace(SMALL, dtype=jnp.bfloat16, int8=True, window=30),
    "part of a head is rotated": dataclasses.replace(SMALL, rotary_half=5, norms=True, tokens=3),
    "drafts": Case(positions=(62, 126, 20, -1), tokens=3, lengths=(3, 3, 1, 0), group=3, dtype=jnp.float32),
    "odd sizes": Case(
        positions=(70, 130), tokens=2, kv_heads=3, group=7, head_dim=20, page_size=7, width=21, dtype=jnp.float32
    ),
    "odd int8": Case(
        positions=(70, 6),
        tokens=9,
        kv_heads=3,
        group=5,
        head_dim=36,
        page_size=5,
        width=21,
        dtype=jnp.float32,
        int8=True,
    ),
    "one query of each key": Case(positions=(140,), kv_heads=4, head_dim=40, page_size=1, width=150, dtype=jnp.float32),
    "all options": Case(
        positions=(140, 3), tokens=2, kv_heads=2, group=2, window=40, softcap=3.0, alibi=True, dtype=jnp.float32
    ),
    "a window of one": Case(positions=(63, 64, 130), window=1, group=2, dtype=jnp.float32),
    "a window inside of a page": Case(positions=(63, 20), window=5, tokens=2, page_size=32, dtype=jnp.float32),
    "many splits": Case(positions=(2500, 700), kv_heads=4, group=4, head_dim=16, width=160, dtype=jnp.float32),
    "large heads": Case(positions=(100,), kv_heads=2, group=8, head_dim=256, dtype=jnp.float32),
    "a group too large for a block": Case(positions=(70,), tokens=2, group=71, head_dim=8, dtype=jnp.float32),
    "a chunk": Case(positions=(5, 40), tokens=70, lengths=(70, 33), group=3, width=8, head_dim=16, dtype=jnp.float32),
    "an int8 chunk": Case(positions=(5,), tokens=70, group=3, width=8, head_dim=16, dtype=jnp.float32, int8=True),
    "a chunk, bfloat16 pages": Case(
        positions=(5,), tokens=70, group=3, width=8, dtype=jnp.float32, pages_dtype=jnp.bfloat16
    ),
    "only padding": Case(positions=(-1, -1), tokens=2, dtype=jnp.float32),
}


@pytest.mark.parametrize("name", CASES)
def test_cached_attention(name, library):
    check(library, CASES[name])


@settings(max_examples=4)
@given(
    first=st.lists(st.integers(-1, 60), min_size=1, max_size=3),
    tokens=st.integers(1, 3),
    group=st.sampled_from([1, 3]),
    rotary_half=st.sampled_from([0, 2, 4]),
    norms=st.booleans(),
    window=st.sampled_from([None, 1, 20]),
    softcap=st.sampled_from([None, 2.0]),
    alibi=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_any_call_is_as_in_float64(first, tokens, seed, library, **options):
    case = Case(positions=tuple(first), tokens=tokens, kv_heads=2, head_dim=8, dtype=jnp.float32, width=4, **options)
    args = case.args(seed)
    close(call(library, case, args)[0], exact_reference(case, args), args[3], 1e-5)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("tokens", [1, 70])
def test_paged_attention(tokens, int8, library):
    case = Case(positions=(3, 55), tokens=tokens, kv_heads=2, group=3, dtype=jnp.float32, int8=int8)
    _, pages, table, positions, *_ = case.args()
    q = np.random.default_rng(0).normal(size=(2, tokens, 6, case.head_dim)).astype(np.float32)
    options = {"scale": 0.3, "window": 20}
    actual = run(library, paged_attention, q, pages, table, positions, **options)
    expected = jax.jit(functools.partial(reference.paged_attention, softcap=None, **options))(
        q, pages, table, positions
    )
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_one_far_value(library):
    """A score far above all others, then ones far below: nothing overflows."""
    case = dataclasses.replace(SMALL, positions=(130,), group=1)
    qkv, pages, *rest = case.args()
    for factor in (1e4, -1e4):
        k = np.array(pages.k)
        k[np.asarray(rest[0])[0, 2], 3] *= factor
        far = pages._replace(k=k)
        check(library, case, (qkv, far, *rest))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("tokens", [1, 3])
def test_what_other_requests_left_changes_no_bit(tokens, int8, library):
    """Neither the heads nor what a row may read of its pages. Its new tokens start a page or not."""
    positions = (0, 20, 31, -1, 40)
    case = Case(positions=positions, tokens=tokens, kv_heads=2, group=2, head_dim=8, dtype=jnp.float32, int8=int8)
    qkv, pages, table, at, *rest = case.args()
    lengths = np.asarray(at).max(axis=1) + 1

    def results(value: float) -> list[np.ndarray]:
        stale = with_stale_slots(pages, table, np.maximum(np.asarray(at)[:, 0], 0), value)
        heads, new = call(library, case, (qkv, stale, table, at, *rest))
        return [np.asarray(x) for x in (heads, *jax.tree.leaves(with_stale_slots(new, table, lengths, 0.0)))]

    expected = results(0.0)
    assert all(np.isfinite(x).all() for x in expected)
    for value in (np.nan, np.inf):
        for actual, without_stale in zip(results(value), expected, strict=True):
            np.testing.assert_array_equal(actual, without_stale)


def test_entries_beyond_a_row_may_be_anything(library):
    case = dataclasses.replace(SMALL, positions=(20, 3))
    qkv, pages, table, *rest = case.args()
    expected, _ = call(library, case, (qkv, pages, table, *rest))
    for entry in (-7, 1 << 30):
        beyond = np.array(table)
        beyond[:, 2:] = entry
        actual, _ = call(library, case, (qkv, pages, beyond, *rest))
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("int8", [False, True])
def test_new_tokens_that_are_not_finite_are_stored_as_the_reference_does(int8, library):
    case = dataclasses.replace(SMALL, tokens=2, int8=int8)
    qkv, *rest = case.args()
    token = np.array(qkv).reshape(*qkv.shape[:2], 2, case.group + 2, case.head_dim)
    token[0, 0, 0, -2, 5], token[1, 0, 1, -1, 7] = np.nan, np.inf
    broken = token.reshape(qkv.shape)
    _, pages = call(library, case, (broken, *rest))
    _, expected = expected_of(case, (broken, *rest))
    for actual, page in zip(pages, expected, strict=True):
        np.testing.assert_array_equal(actual, page)


def test_int8_pages_at_their_limits(library):
    """All values are +-127, and scales grow: whole pages are rounded again."""
    case = dataclasses.replace(SMALL, positions=(5, 16, 33), int8=True)
    qkv, pages, *rest = case.args()
    k = np.where(np.asarray(pages.k) < 0, -127, 127).astype(np.int8)
    extreme, qkv = pages._replace(k=k, v=np.full_like(k, -127)), np.asarray(qkv)
    check(library, case, (qkv * np.float32(3), extreme, *rest))
    check(library, case, (qkv * np.float32(0.001), extreme, *rest))


@pytest.mark.parametrize("int8", [False, True])
def test_other_rows_change_no_bit(int8, library):
    """A row alone in a narrow table; among longer ones in a wide table."""
    case = Case(positions=(40, 130, 2), kv_heads=2, group=2, dtype=jnp.float32, int8=int8)
    qkv, pages, table, positions, *rest = case.args()
    qkv, table, positions = map(np.asarray, (qkv, table, positions))
    together, _ = call(library, case, (qkv, pages, table, positions, *rest))
    alone, _ = call(library, case, (qkv[:1], pages, table[:1, :3], positions[:1], *rest))
    np.testing.assert_array_equal(np.asarray(alone)[0], np.asarray(together)[0])


def test_calls_of_many_threads_at_once(library):
    """Independent calls in one program, from several threads: they end, and give the same bits."""
    case = dataclasses.replace(SMALL, positions=(1000, 64), width=80)
    qkv, pages, table, positions, *_ = case.args()

    def program(qkv: jax.Array) -> list[jax.Array]:
        return [cached_attention(qkv * i, pages, table, positions, **case.options)[0] for i in range(1, 7)]

    with use_library(library):
        compiled = jax.jit(program).lower(qkv).compile()
    expected = compiled(qkv)
    results = {}

    def repeat(thread: int) -> None:
        results[thread] = [compiled(qkv) for _ in range(10)]

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for actual in (x for runs in results.values() for x in runs):
        jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("int8", [False, True])
def test_a_loop_copies_no_cache(int8, library):
    """Layers in a loop, as in a program of several steps; chunks and decoding rows write to one cache."""
    case = Case(positions=(3, 40), kv_heads=2, group=2, dtype=jnp.float32, int8=int8)
    chunk = dataclasses.replace(case, positions=(50,), tokens=20)
    args, chunk_args = (jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), x.args()) for x in (case, chunk))
    caches = [jax.tree.map(lambda x: x.update(shape=(4096, *x.shape[1:])), args[1])] * 3

    def loop(rows, chunks, caches):
        def body(state):
            i, total, caches = state
            written = []
            for cache in caches:
                for qkv, _, table, positions, *_ in (chunks, rows):
                    heads, cache = cached_attention(qkv + total, cache, table, positions + i, **case.options)
                    heads, cache = lax.optimization_barrier((heads, cache))
                    total = total + jnp.sum(heads)
                written.append(cache)
            return i + 1, total, written

        return lax.while_loop(lambda state: state[0] < 5, body, (0, jnp.float32(0), caches))

    with use_library(library):
        compiled = jax.jit(loop, donate_argnums=2).lower(args, chunk_args, caches).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    assert memory.alias_size_in_bytes >= sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(caches))
    assert memory.temp_size_in_bytes < 1 << 20
    assert not [line for line in text.splitlines() if " copy(" in line and "4096," in line]


@pytest.mark.parametrize(
    ("qkv", "cache"), [(jnp.float16, jnp.float16), (jnp.float32, jnp.float16), (jnp.bfloat16, jnp.float32)]
)
def test_other_dtypes_are_left_to_xla(qkv, cache, library):
    x, pages, *rest = SMALL.args()
    pages = jax.tree.map(lambda x: x.astype(cache), pages)
    with use_library(library), recorded_implementations() as used:
        jax.eval_shape(lambda *args: cached_attention(*args, **SMALL.options), x.astype(qkv), pages, *rest[:2])
    assert [kind.name for kind in used["decode_attention"]] == ["xla"]
