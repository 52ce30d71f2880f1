"""`jaxinfer embed` as a user runs it."""

import json
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from jaxinfer.cli import app
from jaxinfer.generation import Embedder
from jaxinfer.models.files.loading import OpenedModel

TEXTS = ["import os", "x" * 90, "import sys"]


def run(*arguments, code=0):
    done = CliRunner().invoke(app, ["embed", *map(str, arguments), "--max-batch", "1"])
    assert done.exit_code == code, done.output
    return done


@pytest.fixture(scope="module")
def vectors(model_dir):
    return Embedder(model_dir, max_batch=1).embed([*TEXTS, [5, 17, 3]])


def test_vectors_are_those_of_the_library(model_dir, vectors, tmp_path):
    (tmp_path / "texts.txt").write_text(TEXTS[2] + "\n")
    arguments = (model_dir, *TEXTS[:2], "--prompts-file", tmp_path / "texts.txt", "--token-ids", "5,17,3")
    lines = [json.loads(line) for line in run(*arguments).stdout.splitlines()]
    assert [line.get("prompt", line.get("token_ids")) for line in lines] == [*TEXTS, [5, 17, 3]]
    assert [line["index"] for line in lines] == [0, 1, 2, 3]
    np.testing.assert_allclose([line["embedding"] for line in lines], vectors, atol=1e-5)
    assert run(*arguments, "--output", tmp_path / "out.npy").stdout == ""
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), vectors, atol=1e-5)
    assert not list(tmp_path.glob("*.partial"))


def test_similarities_are_a_table(model_dir, vectors, monkeypatch):
    monkeypatch.setattr("jaxinfer.cli.display.PIPED_WIDTH", 80)
    shown = run(model_dir, *TEXTS, "--similarity").stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert "import sys" in shown
    assert f"{vectors[0] @ vectors[2]:.2f}" in shown
    many = run(model_dir, *TEXTS, *"abcdefghij", "--similarity").stdout
    assert "most similar" in many
    assert max(map(len, many.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "error: No prompt: give a text, --prompts-file or --token-ids."),
        (("a", "--output", "vectors.txt"), "error: --output vectors.txt: must end in .npy"),
        (
            ("a", "--output", "nowhere/x.npy"),
            "error: --output nowhere/x.npy: nowhere is not a directory that can be written to.",
        ),
        (("--image", "a.png"), "error: --image: "),
        (("a", "--weights", "device", "--prefetch", "3"), "error: --prefetch=3 has no effect with weights='device'"),
        (("",), "error: Text 0: The prompt is empty"),
    ],
)
def test_errors_take_one_line(model_dir, monkeypatch, arguments, message):
    if arguments and arguments != ("",):
        monkeypatch.setattr(OpenedModel, "read", None)  # no weight is read
    done = run(model_dir, *arguments, code=2)
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


def test_a_model_of_images_is_asked_for_images_before_it_is_read(vit, tmp_path, monkeypatch):
    monkeypatch.setattr(OpenedModel, "read", None)
    (tmp_path / "torn.png").write_bytes(b"png")
    for arguments, message in (
        (("a text",), f"error: {vit} is a model of images; name files with --image.\n"),
        (("--image", tmp_path / "none.png"), f"error: {tmp_path / 'none.png'}: no such file.\n"),
        (("--image", tmp_path / "torn.png"), f"error: {tmp_path / 'torn.png'}: not an image that can be read"),
    ):
        assert run(vit, *arguments, code=2).stderr.startswith(message)
    monkeypatch.setitem(sys.modules, "PIL", None)
    done = run(vit, "--image", tmp_path / "torn.png", code=2)
    assert done.stderr == "error: reading image files needs pillow, of the extra images: pip install pillow\n"
