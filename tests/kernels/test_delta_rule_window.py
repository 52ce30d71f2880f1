"""The gated delta rule over guesses: the states of sequences whose next tokens turn out right in any number."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.pallas_kernels import gated_delta_rule
from jaxinfer.pallas_kernels.cpu.library import use_library
from jaxinfer.pallas_kernels.delta_rule import cpu, reference, xla
from jaxinfer.pallas_kernels.delta_rule.window import over_window
from tests.kernels.cpu_levels import library_of
from tests.kernels.test_delta_rule import KEY_DIM, WEIGHT, check, empty_states, inputs_of, part

WINDOW = 3


@functools.cache
def jitted(implementation):
    def rule(inputs, states, slot, positions, *kept):
        return implementation.gated_delta_rule(*inputs, WEIGHT, states, slot, positions, *kept, key_dim=KEY_DIM)

    return jax.jit(functools.partial(over_window, rule), static_argnames="speculates")


def run(implementation, rows, states, *, speculates):
    """Run rows of (slot, start, arrays) in one call; returns the outputs of the tokens that are no padding."""
    width = 1 + WINDOW if speculates else max(len(arrays[0]) for _, _, arrays in rows)
    packed = tuple(np.full((len(rows), width, *x.shape[1:]), np.nan, x.dtype) for x in rows[0][2])
    positions = np.full((len(rows), width), -1, np.int32)
    for at, (_, start, arrays) in enumerate(rows):
        for target, x in zip(packed, arrays, strict=True):
            target[at, : len(x)] = x
        positions[at, : len(arrays[0])] = start + np.arange(len(arrays[0])) if start >= 0 else -1
    slot = np.array([slot for slot, *_ in rows], np.int32)
    with use_library(library_of(None) if implementation is cpu else None):
        output, states = jitted(implementation)(packed, states, slot, positions, speculates=speculates)
    return [np.asarray(x)[: len(arrays[0])] for x, (*_, arrays) in zip(output, rows, strict=True)], states


@pytest.mark.parametrize("implementation", [reference, xla, cpu], ids=["reference", "xla", "cpu"])
def test_guesses_of_which_any_number_is_right(implementation):
    """Three sequences guess beside padding; one pauses in the midst, and some calls have no guesses."""
    place, right = {0: 21, 2: 2, 1: 7}, {0: (3, 0, 1, 2, 0, 3), 2: (0, 3, 2, 3, 0, 1), 1: (3, 1, 0, 3, 2, 0)}
    sequences = {slot: inputs_of(40) for slot in place}
    states = empty_states(4, WINDOW)  # other sequences have left something there
    prompts = [(slot, 0, part(sequences[slot], 0, count)) for slot, count in place.items()]
    outputs, states = run(implementation, prompts, states, speculates=False)
    found = {slot: [output] for slot, output in zip(place, outputs, strict=True)}

    def step(guesses, *, paused=None, speculates=True):
        """Run a token of each sequence and its guesses. guesses: how many, and how many of them are right."""
        nonlocal states
        rows = []
        for slot, (count, correct) in guesses.items():
            true, wrong = part(sequences[slot], place[slot], place[slot] + 1 + correct), inputs_of(count - correct)
            arrays = [np.concatenate(both) for both in zip(true, wrong, strict=True)]
            rows.append((slot, -1 if slot == paused else place[slot], arrays))
        rows.append((3, -1, inputs_of(1)))
        outputs, states = run(implementation, rows, states, speculates=speculates)
        for (slot, (_, correct)), output in zip(guesses.items(), outputs[:-1], strict=True):
            if slot != paused:
                found[slot].append(output[: 1 + correct])
                place[slot] += 1 + correct

    for i in range(6):
        step({slot: (max(n[i], WINDOW - i % 2), n[i]) for slot, n in right.items()}, paused=1 if i == 2 else None)
        if i == 3:
            step(dict.fromkeys(place, (0, 0)), paused=0, speculates=False)
    for _ in range(2):
        step(dict.fromkeys(place, (0, 0)), speculates=False)
    for slot, arrays in sequences.items():
        check(np.concatenate(found[slot]), states, slot, part(arrays, 0, place[slot]))
    np.testing.assert_array_equal(states.state[3], 7)
    np.testing.assert_array_equal(states.window.qkv[3], 7)


def test_no_branch_copies_states_or_windows():
    """As a decode loop chooses whether a pass has guesses: arrays of 4096 slots are changed in place."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((4096, *x.shape[1:]), x.dtype), empty_states(1, WINDOW))
    tokens = [jax.ShapeDtypeStruct((2, *x.shape), x.dtype) for x in inputs_of(1 + WINDOW)]
    indices = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2,), (2, 1 + WINDOW))]

    def loop(tokens, indices, layers):
        def branch(size):
            def run(state):
                total, layers, moved = *state, []
                for cache in layers:
                    inputs, (slot, positions) = [x[:, :size] + total for x in tokens], indices
                    output, cache = gated_delta_rule(
                        *inputs, WEIGHT, cache, slot, positions[:, :size], key_dim=KEY_DIM, speculates=size > 1
                    )
                    total += jnp.sum(output)
                    moved.append(cache)
                return total, moved

            return run

        def body(i, state):
            return jax.lax.cond(state[0] > 0, branch(1 + WINDOW), branch(1), state)

        return jax.lax.fori_loop(0, 5, body, (jnp.float32(0), layers))

    compiled = jax.jit(loop, donate_argnums=2).lower(tokens, indices, [shapes, shapes]).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert memory is not None
    assert not [line for line in text.splitlines() if " copy(" in line and "[4096," in line]
    assert memory.temp_size_in_bytes < 1 << 20
