"""How deep a reader goes from a layer's call to the softmax of its cached attention on a CPU."""

import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxinfer.models import Decoder, TokenRows, WeightFormat
from jaxinfer.models.layers.layer import TransformerLayer
from tests import tiny
from tests.models import goldens

ROOT = Path(__file__).parents[2]
MOST = 6
"""Frames of ours below the layer's call."""


class Frame(NamedTuple):
    """A function of ours on the stack, and its file, from the root of the repository."""

    path: str
    name: str


def frames_below_the_layer() -> list[Frame] | None:
    """Return our frames between the layer's call and whoever called our caller, outermost first; None: no layer."""
    frames, frame = [], sys._getframe(2)
    while frame.f_code is not TransformerLayer.__call__.__code__:
        path = Path(frame.f_code.co_filename).resolve()
        if path.is_relative_to(ROOT / "jaxinfer") or path.is_relative_to(ROOT / "pallas_kernels"):
            frames.append(Frame(str(path.relative_to(ROOT)), frame.f_code.co_qualname))
        if (frame := frame.f_back) is None:
            return None
    return frames[::-1]


@pytest.fixture
def stacks(monkeypatch):
    """Our frames at every `exp` that a layer traces: those of the softmax, as the tiny MLP has a sigmoid."""
    stacks, exp = [], jnp.exp

    def recording_exp(x):
        if frames := frames_below_the_layer():
            stacks.append(frames)
        return exp(x)

    monkeypatch.setattr(jnp, "exp", recording_exp)
    return stacks


@pytest.mark.parametrize("tokens", [1, 20], ids=["decode", "prefill"])
def test_frames_from_a_layer_to_the_softmax(tokens, stacks):
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(tiny.CONFIG, WeightFormat(), rngs=nnx.Rngs(0))))
    caches, page_table = goldens.empty_cache(tiny.CONFIG, 2, tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens), (2, tokens))

    def run(state, caches):
        return nnx.merge(graph, state).forward((TokenRows(positions, positions, page_table),), caches)

    jax.eval_shape(run, state, caches)
    assert stacks
    for frames in stacks:
        in_models = [frame for frame in frames if frame.path.startswith("jaxinfer/models/")]
        assert in_models == [("jaxinfer/models/layers/attention.py", "Attention.heads")]
        assert len(frames) <= MOST, frames
