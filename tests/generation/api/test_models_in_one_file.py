"""Models in one file do all that models in many files do, with the same results."""

import pathlib
import shutil

import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.checkpoints import CheckpointError, single_file
from jaxinfer.checkpoints.single_file import SINGLE_FILE
from jaxinfer.generation import Embedder
from jaxinfer.models.files.conversion import convert
from jaxinfer.models.files.loading import load_model
from jaxinfer.models.files.verification import compare_tensors
from jaxinfer.sharding import MeshConfig
from jaxinfer.streaming.layer_folders import open_layer_files, write_layer_files
from tests.generation.api.test_embedding import GOLDEN as ENCODER
from tests.models import goldens
from tests.tiny import ONE_KIND, save_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
ONE = {"max_batch": 1, "token_budget": 8, "chunk_size": 8}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A decoder with a tokenizer and a chat template, in one file."""
    path = save_tiny(tmp_path_factory.mktemp("models") / "tiny", layout="single-file", config=ONE_KIND)
    assert [file.name for file in path.iterdir()] == [SINGLE_FILE]
    return path


@pytest.fixture(scope="module")
def in_many_files(tmp_path_factory):
    """The same decoder."""
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny", config=ONE_KIND)


def _tokens(path, **options):
    with LLM(path, **ONE, **options) as llm:
        outputs = llm.generate(["hello", "what is"], GREEDY)
        chat = llm.chat([{"role": "user", "content": "hello"}], GREEDY)
    return [(output.prompt_token_ids, output.outputs[0].text) for output in [*outputs, chat]]


def test_a_language_model(tiny, in_many_files):
    assert _tokens(tiny) == _tokens(in_many_files)


@pytest.mark.slow
def test_on_a_mesh_and_quantised(tiny, in_many_files):
    options = {"mesh": MeshConfig(tensor=4), "quantize": "int8"}
    assert _tokens(tiny, **options) == _tokens(in_many_files, **options)


@pytest.mark.slow
def test_streamed_from_disk(tiny, in_many_files, tmp_path):
    assert _tokens(tiny, weights="disk", layer_files=tmp_path) == _tokens(in_many_files)
    assert [file.name for file in tiny.iterdir()] == [SINGLE_FILE]


def test_layer_files_are_found_beside_it(tiny, tmp_path):
    model = shutil.copytree(tiny, tmp_path / "model")
    folder = write_layer_files(load_model(model), model)
    assert {file.name for file in model.iterdir()} == {SINGLE_FILE, folder.name}
    assert open_layer_files(load_model(model)).folder == folder


@pytest.mark.parametrize("options", [{}, {"quantize": "int4"}, {"quantize": "fp8"}, {"dtype": "bfloat16"}], ids=str)
def test_a_converted_model_is_that_of_many_files(tmp_path, options):
    golden = goldens.DIRECTORY / "llama_llama3"
    convert(golden, tmp_path / "one", layout="single-file", **options)
    convert(golden, tmp_path / "many", **options)
    for loading in ({}, {"mesh": MeshConfig(tensor=4)}):
        ours, theirs = (load_model(tmp_path / name, **loading).leaves for name in ("one", "many"))
        assert ours.keys() == theirs.keys()
        for name, leaf in ours.items():
            assert (leaf.dtype, leaf.sharding) == (theirs[name].dtype, theirs[name].sharding)
            np.testing.assert_array_equal(leaf, theirs[name])
    assert compare_tensors(tmp_path / "one", golden).beyond == ()


def test_an_encoder(tmp_path):
    convert(ENCODER, tmp_path / "one", layout="single-file")
    convert(ENCODER, tmp_path / "many")
    vectors = [Embedder(tmp_path / name, max_batch=2).embed([[1, 2, 3], [4]]) for name in ("one", "many")]
    np.testing.assert_array_equal(*vectors)


def test_a_large_model_is_refused_before_a_tensor_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(single_file, "MAX_BYTES", 1000)
    monkeypatch.setattr("jaxinfer.models.files.conversion.HuggingFaceModel.read", None)
    with pytest.raises(CheckpointError, match=r"model: .* MiB exceed the .* MiB that a single file may have"):
        convert(goldens.DIRECTORY / "llama_llama3", tmp_path / "model", layout="single-file")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_model_is_refused(tiny, tmp_path):
    file = pathlib.Path(shutil.copytree(tiny, tmp_path / "model")) / SINGLE_FILE
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"sha256 of .* differs from manifest\.json"):
        LLM(file.parent, **ONE)
