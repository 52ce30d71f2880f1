"""Batches through stateless models: padded, timed, and halved where memory is short."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.compiled import Costs, ProgramSpec
from jaxinfer.execution.forward import BatchSize, Forward

WEIGHT = np.arange(3, dtype=np.float32)
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes."


class Scale(BatchSize):
    program = "scale"


def build(static, sizes):
    return lambda weight, x, count: {"scaled": x * weight + count[:, None], "count": count}


def arguments(sizes):
    vector, number = ((sizes.batch, 3), jnp.float32), ((sizes.batch,), jnp.int32)
    return (jax.ShapeDtypeStruct((3,), jnp.float32), *(jax.ShapeDtypeStruct(*x) for x in (vector, number)))


SPEC = ProgramSpec(
    sizes=Scale, build=build, arguments=arguments, reachable=lambda sizes: (Scale(batch=size) for size in sizes)
)


def inputs(count):
    return np.arange(3 * count, dtype=np.float32).reshape(count, 3), list(range(count))


def check(outputs, count):
    x, numbers = inputs(count)
    np.testing.assert_array_equal(outputs["scaled"], x * WEIGHT + np.array(numbers)[:, None])
    assert outputs["count"].tolist() == numbers


def failing(forward, monkeypatch, fails, *, late=False):
    """Have programs of some sizes run out of memory, at once or when results are waited for; returns all sizes run."""
    program, sizes = forward.program, []

    class Late:
        def is_ready(self):
            return False

        def __array__(self, *_, **__):
            raise jax.errors.JaxRuntimeError(OUT_OF_MEMORY)

    def no_memory(*arguments):
        if late:
            return Late()
        raise jax.errors.JaxRuntimeError(OUT_OF_MEMORY)

    def limited(batch):
        sizes.append(batch)
        return no_memory if fails(batch) else program(batch)

    monkeypatch.setattr(forward, "program", limited)
    return sizes


def test_batches_are_padded_to_the_next_size():
    forward = Forward(SPEC, max_batch=6)
    assert forward.sizes == (1, 2, 4, 6)
    for count in (1, 3, 5, 6):
        check(forward.run((WEIGHT,), *inputs(count)), count)
    assert [size for size in forward.sizes if forward.is_compiled(size)] == [1, 4, 6]
    check(forward.launch((WEIGHT,), *inputs(1), sizes=(4, 6)).result(), 1)
    with pytest.raises(ValueError, match="7 is larger than the largest bucket, 6"):
        forward.run((WEIGHT,), *inputs(7))
    assert forward.workspace_bytes(4) >= 0


@pytest.mark.parametrize("late", [False, True])
def test_a_batch_that_does_not_fit_runs_in_halves(monkeypatch, late):
    forward = Forward(SPEC, max_batch=8)
    sizes = failing(forward, monkeypatch, lambda batch: batch > 4, late=late)
    check(forward.run((WEIGHT,), *inputs(7)), 7)
    assert sizes == [8, 4, 4]
    monkeypatch.undo()
    sizes = failing(forward, monkeypatch, lambda batch: True, late=late)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        forward.run((WEIGHT,), *inputs(2))
    assert sizes == [2, 1]
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        forward.run((WEIGHT,), *inputs(1))


def test_other_errors_are_the_batchs(monkeypatch):
    forward = Forward(SPEC, max_batch=2)
    with pytest.raises(TypeError):
        forward.run((WEIGHT, WEIGHT), *inputs(2))


def test_the_times_of_batches_are_recorded():
    costs = Costs()
    forward = Forward(SPEC, max_batch=4, costs=costs)
    for _ in range(3):
        check(forward.run((WEIGHT,), *inputs(3)), 3)
    assert costs.mean("scale", batch=4) > 0
    assert costs.mean("scale", batch=2) is None
