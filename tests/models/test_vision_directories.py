"""Image models as model directories: what comes back, and who refuses them."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from typer.testing import CliRunner

from jaxinfer import LLM, Embedder
from jaxinfer.cli import app
from jaxinfer.models.config import PreprocessingConfig
from jaxinfer.models.files.description import Description
from jaxinfer.models.files.loading import load_model, open_model, save_model
from jaxinfer.models.leaves import layer_of
from jaxinfer.sharding import MeshConfig
from tests.models import vision

CONFIGS = {
    "classifier": vision.CLASSIFIER,
    "detector": vision.DETECTOR,
    "vision_transformer": vision.TRANSFORMER,
}


@pytest.fixture(scope="module", params=CONFIGS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def saved(kind, tmp_path_factory):
    path = tmp_path_factory.mktemp("vision") / kind
    save_model(path, vision.build(CONFIGS[kind]), family="test")
    return path


def test_round_trip(kind, saved):
    loaded = load_model(saved)
    assert loaded.config == CONFIGS[kind]
    assert loaded.description.kind == kind
    layers = {layer_of(name) for name in loaded.leaves}
    assert layers == ({None, 0, 1} if kind == "vision_transformer" else {None})
    actual, expected = nnx.merge(loaded.graphdef, loaded.state), vision.build(CONFIGS[kind])
    assert type(actual) is type(expected)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(actual), nnx.state(expected))


def test_halves_are_widened_on_a_cpu(tmp_path):
    save_model(tmp_path / "model", vision.build(vision.CLASSIFIER), family="test", dtype="bfloat16")
    assert load_model(tmp_path / "model").weights.dtype == jnp.float32
    kept = load_model(tmp_path / "model", dtype="bfloat16")
    assert {leaf.dtype.name for leaf in kept.leaves.values() if leaf.ndim > 1} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in kept.leaves.values() if leaf.ndim == 1} == {"float32"}


def test_directories_from_before_preprocessing(tmp_path):
    """Mean and deviation of pixels were fields of a ViT itself, and its images were resized in a single way."""
    colours = {"mean": (0.25, 0.5, 0.75), "deviation": (0.5, 0.25, 0.5)}
    config = dataclasses.replace(vision.TRANSFORMER, preprocessing=PreprocessingConfig(**colours))
    fields = json.loads(Description(family="vit", config=config).to_json())
    for new in ("class_tokens", "registers", "position_grid", "pooling_heads", "preprocessing"):
        del fields["config"][new]
    fields["config"] |= {f"pixel_{name}": value for name, value in colours.items()}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert Description.read(tmp_path).config == config


def test_a_mesh_of_one_device(saved):
    assert load_model(saved, mesh=MeshConfig()).mesh is not None


def test_meshes(kind, saved):
    assert open_model(saved, mesh=MeshConfig(data=2)).lanes == 2
    if kind in ("classifier", "detector"):
        with pytest.raises(ValueError, match=rf"mesh tensor=2: a convolutional network \({kind}\) has all its weights"):
            open_model(saved, mesh=MeshConfig(tensor=2))
    else:
        assert open_model(saved, mesh=MeshConfig(tensor=2)).lanes == 1
        with pytest.raises(ValueError, match="mesh pipeline=2: only decoders run in stages"):
            open_model(saved, mesh=MeshConfig(pipeline=2))


@pytest.mark.parametrize("kind", ["classifier", "detector"], indirect=True, scope="module")
def test_quantisation_of_convolutions_is_refused(kind, saved):
    with pytest.raises(ValueError, match=f"quantize='int8' is not implemented for an image {kind}: conv"):
        open_model(saved, quantize="int8")


@pytest.mark.slow
def test_vision_transformers_in_int8(tmp_path):
    exact = vision.build(vision.TRANSFORMER)
    pictures = vision.images(2, 32, 32, 3)
    save_model(tmp_path / "model", exact, family="test")
    loaded = load_model(tmp_path / "model", quantize="int8")
    assert loaded.leaves["layers.0.mlp.gate_up.weight"].dtype == jnp.int8
    rounded = nnx.merge(loaded.graphdef, loaded.state)
    expected = vision.run(exact.logits, pictures)
    np.testing.assert_allclose(vision.run(rounded.logits, pictures), expected, atol=0.02 * np.abs(expected).max())


@pytest.mark.parametrize("user", [LLM, Embedder])
def test_users_of_text_refuse_them(kind, saved, user):
    if user is Embedder and kind == "vision_transformer":
        pytest.skip("it embeds images: tests/generation/api/test_image_embedding.py")
    with pytest.raises(ValueError, match=rf"is an image model \({kind}\), which does not read text"):
        user(saved)


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_commands_about_text_refuse_them(kind, saved, command):
    done = CliRunner().invoke(app, [command, str(saved)])
    assert done.exit_code == 2
    assert f"is an image model ({kind})" in done.output.replace("\n", " ")


def test_info(kind, saved):
    done = CliRunner().invoke(app, ["info", str(saved)])
    assert done.exit_code == 0, done.output
    assert f"test ({kind})" in done.output
    assert ", ".join(CONFIGS[kind].labels) in done.output
    assert "vocabulary" not in done.output


def test_labels_are_kept_in_order(tmp_path):
    config = dataclasses.replace(vision.CLASSIFIER, labels=("b", "a", "b"))
    save_model(tmp_path / "model", vision.build(config), family="test")
    assert load_model(tmp_path / "model").config == config
