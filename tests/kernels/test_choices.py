"""Measured choices between implementations: their order, how they are measured, and that traces depend on them."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.pallas_kernels import KVPages, cached_attention
from jaxinfer.pallas_kernels.choices import Choices, fastest, measure, recorded_calls, supported, use_choices
from jaxinfer.pallas_kernels.cpu.library import Library, use_library
from jaxinfer.pallas_kernels.dispatch import Operation
from jaxinfer.pallas_kernels.implementation import composed, ffi, reference, xla
from jaxinfer.pallas_kernels.target import UnsupportedError


def plus_one(x, *, by):
    return x + 1.0


def plus_two(x, *, by):
    return x + 2.0


def refuses(x, *, by):
    raise UnsupportedError("never")


def slow(x, *, by):
    return jax.pure_callback(lambda y: (time.sleep(0.01), y)[1], jax.ShapeDtypeStruct(x.shape, x.dtype), x)


operation = Operation("op", xla(plus_one, platform="cpu"), reference(plus_two))
SHAPES = "float32[2,3]; by=4"


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ((), 1.0),
        ((("op", SHAPES, "reference"),), 2.0),
        ((("op", SHAPES, "xla"),), 1.0),
        ((("op", "float32[3,2]; by=4", "reference"),), 1.0),  # of another shape
        ((("other", SHAPES, "reference"),), 1.0),
        ((("op", SHAPES, "of an older version"),), 1.0),
    ],
)
def test_the_fastest_is_tried_first(entries, expected):
    program = jax.jit(lambda x: operation(x, by=4))
    assert program(jnp.zeros((2, 3)))[0, 0] == 1.0
    with use_choices(Choices(entries)):
        assert program(jnp.zeros((2, 3)))[0, 0] == expected  # traced again, since traces depend on the choices


def test_what_is_chosen_may_refuse():
    refusing = Operation("op", xla(refuses, platform="cpu"), reference(plus_two))
    with use_choices(Choices((("op", SHAPES, "xla"),))):
        assert refusing(jnp.zeros((2, 3)), by=4)[0, 0] == 2.0


def test_calls_are_recorded_by_shape_alone():
    with recorded_calls() as calls:
        jax.eval_shape(lambda x: operation(operation(x, by=4), by=5), jnp.zeros((2, 3)))
    assert [call.shapes for call in calls] == [SHAPES, "float32[2,3]; by=5"]
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for call in calls for leaf in jax.tree.leaves(call.args))
    alone = Operation("alone", reference(plus_two))
    with recorded_calls() as calls:
        alone(jnp.zeros(1), by=1)
    assert not calls  # there is nothing to choose


def test_measuring_finds_the_slower_one():
    slower = Operation("slower", xla(slow, platform="cpu"), xla(refuses, platform="cpu"), reference(plus_two))
    with recorded_calls() as calls:
        jax.eval_shape(lambda x: slower(x, by=4), jnp.zeros((2, 3)))
    seconds = measure(calls[0], rounds=2, seconds=0.02)
    assert seconds["xla"] > 0.01 > seconds["reference"]
    assert fastest(calls[0], seconds) == "reference"
    assert fastest(calls[0], {"xla": 1.0, "reference": 0.9}) == "xla"  # not clearly


def test_a_composition_is_measured_where_nothing_else_is_whole():
    both = Operation("both", xla(plus_one, platform="cpu"), reference(plus_two, platform="cpu"), composed(plus_one))
    with recorded_calls() as calls:
        jax.eval_shape(lambda x: both(x, by=4), jnp.zeros((2, 3)))
    assert [candidate.name for candidate in supported(calls[0])] == ["xla", "reference"]


def test_a_composition_is_measured_beside_a_kernel_in_c():
    def candidates(*implementations):
        with use_library(Library(digest="0" * 64, level="generic", functions=())), recorded_calls() as calls:
            jax.eval_shape(lambda x: Operation("op", *implementations)(x, by=4), jnp.zeros((2, 3)))
        return [candidate.name for candidate in supported(calls[0])]

    assert candidates(ffi(plus_one), composed(plus_two)) == ["ffi", "composed"]
    assert candidates(ffi(refuses), composed(plus_two)) == ["composed"]
    assert candidates(ffi(plus_one), xla(plus_two, platform="cpu"), composed(plus_two)) == ["ffi", "xla"]


def test_attention_is_measured_over_full_pages():
    pages = KVPages.shapes(6, 16, 2, 8, np.dtype(np.float32))
    shapes = (
        jax.ShapeDtypeStruct((2, 1, 48), np.float32),
        pages,
        *(jax.ShapeDtypeStruct(shape, np.int32) for shape in ((2, 3), (2, 1))),
    )
    with recorded_calls() as calls:
        jax.eval_shape(lambda *args: cached_attention(*args, scale=1.0), *shapes)
    call = next(call for call in calls if call.operation == "decode_attention")
    positions = jax.jit(lambda: call.example(*call.args))()[3]
    assert np.asarray(positions).tolist() == [[47], [47]]
    assert measure(call, rounds=1, seconds=0.001).keys() == {"xla", "reference"}
