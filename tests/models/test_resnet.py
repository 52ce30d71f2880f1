"""The image classifier."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from jaxinfer.models import ResNet, WeightFormat
from jaxinfer.models.abstract import abstract_model, merge_model, variables
from tests.models import vision


def test_probabilities():
    model = vision.build(vision.CLASSIFIER)
    assert isinstance(model, ResNet)
    probabilities = vision.run(model, vision.images(2, 32, 32, 3))
    assert probabilities.shape == (2, 3)
    assert probabilities.dtype == np.float32
    np.testing.assert_allclose(probabilities.sum(-1), 1, rtol=1e-6)
    assert np.ptp(probabilities[:, 0]) > 1e-4


def test_other_sizes_are_resized():
    model, picture = vision.build(vision.CLASSIFIER), vision.images(1, 16, 16, 3)
    twice = np.asarray(jax.image.resize(picture.astype(np.float32), (1, 32, 32, 3), "bilinear", antialias=False))
    exact = np.rint(twice).astype(np.uint8)  # rounded to pixels: nearly the same image
    np.testing.assert_allclose(vision.run(model, picture), vision.run(model, exact), atol=2e-3)


def test_can_be_trained():
    """Under jit as well: the maximum of a window has a gradient."""
    model, pictures = vision.build(vision.CLASSIFIER), vision.images(2, 32, 32, 3)
    graph, params = nnx.split(model)
    gradients = jax.jit(jax.grad(lambda params: nnx.merge(graph, params)(pictures)[:, 0].sum()))(params)
    assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(gradients["stem"]))


def test_bfloat16_is_near():
    model, picture = vision.build(vision.CLASSIFIER), vision.images(2, 32, 32, 3)
    leaves = [x.astype(np.float32) for x in jax.tree.leaves(nnx.state(model))]
    shapes = [leaf.dtype for leaf in variables(abstract_model(vision.CLASSIFIER, _BF16)).values()]
    halved = merge_model(vision.CLASSIFIER, _BF16, [x.astype(t) for x, t in zip(leaves, shapes, strict=True)])
    exact, rounded = vision.run(model, picture), vision.run(halved, picture)
    assert rounded.dtype == np.float32
    np.testing.assert_allclose(exact, rounded, atol=2e-2)


_BF16 = WeightFormat(dtype=np.dtype("bfloat16"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": ()}, r"ResNetConfig.labels must be a tuple with the name of each class, got \(\)"),
        ({"labels": "ok"}, "got 'ok'"),
        ({"labels": ("ok", 1)}, r"got \('ok', 1\)"),
        ({"stem": 0}, "ResNetConfig.stem must be >= 1, got 0"),
        ({"depths": (1, 0)}, r"ResNetConfig.depths must hold sizes >= 1, got \(1, 0\)"),
        ({"depths": (1,)}, "must be of one length"),
        ({"widths": (16, 30)}, "must be multiples of 4"),
    ],
)
def test_configs_that_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(vision.CLASSIFIER, **changes)
