"""What `benchmarks.start` compares: the demo model in the peers' format is the demo model."""

import numpy as np

from benchmarks.demo_for_peers import export_llama
from benchmarks.report import ROOT
from jaxinfer import checkpoints
from jaxinfer.models.files.conversion import convert
from jaxinfer.models.files.description import Description


def test_the_exported_demo_model_converts_back_to_itself(tmp_path):
    export_llama(demo := ROOT / "examples/demo_model", hf := tmp_path / "hf")
    convert(hf, back := tmp_path / "back")
    ours, theirs = checkpoints.load(demo), checkpoints.load(back)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(np.asarray(array, np.float32), np.asarray(theirs[name]))
    assert Description.read(back).config == Description.read(demo).config
