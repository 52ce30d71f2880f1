"""The elastic examples, tiny: a backbone is trained, a task registered, its test images classified at all levels."""

import pytest

from examples import elastic_vision, train_elastic_vit
from tests.elastic.vits import CONFIG, save_vit

pytest.importorskip("skimage")
pytest.importorskip("mlxtend")


def test_tasks_are_registered_once_and_compared(tmp_path, capsys):
    model = save_vit(tmp_path / "vit")
    options = ["--model", model, "--repository", tmp_path / "tasks", "--merge-levels", -4, "--max-batch", 2]
    args = elastic_vision.parse([*map(str, options), "--tasks", "faces", "--prompts", "2", "--steps", "20"])
    elastic_vision.main(args)
    elastic_vision.main(args)  # does not train again
    assert [path.name for path in (tmp_path / "tasks" / "faces").iterdir()] == ["v1"]
    printed = capsys.readouterr().out
    assert printed.count("6 programs, none compiled from here on") == 2
    for level in ("-4", "0", "+2"):
        assert any(line.split()[:1] == [level] for line in printed.splitlines()), printed
    assert "faces at level -4: " in printed


def test_a_backbone_is_trained(tmp_path):
    args = train_elastic_vit.parse(["--export", str(tmp_path / "vit"), "--max-steps", "2", "--batch", "10"])
    model = train_elastic_vit.train(args, CONFIG)
    assert model.cfg == CONFIG
