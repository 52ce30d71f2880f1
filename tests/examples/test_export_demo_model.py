"""The demo model in other formats: from a Hugging Face folder it comes back exactly, from GGUF within Q8_0's steps."""

import dataclasses

import numpy as np
from tokenizers import Tokenizer

from examples.export_demo_model import DEMO, export_gguf, export_llama
from jaxinfer import checkpoints
from jaxinfer.models.files.conversion import convert
from jaxinfer.models.files.description import Description

CODE = "class Queue:\n    def __init__(self, items=(1, 23)):\n        self.items = list(items)  # a copy\n\n\n"


def test_the_demo_model_comes_back_from_hugging_face(tmp_path):
    export_llama(DEMO, hf := tmp_path / "hf")
    convert(hf, back := tmp_path / "back")
    ours, theirs = checkpoints.load(DEMO), checkpoints.load(back)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(np.asarray(array, np.float32), np.asarray(theirs[name]))
    assert Description.read(back).config == Description.read(DEMO).config


def test_the_demo_model_comes_back_from_gguf(tmp_path):
    export_gguf(DEMO, file := tmp_path / "demo.gguf")
    convert(file, back := tmp_path / "back", dtype="float32")
    ours, theirs = checkpoints.load(DEMO), checkpoints.load(back)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        array = np.asarray(array, np.float32)
        step = np.abs(array).max(axis=-1, keepdims=True) / 127  # of Q8_0, at most
        assert (
            np.abs(array - np.asarray(theirs[name])) <= 0.6 * step
        ).all()  # half a step, and that steps are in float16
    original, description = Description.read(DEMO), Description.read(back)
    norm = dataclasses.replace(original.config.norm, eps=float(np.float32(original.config.norm.eps)))
    assert description.config == dataclasses.replace(original.config, norm=norm)
    assert description.eos_ids == original.eos_ids
    tokenizers = [Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (DEMO, back)]
    ids, others = (tokenizer.encode(CODE).ids for tokenizer in tokenizers)
    assert ids == others
