"""The elastic examples, tiny: a backbone is trained, a task registered, its test images classified at all levels."""

import pytest

from examples import elastic_vision, train_elastic_vit
from tests.elastic.vits import SMALL, save_vit

pytest.importorskip("skimage")
pytest.importorskip("mlxtend")


@pytest.mark.slow
def test_tasks_are_registered_once_compared_and_served(tmp_path, capsys):
    model = save_vit(tmp_path / "vit", config=SMALL)
    options = ["--model", model, "--repository", model / "tasks", "--merge-levels", -2, "--max-batch", 1]
    args = elastic_vision.parse([*map(str, options), "--tasks", "faces", "--prompts", "2", "--steps", "20"])
    elastic_vision.main(args)
    elastic_vision.main(args)  # does not train again
    assert [path.name for path in (model / "tasks" / "faces").iterdir()] == ["v1"]
    printed = capsys.readouterr().out
    assert printed.count("3 programs, none compiled from here on") == 2
    for level in ("-2", "0", "+2"):
        assert any(line.split()[:1] == [level] for line in printed.splitlines()), printed
    assert "faces at level -2: " in printed

    elastic_serving = pytest.importorskip("examples.elastic_serving")  # matplotlib
    options = ["--model", model, "--tasks", "faces", "--max-batch", 1, "--merge-levels", -2, "--out", tmp_path / "runs"]
    short = ["--seconds", 0.2, "--samples", 5, "--policies", "elastic", "level-2"]
    elastic_serving.main(elastic_serving.parse(list(map(str, [*options, *short]))))
    printed = capsys.readouterr().out
    assert "bursty at 0.80x the capacity of level 0, live" in printed
    files = sorted(file.name for file in (tmp_path / "runs").iterdir())
    assert files == ["report.html", "wall-bursty-0.80x-elastic-0.jsonl", "wall-bursty-0.80x-level-2-0.jsonl"]


@pytest.mark.slow
def test_a_backbone_is_trained(tmp_path):
    args = train_elastic_vit.parse(["--export", str(tmp_path / "vit"), "--max-steps", "2", "--batch", "10"])
    model = train_elastic_vit.train(args, SMALL)
    assert model.cfg == SMALL
