"""Writing KV pages: float against a loop; int8 against the tokens each page should hold, with exact scales."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.pallas_kernels import KVPages, write_pages

PAGES, SIZE, HEADS, DIM = 9, 4, 2, 8

write = jax.jit(write_pages, static_argnames="rows")


def empty(*, int8=False, dtype=np.float32) -> KVPages:
    shapes = KVPages.shapes(PAGES, SIZE, HEADS, DIM, np.dtype(dtype), int8=int8)
    return jax.tree.map(lambda x: jnp.asarray(np.zeros(x.shape, x.dtype)), shapes)


def tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, HEADS, DIM)).astype(np.float32)


def values(pages: KVPages) -> list[np.ndarray]:
    """The keys and values of the pages, dequantised."""
    if pages.k_scale is None or pages.v_scale is None:
        return [np.asarray(pages.k, np.float32), np.asarray(pages.v, np.float32)]
    pairs = ((pages.k, pages.k_scale), (pages.v, pages.v_scale))
    return [np.asarray(x, np.float32) * np.asarray(scale)[:, None, :, None] for x, scale in pairs]


def indices(*numbers: int) -> jax.Array:
    return jnp.asarray(numbers, jnp.int32)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("page", "offset"),
    [([3], [2]), ([PAGES], [1]), ([5, 5, 0, PAGES, 8], [0, 1, 3, 0, 3])],
    ids=["one", "one of padding", "many"],
)
def test_float_tokens_are_written_at_their_offsets(page, offset, dtype):
    filled = jax.tree.map(lambda x: np.full(x.shape, 7, x.dtype), empty(dtype=dtype))
    k, v = tokens(len(page)), tokens(len(page), seed=1)
    expected = [np.full((PAGES, SIZE, HEADS, DIM), 7, np.float32) for _ in "kv"]
    for i, (p, s) in enumerate(zip(page, offset, strict=True)):
        if p < PAGES:
            expected[0][p, s], expected[1][p, s] = (np.float32(x[i].astype(dtype)) for x in (k, v))
    written = write(filled, k, v, indices(*page), indices(*offset))
    assert written.k.dtype == dtype
    for actual, wanted in zip(values(written), expected, strict=True):
        np.testing.assert_array_equal(actual, wanted)


def test_int8_rounds_a_whole_page_once():
    k, v = tokens(SIZE), 10 * tokens(SIZE, seed=1)
    written = write(empty(int8=True), k, v, indices(*[2] * SIZE), indices(*range(SIZE)), rows=1)
    assert written.k_scale is not None
    np.testing.assert_allclose(np.asarray(written.k_scale)[2], abs(k).max((0, 2)) / 127, rtol=1e-6)
    for actual, wanted in zip(values(written), (k, v), strict=True):
        step = abs(wanted).max((0, 2))[:, None] / 127
        assert (abs(actual[2] - wanted) <= 0.501 * step).all()
        assert not actual[[0, 1, *range(3, PAGES)]].any()


def test_int8_scale_grows_token_by_token():
    """Each token is twice the one before: the quantisation steps of its roundings sum to less than twice the last."""
    k = tokens(SIZE) * 2.0 ** np.arange(SIZE)[:, None, None]
    pages = empty(int8=True)
    for i in range(SIZE):
        pages = write(pages, k[i : i + 1], k[i : i + 1], indices(6), indices(i))
        step = abs(k[: i + 1]).max((0, 2))[:, None] / 127
        assert pages.k_scale is not None
        np.testing.assert_allclose(np.asarray(pages.k_scale)[6], step[:, 0], rtol=1e-6)
        assert (abs(values(pages)[0][6, : i + 1] - k[: i + 1]) <= 1.5 * step).all()


def test_int8_page_is_reset_at_offset_0():
    k = tokens(SIZE)
    index = indices(*[4] * SIZE), indices(*range(SIZE))
    pages = write(empty(int8=True), 1000 * k, 1000 * k, *index)
    pages = write(pages, k[:1], k[:1], indices(4), indices(0))
    assert pages.k_scale is not None
    np.testing.assert_allclose(np.asarray(pages.k_scale)[4], abs(k[0]).max(-1) / 127, rtol=1e-6)
    pages = write(pages, k[1:3], k[1:3], indices(4, 4), indices(1, 2))
    step = abs(k[:3]).max((0, 2))[:, None] / 127
    assert (abs(values(pages)[0][4, :3] - k[:3]) <= 1.01 * step).all()


def test_int8_zeros_stay_zeros():
    zeros = np.zeros((2, HEADS, DIM), np.float32)
    pages = write(empty(int8=True), zeros, zeros, indices(1, 1), indices(0, 1))
    assert all(np.isfinite(x).all() and not x.any() for x in values(pages))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_int8_stores_what_is_not_finite_as_0(value):
    """Such a token leaves the others of its page as they are, and starts a page like any other."""
    k = tokens(3)
    broken = k.copy()
    broken[[0, 2], :, 3] = value
    broken[2, 1] = value
    zeroed = np.where(np.isfinite(broken), broken, 0)
    index = indices(3, 3, 3), indices(0, 1, 2)
    for actual, wanted in zip(
        write(empty(int8=True), broken, broken, *index), write(empty(int8=True), zeroed, zeroed, *index), strict=True
    ):
        np.testing.assert_array_equal(actual, wanted)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, jnp.float8_e4m3fn])
def test_float_pages_contain_what_is_not_finite(dtype, value):
    """A head with such a key or value has a key of NaN and a value of 0, and the others are as they were."""
    k, v = tokens(3), tokens(3)
    index = indices(3, 3, 3), indices(0, 1, 2)
    expected_k, expected_v = (np.array(x) for x in values(write(empty(dtype=dtype), k, v, *index)))
    for x, head in ((k, 0), (v, 1)):
        x[1, head, 3] = value
        expected_k[3, 1, head], expected_v[3, 1, head] = np.nan, 0
    for actual, expected in zip(values(write(empty(dtype=dtype), k, v, *index)), (expected_k, expected_v), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_int8_leaves_other_pages_alone():
    k = tokens(PAGES * SIZE)
    everywhere = indices(*np.repeat(range(PAGES), SIZE)), indices(*np.tile(range(SIZE), PAGES))
    before = write(empty(int8=True), k, k, *everywhere)
    after = write(before, 9 * k[:3], 9 * k[:3], indices(2, PAGES, 7), indices(1, 1, 0), rows=1)
    others = np.array([p for p in range(PAGES) if p not in (2, 7)])
    for x, y in zip(before, after, strict=True):
        np.testing.assert_array_equal(np.asarray(x)[others], np.asarray(y)[others])


def test_int8_runs_of_one_page_apart():
    """Sequences never share a page that they write to, but `write_pages` does not rely on that."""
    k = tokens(4)
    pages = write(empty(int8=True), k[:1], k[:1], indices(3), indices(0))
    pages = write(pages, 5 * k[1:], 5 * k[1:], indices(3, 8, 3), indices(1, 2, 2))
    wanted = np.stack([k[0], 5 * k[1], 5 * k[3]])
    step = abs(wanted).max((0, 2))[:, None] / 127
    assert (abs(values(pages)[0][3, :3] - wanted) <= 1.01 * step).all()


class Sequences:
    """Random sequences on separate pages, and where their next tokens are written."""

    def __init__(self, count: int, rng: np.random.Generator):
        self.rng = rng
        self.pages = rng.permutation(PAGES)[: count * 3].reshape(count, 3)
        self.lengths = np.zeros(count, int)
        self.expected = np.zeros((PAGES, SIZE, HEADS, DIM), np.float32)

    def chunk(self, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Up to `width` more tokens of each sequence, padded: [N, H, K], page [N], offset [N]."""
        count = len(self.lengths)
        new = tokens(count * width, seed=int(self.rng.integers(1 << 30))) * 2.0 ** self.rng.integers(
            -3, 4, (1, HEADS, 1)
        )
        page, offset = np.full((count, width), PAGES), np.ones((count, width), int)
        for row in range(count):
            size = min(int(self.rng.integers(width + 1)), 3 * SIZE - self.lengths[row])
            index = self.lengths[row] + np.arange(size)
            page[row, :size], offset[row, :size] = self.pages[row, index // SIZE], index % SIZE
            self.expected[page[row, :size], offset[row, :size]] = new.reshape(count, width, HEADS, DIM)[row, :size]
            self.lengths[row] += size
        return new.astype(np.float32), page.reshape(-1).astype(np.int32), offset.reshape(-1).astype(np.int32)


@settings(max_examples=30)
@given(shape=st.sampled_from([(1, 2), (3, 1), (3, 7)]), seed=st.integers(0, 1 << 30))
def test_int8_holds_what_was_written(shape, seed):
    """Few shapes, since compiling takes most of the time: sequences, and tokens of each."""
    count, width = shape
    sequences = Sequences(count, np.random.default_rng(seed))
    pages = empty(int8=True)
    for _ in range(4):
        k, page, offset = sequences.chunk(width)
        pages = write(pages, k, k, page, offset, rows=count)
    step = abs(sequences.expected).max((1, 3)) / 127
    assert pages.k_scale is not None
    np.testing.assert_allclose(pages.k_scale, step, rtol=1e-6, atol=1e-30)
    # Rounded once when written, and again by each later write that raised the scale: at most SIZE - 1.
    written = sequences.expected != 0
    error = np.where(written, abs(values(pages)[0] - sequences.expected), 0)
    assert (error <= 0.501 * SIZE * step[:, None, :, None]).all()


def test_int8_chunks_agree_with_single_tokens():
    k, count = tokens(11) * np.linspace(0.5, 2, 11, dtype=np.float32)[:, None, None], 11
    page, offset = (
        np.array([8, 1, 4])[np.arange(count) // SIZE].astype(np.int32),
        np.arange(count, dtype=np.int32) % SIZE,
    )
    at_once = write(empty(int8=True), k, k, page, offset, rows=1)
    one_by_one = empty(int8=True)
    for i in range(count):
        one_by_one = write(one_by_one, k[i : i + 1], k[i : i + 1], page[i : i + 1], offset[i : i + 1])
    assert at_once.k_scale is not None
    np.testing.assert_array_equal(at_once.k_scale, one_by_one.k_scale)
    assert abs(np.int32(at_once.k) - np.int32(one_by_one.k)).max() <= 2


@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("int8", [False, True])
def test_pages_are_written_in_place(int8, count):
    """A copy of the pages would cost more than the rest of an engine step."""
    cache = KVPages.shapes(1024, 16, HEADS, 64, np.dtype(np.float32), int8=int8)
    new = jax.ShapeDtypeStruct((count, HEADS, 64), np.float32)
    index = jax.ShapeDtypeStruct((count,), np.int32)
    memory = jax.jit(write_pages, donate_argnums=0).lower(cache, new, new, index, index).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < cache.k.size // 16
