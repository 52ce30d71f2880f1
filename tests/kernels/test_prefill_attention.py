"""The prefill attention kernel: against the reference, what it does not support, and what it compiles to."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.cudnn import fused_attention_stablehlo

from jaxinfer.compiled.target import Target, compile_for
from jaxinfer.pallas_kernels import KVPages, attention, paged_attention
from jaxinfer.pallas_kernels.attention import cudnn
from jaxinfer.pallas_kernels.attention.mosaic.prefill import prefill_attention
from jaxinfer.pallas_kernels.attention.reference import attention as attention_reference
from jaxinfer.pallas_kernels.attention.reference import paged_attention as paged_attention_reference
from jaxinfer.pallas_kernels.mosaic.tuning import Trial
from jaxinfer.pallas_kernels.target import UnsupportedError, targeting
from tests.kernels.interpreting import without_races
from tests.kernels.stale import with_stale_slots

H200 = Target.load("h200").gpu
SMEM_BYTES = 232_448  # of a thread block on Hopper, at most
MAX_TILE_KV = 128
SMALL = {"tile_kv": 64, "stages": 2, "consumers": 2}  # small enough that a short context refills the stages


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """The parameters of a call. starts: the first position of each row, -1 for a row of padding; lengths: how many of
    each row's tokens are not padding, if not all."""

    starts: tuple[int, ...]
    tokens: int
    lengths: tuple[int, ...] | None = None
    kv_heads: int = 1
    group: int = 1
    head_dim: int = 64
    page_size: int = 16
    width: int = 12
    dtype: Any = jnp.bfloat16
    int8: bool = False
    window: int | None = None
    softcap: float | None = None
    alibi: bool = False

    @property
    def options(self) -> dict[str, Any]:
        heads = self.kv_heads * self.group
        alibi = np.float32(2.0) ** -np.arange(1, heads + 1) if self.alibi else None
        return {"scale": self.head_dim**-0.5, "window": self.window, "softcap": self.softcap, "alibi": alibi}

    def shapes(self) -> tuple[Any, ...]:
        rows = len(self.starts)
        pages = KVPages.shapes(
            rows * self.width + 3, self.page_size, self.kv_heads, self.head_dim, np.dtype(self.dtype), int8=self.int8
        )
        q = jax.ShapeDtypeStruct((rows, self.tokens, self.kv_heads * self.group, self.head_dim), self.dtype)
        table, positions = (jax.ShapeDtypeStruct((rows, n), jnp.int32) for n in (self.width, self.tokens))
        return q, pages, table, positions

    def args(self) -> tuple[jax.Array, KVPages, jax.Array, jax.Array]:
        """Return random arguments. Pages are shuffled among others; those in no tile that a query sees hold NaN."""
        rng = np.random.default_rng(0)
        q, pages, table, _ = self.shapes()

        def numbers(shape: Any) -> jax.Array:
            if shape.dtype == jnp.int8:
                return jnp.asarray(rng.integers(-127, 128, shape.shape), jnp.int8)
            if shape.ndim == 2:
                return jnp.asarray(rng.uniform(0.005, 0.02, shape.shape), jnp.float32)
            return jnp.asarray(rng.normal(size=shape.shape), shape.dtype)

        pages = jax.tree.map(numbers, pages)
        table = rng.permutation(len(pages.k))[: table.size].reshape(table.shape).astype(np.int32)
        lengths = np.array(self.lengths or [self.tokens] * len(self.starts))[:, None]
        starts, index = np.array(self.starts)[:, None], np.arange(self.tokens)
        positions = np.where((starts >= 0) & (index < lengths), starts + index, -1).astype(np.int32)
        visible = np.zeros(len(pages.k), bool)
        for row, at in zip(table, positions, strict=True):
            if (at >= 0).any():
                first = 0 if self.window is None else max(at[at >= 0].min() - self.window + 1, 0)
                first -= first % MAX_TILE_KV  # tiles are read whole
                visible[row[first // self.page_size : at.max() // self.page_size + 1]] = True
        poisoned = ("k_scale", "v_scale") if self.int8 else ("k", "v")  # int8 has no NaN, but its scales do
        pages = pages._replace(**{x: getattr(pages, x).at[~visible].set(jnp.nan) for x in poisoned})
        return numbers(q), pages, jnp.asarray(table), jnp.asarray(positions)


def exact(pages: KVPages, dtype: Any) -> KVPages:
    """Return the pages in float32, for the reference, which multiplies those that no query sees too: they are 0."""
    k, v = pages.k, pages.v
    if pages.k_scale is not None:
        k, v = (x * s[:, None, :, None] for x, s in ((k, pages.k_scale), (v, pages.v_scale)))
    return KVPages(*(jnp.nan_to_num(x.astype(dtype).astype(jnp.float32)) for x in (k, v)))


def check(case: Case, tiles: dict[str, int] | None = SMALL) -> None:
    q, pages, table, positions = case.args()
    expected = paged_attention_reference(
        q.astype(jnp.float32), exact(pages, case.dtype), table, positions, **case.options
    )
    with without_races(), Trial("prefill_attention", tiles).active():
        actual = np.asarray(prefill_attention(q, pages, table, positions, **case.options), np.float32)
    assert actual.shape == q.shape
    assert np.isfinite(actual).all()
    valid = np.asarray(positions) >= 0
    np.testing.assert_allclose(actual[valid], expected[valid], atol=tolerance(case.dtype, exact(pages, case.dtype).v))


def tolerance(dtype: Any, v: jax.Array) -> float:
    """Return the error that rounding may add.

    Softmax weights and the result are rounded to `dtype`, each by at most half a unit in the last place of max |v|;
    float32 errors add less than another half.
    """
    return 1.5 * float(jnp.finfo(dtype).eps) * float(jnp.abs(v).max())


CASES = {
    "a ragged tile": Case(starts=(150, 0), tokens=19, lengths=(19, 11), group=4),
    "several tiles and a row of padding": Case(starts=(60, -1), tokens=24, group=8),
    "all in float16": Case(
        starts=(140,), tokens=8, group=8, dtype=jnp.float16, window=70, softcap=2.0, alibi=True, page_size=8, width=20
    ),
    "all in int8": Case(starts=(170,), tokens=8, kv_heads=2, group=8, int8=True, window=100, softcap=2.0, alibi=True),
    "pages larger than tiles": Case(starts=(250,), tokens=8, group=8, page_size=128, width=3),
}

MORE = {
    "not a power of two": Case(starts=(64,), tokens=1, group=3),
    "window": Case(starts=(170,), tokens=9, group=8, window=40),
    "one query per head": Case(starts=(130,), tokens=1),
    "ungrouped heads": Case(starts=(0,), tokens=136, kv_heads=2),
    "window of one": Case(starts=(127,), tokens=3, window=1),
    "a table of one page": Case(starts=(3,), tokens=8, width=1),
    "int8": Case(starts=(100, 0), tokens=16, kv_heads=2, group=2, int8=True, page_size=8, width=20),
}


@pytest.mark.interpreted
@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name):
    check(CASES[name])


@pytest.mark.interpreted
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")  # scores of infinite keys
@pytest.mark.parametrize("name", ["a ragged tile", "all in float16", "all in int8", "pages larger than tiles"])
def test_what_other_requests_left_changes_no_bit(name):
    """NaN and infinity after each row's last token: in its last page, in later pages of its table, in all others."""
    case = CASES[name]
    q, pages, table, positions = case.args()
    lengths = np.asarray(positions).max(axis=1) + 1
    results = []
    for value in (0.0, np.nan, np.inf):
        stale = with_stale_slots(pages, table, lengths, value)
        with without_races(), Trial("prefill_attention", SMALL).active():
            results.append(np.asarray(prefill_attention(q, stale, table, positions, **case.options), np.float32))
    assert np.isfinite(results[0]).all()
    for actual in results[1:]:
        np.testing.assert_array_equal(actual, results[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_equals_the_reference_in_more_cases(name):
    check(MORE[name])


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("int8", [False, True])
def test_equals_the_reference_with_the_heuristics_tiles(head_dim, int8):
    check(Case(starts=(400,), tokens=3, group=2, head_dim=head_dim, int8=int8, width=26), tiles=None)


@pytest.mark.slow
@settings(max_examples=60)
@given(
    starts=st.lists(st.integers(-1, 170), min_size=1, max_size=3),
    tokens=st.sampled_from([1, 2, 7, 8, 17, 40]),
    heads=st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 4), (1, 16)]),
    page_size=st.sampled_from([8, 16, 64]),
    dtype=st.sampled_from([jnp.bfloat16, jnp.float16]),
    int8=st.booleans(),
    window=st.sampled_from([None, 1, 63, 64, 65]),
    softcap=st.sampled_from([None, 3.0]),
    alibi=st.booleans(),
    consumers=st.sampled_from([1, 2]),
)
def test_any_shape(starts, tokens, heads, page_size, consumers, **options):
    kv_heads, group = heads
    width = -(-(max(starts) + 1 + tokens) // page_size)
    shape = {"kv_heads": kv_heads, "group": group, "page_size": page_size, "width": width}
    check(Case(starts=tuple(starts), tokens=tokens, **shape, **options), tiles=SMALL | {"consumers": consumers})


@pytest.mark.parametrize(
    ("tokens", "lengths", "options"),
    [
        (21, (21, 0), {"causal": False}),
        pytest.param(70, (70, 65), {"causal": False, "window": 9}, marks=pytest.mark.slow),
        pytest.param(5, (5, 4), {"causal": True}, marks=pytest.mark.slow),
    ],
)
def test_attention_without_pages(tokens, lengths, options):
    """Let each row's keys be one page, of odd length."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(len(lengths), tokens, h, 64)), jnp.bfloat16) for h in (8, 1, 1))
    index, ends = jnp.arange(tokens), jnp.array(lengths)
    positions = jnp.where(index < ends[:, None], index, -1)
    in_float32 = (x.astype(jnp.float32) for x in (q, k, v))
    expected = attention_reference(*in_float32, positions, ends, scale=0.2, **options)
    with without_races(), Trial("prefill_attention", SMALL).active():
        actual = np.asarray(attention(q, k, v, positions, ends, scale=0.2, **options), np.float32)
    assert np.isfinite(actual).all()
    valid = np.asarray(positions) >= 0
    np.testing.assert_allclose(actual[valid], expected[valid], atol=tolerance(jnp.bfloat16, v))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 80}, "head_dim of 64, 128 or 256, got 80"),
        ({"dtype": jnp.float32}, "bfloat16 or float16 queries, got float32"),
        ({"page_size": 4}, "pages of 8, 16, 32, 64 or a multiple of 128 tokens, got 4"),
        ({"page_size": 48}, "pages of 8, 16, 32, 64 or a multiple of 128 tokens, got 48"),
    ],
)
def test_unsupported(changes, message):
    case = Case(**{"starts": (0,), "tokens": 8} | changes)
    with targeting(H200), pytest.raises(UnsupportedError, match=message):
        jax.eval_shape(functools.partial(prefill_attention, **case.options), *case.shapes())


def test_keys_of_another_dtype_are_unsupported():
    q, pages, *rest = Case(starts=(0,), tokens=8).shapes()
    pages = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float16), pages)
    with pytest.raises(UnsupportedError, match="int8 or bfloat16 as the queries, got float16"):
        jax.eval_shape(functools.partial(prefill_attention, scale=1.0), q, pages, *rest)


def real_size(tokens: int, kv_heads: int, group: int, head_dim: int, **options) -> Case:
    return Case(starts=(0,) * 4, tokens=tokens, kv_heads=kv_heads, group=group, head_dim=head_dim, width=512, **options)


REAL = {
    "Llama 3 8B": real_size(32, 8, 4, 128),
    "Llama 3 8B, long chunks": real_size(512, 8, 4, 128),
    "Llama 3 8B, int8": real_size(32, 8, 4, 128, int8=True),
    "Llama 3 8B, draft tokens": real_size(5, 8, 4, 128),
    "Llama 2 7B, float16": real_size(32, 32, 1, 128, dtype=jnp.float16),
    "Qwen 2 7B": real_size(32, 4, 7, 128),
    "Gemma 2 9B": real_size(512, 8, 2, 256, window=4096, softcap=50.0),
    "Gemma 2 9B, int8": real_size(32, 8, 2, 256, window=4096, softcap=50.0, int8=True),
    "GPT-2 XL": real_size(32, 25, 1, 64),
    "BLOOM 7B": real_size(32, 32, 1, 128, alibi=True),
    "Mistral 7B, int8": real_size(128, 8, 4, 128, window=4096, int8=True),
    "GPT-2 XL, int8": real_size(128, 25, 1, 64, int8=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Gemma 2 9B, int8", "Llama 3 8B", "BLOOM 7B"])  # all: with the marker `aot`
def test_lowers_for_cuda(name):
    case = REAL[name]
    with targeting(H200):
        traced = jax.jit(functools.partial(paged_attention, **case.options)).trace(*case.shapes())
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    assert "gather" not in text


@pytest.mark.parametrize("name", ["a100", "b200"])
def test_plain_xla_without_wgmma(name):
    case = REAL["Llama 3 8B"]
    with targeting(Target.load(name).gpu):
        traced = jax.jit(functools.partial(paged_attention, **case.options)).trace(*case.shapes())
        assert "mosaic_gpu" not in traced.lower(lowering_platforms=("cuda",)).as_text()


def encoder_program(dtype: Any, *, sized: bool = False, **options) -> str:
    """Return the jaxpr of `attention` for an encoder of BERT's size on an H200; sized: over merged tokens."""
    x = jax.ShapeDtypeStruct((8, 128, 12, 64), dtype)
    positions, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((8, 128), (8,)))
    sizes = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    with targeting(H200):
        function = jax.jit(functools.partial(attention, scale=0.125, **{"causal": False} | options))
        keys = {"lengths": None, "key_sizes": sizes} if sized else {"lengths": lengths}
        return str(function.trace(x, x, x, positions, **keys).jaxpr)


def test_encoders_run_cudnn_if_it_is_there(monkeypatch):
    """Check only that JAX accepts the call: it has not been run with cuDNN."""
    monkeypatch.setattr(cudnn, "cuda_versions", None)
    assert "name=prefill_attention" in encoder_program(jnp.bfloat16)
    assert "name=prefill_attention" not in encoder_program(jnp.bfloat16, sized=True)
    versions = SimpleNamespace(cudnn_get_version=lambda: 91_200)
    for module in (cudnn, fused_attention_stablehlo):
        monkeypatch.setattr(module, "cuda_versions", versions)
    with_cudnn = encoder_program(jnp.bfloat16)
    assert "dot_product_attention_fwd" in with_cudnn
    assert "name=prefill_attention" not in with_cudnn
    assert "name=prefill_attention" in encoder_program(jnp.bfloat16, window=64)
    assert "dot_product_attention_fwd" not in encoder_program(jnp.float32)
    for dtype, name in ((jnp.bfloat16, "bf16"), (jnp.float16, "f16")):
        program = encoder_program(dtype, sized=True)
        assert "dot_product_attention_fwd" in program
        assert f"{name}[8,1,128,128]" in program  # the bias
    assert "dot_product_attention_fwd" not in encoder_program(jnp.float32, sized=True)


@pytest.mark.aot
@pytest.mark.parametrize("name", REAL)
def test_on_an_h200(name):
    case = REAL[name]
    report = compile_for(
        Target.load("h200"), functools.partial(paged_attention, **case.options), case.shapes(), resources=True
    )
    (kernel,) = [kernel for kernel in report.kernels if kernel.kind == "mosaic"]
    assert len(report.kernels) <= 1 + case.alibi  # slopes are laid out for the tiles, once for all layers
    assert report.temp_bytes <= 64 * 4 * 32 * case.alibi
    assert kernel.shared_bytes <= SMEM_BYTES
    assert kernel.resources is not None
    assert kernel.resources.spill_bytes == 0
    assert kernel.resources.registers <= (168 if kernel.threads == 384 else 255)  # of 65,536, for one thread block
    instructions = " ".join(kernel.resources.instructions)
    assert all(name in instructions for name in ("HGMMA", "UTMALDG", "UTMASTG"))


@pytest.mark.aot
def test_encoders_on_an_h200_without_cudnn():
    x = jax.ShapeDtypeStruct((8, 512, 12, 64), jnp.bfloat16)
    positions, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((8, 512), (8,)))
    function = functools.partial(attention, scale=0.125, causal=False)
    report = compile_for(Target.load("h200"), function, (x, x, x, positions, lengths), resources=True)
    (kernel,) = report.kernels
    assert kernel.kind == "mosaic"
    assert report.temp_bytes == 0
