"""Decode attention against a float64 reference; its kernel against the fallback, with bitwise equal caches."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jaxinfer.compiled.target import Target, compile_for
from jaxinfer.pallas_kernels import KVPages
from jaxinfer.pallas_kernels.attention.api import cached_attention
from jaxinfer.pallas_kernels.attention.mosaic import MAX_DECODE_TOKENS, decode_attention
from jaxinfer.pallas_kernels.attention.reference import cached_attention as cached_attention_reference
from jaxinfer.pallas_kernels.mosaic.tuning import Trial
from jaxinfer.pallas_kernels.target import UnsupportedError, targeting
from tests.kernels.interpreting import without_races
from tests.kernels.stale import with_stale_slots

EPS = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """The parameters of a call. positions: of each row's first token; -1 is a row of padding. lengths: how many of each
    row's tokens are not padding, if not all."""

    positions: tuple[int, ...]
    tokens: int = 1
    lengths: tuple[int, ...] | None = None
    kv_heads: int = 1
    group: int = 1
    head_dim: int = 64
    page_size: int = 16
    width: int = 9
    dtype: Any = jnp.bfloat16
    int8: bool = False
    pages_dtype: Any = None  # None: dtype
    rotary_half: int = 0
    norms: bool = False
    window: int | None = None
    softcap: float | None = None
    alibi: bool = False

    @property
    def options(self) -> dict[str, Any]:
        alibi = np.float32(2.0) ** -np.arange(1, self.kv_heads * self.group + 1) if self.alibi else None
        return {
            "norm_eps": EPS,
            "scale": self.head_dim**-0.5,
            "window": self.window,
            "softcap": self.softcap,
            "alibi": alibi,
        }

    def args(self, seed: int = 0) -> tuple[Any, ...]:
        """Return random arguments; the rows' pages are shuffled among others."""
        rng = np.random.default_rng(seed)
        batch = len(self.positions)
        num_pages = batch * self.width + 2

        def numbers(*shape: int, dtype: Any = self.dtype) -> jax.Array:
            return jnp.asarray(rng.normal(size=shape), dtype)

        shapes = KVPages.shapes(num_pages, self.page_size, self.kv_heads, self.head_dim, self.dtype, int8=self.int8)
        if self.int8:
            k, v = (jnp.asarray(rng.integers(-127, 128, x.shape), jnp.int8) for x in shapes[:2])
            scales = (jnp.asarray(rng.uniform(0.005, 0.02, k.shape[::2]), jnp.float32) for _ in "kv")
            pages = KVPages(k, v, *scales)
        else:
            pages = KVPages(*(numbers(*x.shape, dtype=self.pages_dtype or self.dtype) for x in shapes[:2]))
        table = jnp.asarray(rng.permutation(num_pages)[: batch * self.width].reshape(batch, -1), jnp.int32)
        index, first = np.arange(self.tokens), np.array(self.positions)[:, None]
        lengths = np.full(batch, self.tokens) if self.lengths is None else np.array(self.lengths)
        positions = np.where((first >= 0) & (index < lengths[:, None]), first + index, -1)
        angles = rng.normal(size=(batch, self.tokens, 1, self.rotary_half))
        rotary = tuple(jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin)) if self.rotary_half else None
        norms = tuple(numbers(self.head_dim, dtype=jnp.float32) for _ in "qk") if self.norms else None
        qkv = numbers(batch, self.tokens, self.kv_heads * (self.group + 2) * self.head_dim)
        return qkv, pages, table, jnp.asarray(positions, jnp.int32), rotary, norms


def reference(case: Case, args: tuple[Any, ...]) -> np.ndarray:
    """Return the heads' outputs, [B, T, Hkv * G * K], for a float cache.

    They are computed in float64, with queries and keys rounded to the cache's dtype.
    """
    qkv, pages, table, positions, rotary, norms = jax.tree.map(np.asarray, args)

    def rounded(x: np.ndarray) -> np.ndarray:
        return np.asarray(jnp.asarray(x, case.dtype), np.float64)

    batch = len(qkv)
    x = qkv.astype(np.float64).reshape(batch, case.tokens, case.kv_heads, case.group + 2, case.head_dim)
    if norms is not None:
        scale = np.stack([*[norms[0]] * case.group, norms[1]]).astype(np.float64)
        mean = np.mean(x[..., :-1, :] ** 2, axis=-1, keepdims=True)
        x[..., :-1, :] = rounded(x[..., :-1, :] / np.sqrt(mean + EPS) * scale)
    if rotary is not None:
        cos, sin = (angle.astype(np.float64)[:, :, None] for angle in rotary)
        a, b = np.split(x[..., :-1, : 2 * case.rotary_half], 2, axis=-1)
        x[..., :-1, : 2 * case.rotary_half] = rounded(np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1))
    heads = np.zeros((batch, case.tokens, case.kv_heads, case.group, case.head_dim))
    slopes = case.options["alibi"] if case.alibi else np.zeros(case.kv_heads * case.group)
    slopes = np.reshape(slopes, (case.kv_heads, case.group))
    for row in range(batch):
        cached = [p[table[row]].reshape(-1, case.kv_heads, case.head_dim).astype(np.float64) for p in pages[:2]]
        for token, position in enumerate(positions[row]):
            if position >= 0:
                cached[0][position], cached[1][position] = x[row, token, :, -2], x[row, token, :, -1]
        for token, position in enumerate(positions[row]):
            if position < 0:
                continue
            start = 0 if case.window is None else max(position - case.window + 1, 0)
            k, v = (y[start : position + 1] for y in cached)
            scores = np.einsum("hgk,shk->hgs", x[row, token, :, :-2], k) * case.options["scale"]
            if case.softcap is not None:
                scores = case.softcap * np.tanh(scores / case.softcap)
            scores += slopes[..., None] * (np.arange(start, position + 1) - position)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            heads[row, token] = np.einsum("hgs,shk->hgk", weights, v)
    return heads.reshape(batch, case.tokens, -1)


def close(actual: jax.Array, expected: np.ndarray, positions: jax.Array, tolerance: float) -> None:
    """Compare only tokens; the result for padding need only be finite."""
    result, valid = np.asarray(actual, np.float64), np.asarray(positions) >= 0
    assert np.isfinite(result).all()
    np.testing.assert_allclose(result[valid], expected[valid], atol=tolerance, rtol=tolerance)


@settings(max_examples=3)
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
def test_any_call_matches_the_reference(first, tokens, seed, **options):
    case = Case(positions=tuple(first), tokens=tokens, kv_heads=2, head_dim=8, dtype=jnp.float32, width=4, **options)
    qkv, pages, table, positions, rotary, norms = args = case.args(seed)
    run = jax.jit(functools.partial(cached_attention, **case.options))
    heads, _ = run(qkv, pages, table, positions, rotary=rotary, norms=norms)
    assert heads.dtype == qkv.dtype
    close(heads, reference(case, args), positions, 1e-4)


def test_many_tokens_are_stored_first():
    case = Case(positions=(3, 20), tokens=MAX_DECODE_TOKENS + 1, kv_heads=2, dtype=jnp.float32)
    args = case.args()
    with pytest.raises(UnsupportedError, match="9 tokens"):
        decode_attention(*args, **case.options)
    heads, _ = jax.jit(lambda *args: cached_attention(*args, **case.options))(*args[:4])
    close(heads, reference(case, args), args[3], 1e-4)


def check_interpreted(case: Case, splits: int, stages: int = 2) -> None:
    """Check that the kernel has no race, is close to the fallback, and leaves the same cache."""
    args = case.args()
    tiles = Trial("decode_attention", {"splits": splits, "stages": stages})
    with without_races(), tiles.active():
        heads, pages = jax.block_until_ready(decode_attention(*args, **case.options))
    assert heads.dtype == case.dtype
    expected, expected_pages = cached_attention_reference(*args, **case.options)
    # Softmax weights are rounded to the dtype (relative error 2^-9 in bfloat16), and so is the result; values are < 5.
    close(heads, np.asarray(expected, np.float64), args[3], 0.02 if case.dtype == jnp.bfloat16 else 0.003)
    for actual, page in zip(jax.tree.leaves(pages), jax.tree.leaves(expected_pages), strict=True):
        np.testing.assert_array_equal(actual, page)


def with_stale(args: tuple[Any, ...], value: float) -> tuple[Any, ...]:
    """Return the arguments, with `value` in every slot that holds none of a row's earlier tokens."""
    qkv, pages, table, positions, *rest = args
    return qkv, with_stale_slots(pages, table, np.maximum(positions[:, 0], 0), value), table, positions, *rest


@pytest.mark.parametrize(("tokens", "int8"), [(1, True), (3, False)])
def test_what_other_requests_left_changes_no_bit(tokens, int8):
    """Neither the heads nor what a row may read of its pages, whether its new tokens start a page or not."""
    case = Case(
        positions=(0, 20, 31, -1, 40), tokens=tokens, kv_heads=2, group=2, head_dim=8, dtype=jnp.float32, int8=int8
    )
    args = case.args()
    compiled = jax.jit(functools.partial(cached_attention_reference, **case.options))

    def results(value: float) -> list[np.ndarray]:
        heads, pages = compiled(*with_stale(args, value))
        lengths = np.asarray(args[3]).max(axis=1) + 1
        return [np.asarray(x) for x in (heads, *jax.tree.leaves(with_stale_slots(pages, args[2], lengths, 0.0)))]

    expected = results(0.0)
    assert all(np.isfinite(x).all() for x in expected)
    for value in (np.nan, np.inf):
        for actual, without_stale in zip(results(value), expected, strict=True):
            np.testing.assert_array_equal(actual, without_stale)


CASES = {
    # A row with only its own key; new tokens at the end and at the start of a tile of keys; a row of padding.
    "one split": (Case(positions=(0, 63, 64, -1)), 1),
    # New tokens on both sides of the end of a tile and of a split, with padding after them.
    "draft tokens": (
        Case(positions=(62, 126, 20, -1), tokens=3, lengths=(3, 3, 1, 0), group=3, rotary_half=16, norms=True),
        2,
    ),
    # The window skips tiles, ends inside one, and masks all of a split's keys for the later token. In the second row a
    # split has no keys.
    "masked": (
        Case(positions=(140, 3), tokens=2, kv_heads=2, group=2, rotary_half=32, window=40, softcap=3.0, alibi=True),
        2,
    ),
    # New pages, rescaled pages, and both, at the end of a tile.
    "int8": (Case(positions=(63, 5), tokens=2, group=2, width=5, int8=True), 2),
}
WIDER = {
    "int8 with all options": (
        Case(
            positions=(126, 20, -1),
            tokens=3,
            lengths=(3, 1, 0),
            kv_heads=2,
            group=3,
            head_dim=128,
            rotary_half=32,
            norms=True,
            page_size=32,
            width=5,
            window=100,
            int8=True,
        ),
        2,
    ),
    "float16": (Case(positions=(100,), group=2, rotary_half=64, head_dim=128, dtype=jnp.float16), 2),
    "grouped": (Case(positions=(3, 140, 127), kv_heads=2, group=4, rotary_half=32), 2),
    "wide heads": (Case(positions=(100,), kv_heads=2, rotary_half=32, head_dim=256, width=8), 4),
    "many queries": (Case(positions=(123,), tokens=8, group=8, head_dim=128, width=10), 2),
    "odd tile of queries": (Case(positions=(70,), tokens=8, group=5, rotary_half=16), 1),
    "small pages": (Case(positions=(70, 130), page_size=8, width=17, tokens=2), 2),
    "large pages": (Case(positions=(70, 190), page_size=128, width=2, tokens=2), 2),
    "narrow window": (Case(positions=(63, 64, 130), window=1, group=2), 2),
    "eight splits": (Case(positions=(600, 64), width=40, group=2), 8),
}


@pytest.mark.interpreted
@pytest.mark.parametrize("name", CASES)
def test_interpreted(name):
    check_interpreted(*CASES[name])


@pytest.mark.interpreted
@pytest.mark.parametrize("name", ["draft tokens", "masked", "int8"])
def test_what_other_requests_left_changes_no_bit_interpreted(name):
    case, splits = CASES[name]
    args = case.args()
    results = []
    for value in (0.0, np.nan, np.inf):
        with without_races(), Trial("decode_attention", {"splits": splits, "stages": 2}).active():
            results.append(np.asarray(decode_attention(*with_stale(args, value), **case.options)[0], np.float32))
    assert np.isfinite(results[0]).all()
    for actual in results[1:]:
        np.testing.assert_array_equal(actual, results[0])


@pytest.mark.interpreted
@pytest.mark.parametrize("name", ["draft tokens", "int8"])
def test_new_tokens_that_are_not_finite_are_stored_as_the_reference_does(name):
    """In int8 as 0, otherwise as a key of NaN and a value of 0: what does not see them keeps its result."""
    case, splits = CASES[name]
    qkv, *rest = case.args()
    token = qkv.reshape(*qkv.shape[:2], case.group + 2, case.head_dim)
    broken = token.at[0, 1, -2, 5].set(jnp.nan).at[1, 1, -1, 7].set(jnp.inf).reshape(qkv.shape)
    with without_races(), Trial("decode_attention", {"splits": splits, "stages": 2}).active():
        heads, pages = decode_attention(broken, *rest, **case.options)
    expected_heads, expected = cached_attention_reference(broken, *rest, **case.options)
    for actual, page in zip(pages, expected, strict=True):
        np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (actual, page)))
    if not case.int8:
        close(heads[:, :1], np.asarray(expected_heads[:, :1], np.float64), rest[2][:, :1], 0.02)
        assert np.isnan(np.asarray(heads[:2, 1], np.float32)).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDER)
def test_interpreted_wider(name):
    check_interpreted(*WIDER[name], stages=3)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(positions=(0,), dtype=jnp.float32), "bfloat16 and float16, got qkv in float32"),
        (Case(positions=(0,), head_dim=96), "head_dim must be 64, 128 or 256, got 96"),
        (Case(positions=(0,), page_size=24), "page_size must be 8, 16, 32 or a multiple of 64, got 24"),
        (Case(positions=(0,), page_size=128, int8=True), "page_size must be at most 64 in int8, got 128"),
        (Case(positions=(0,), rotary_half=24), "rotary_dim / 2 must be a multiple of 16 that divides head_dim, got 24"),
        (Case(positions=(0,), tokens=8, group=8, head_dim=256), "tokens \\* group must be at most 32, got 8 \\* 8"),
        (Case(positions=(0,), group=71), "tokens \\* group must be at most 64, got 1 \\* 71"),
    ],
)
def test_unsupported(case, message):
    with pytest.raises(UnsupportedError, match=message):
        decode_attention(*case.args(), **case.options)


def test_clusters_that_a_gpu_may_refuse_are_unsupported():
    case = Case(positions=(0,))
    with (
        Trial("decode_attention", {"splits": 16, "stages": 2}).active(),
        pytest.raises(UnsupportedError, match="1 to 8 thread blocks, got 16"),
    ):
        decode_attention(*case.args(), **case.options)


def test_a_cache_in_another_dtype_is_unsupported():
    case = Case(positions=(0,))
    qkv, pages, *others = case.args()
    with pytest.raises(UnsupportedError, match="in qkv's dtype bfloat16 or in int8, got float32"):
        decode_attention(qkv, jax.tree.map(lambda x: x.astype(jnp.float32), pages), *others, **case.options)


def shapes(case: Case, num_pages: int = 4096) -> tuple[Any, ...]:
    """Return the shapes of a case's arguments, with a cache that is large compared with everything else."""
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.args())
    return args[0], jax.tree.map(lambda x: x.update(shape=(num_pages, *x.shape[1:])), args[1]), *args[2:]


LLAMA = Case(positions=(0,), kv_heads=8, group=4, head_dim=128, rotary_half=64, width=128)
H200, H20, RTX_5090 = (Target.load(name).gpu for name in ("h200", "h20", "rtx-5090"))


@pytest.mark.parametrize(("gpu", "splits"), [(H200, 4), (H20, 2)])
def test_keys_are_split_for_the_sms_there_are(gpu, splits):
    """64 clusters; 132 SMs take two blocks of each, and those do not fill them; 78 SMs are full with two."""
    case = dataclasses.replace(LLAMA, positions=(0,) * 8, width=32)
    with targeting(gpu):
        program = str(jax.make_jaxpr(lambda *args: decode_attention(*args, **case.options))(*shapes(case)))
    assert f"cluster=({splits},)" in program


def test_little_shared_memory():
    with targeting(RTX_5090):
        jax.eval_shape(functools.partial(decode_attention, **LLAMA.options), *shapes(LLAMA))
        large = dataclasses.replace(LLAMA, head_dim=256)
        with pytest.raises(UnsupportedError, match=r"needs \d+ bytes of shared memory and has 101376"):
            jax.eval_shape(functools.partial(decode_attention, **large.options), *shapes(large))


@pytest.mark.slow
def test_lowers_for_cuda():
    """With the heuristic's tiles: checks layouts, shared memory and sizes of TMA copies. More in `test_lowering.py`."""
    case = dataclasses.replace(LLAMA, group=2, head_dim=64, rotary_half=32, width=32)
    with targeting(H200):
        traced = jax.jit(functools.partial(decode_attention, **case.options)).trace(*shapes(case))
    assert str(traced.lower(lowering_platforms=("cuda",)).compiler_ir()).count("@mosaic_gpu_v2") == 1


@pytest.mark.aot
@pytest.mark.parametrize(
    "case",
    [
        LLAMA,
        dataclasses.replace(LLAMA, tokens=8, group=8),  # the maximum number of queries
        dataclasses.replace(LLAMA, tokens=8, head_dim=256),
        dataclasses.replace(LLAMA, int8=True),
        dataclasses.replace(LLAMA, positions=(0,) * 8, norms=True, window=1000, softcap=30.0, alibi=True),
    ],
)
def test_one_launch_that_writes_in_place(case):
    call = functools.partial(decode_attention, **case.options)
    report = compile_for(Target.load("h200"), call, shapes(case), donate=(1,), resources=True)
    (kernel,) = report.kernels
    assert kernel.kind == "mosaic"
    assert kernel.resources is not None
    assert kernel.resources.spill_bytes == 0
    assert {"UTMALDG", "HMMA", "LDSM"} <= set(kernel.resources.features)
    assert kernel.shared_bytes < 227 << 10
    assert report.aliased == report.donated
    assert report.temp_bytes < 5 << 20  # partial results of splits; the cache has 128 MiB


@pytest.mark.aot
def test_a_loop_copies_no_cache():
    def loop(qkv, pages, table, positions, rotary, norms):
        def body(state):
            i, heads, pages = state
            new, pages = cached_attention(qkv, pages, table, positions + i, rotary=rotary, **LLAMA.options)
            return i + 1, heads + new, pages

        start = jnp.zeros((*qkv.shape[:2], LLAMA.kv_heads * LLAMA.group * LLAMA.head_dim), qkv.dtype)
        return lax.while_loop(lambda state: state[0] < 10, body, (0, start, pages))

    report = compile_for(Target.load("h200"), loop, shapes(LLAMA), donate=(1,))
    assert [kernel.kind for kernel in report.kernels].count("mosaic") == 1
    assert report.aliased == report.donated
    assert report.temp_bytes < 1 << 20
