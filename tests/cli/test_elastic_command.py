"""`jaxinfer elastic`: a task from a folder of images, registered, shown and used."""

import pytest
from typer.testing import CliRunner

from jaxinfer.cli import app
from tests.elastic.vits import save_vit, stripes

Image = pytest.importorskip("PIL.Image")


def run(*args):
    return CliRunner().invoke(app, ["elastic", *map(str, args)])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model, a folder of images for each class, and a repository with a task of them."""
    base = tmp_path_factory.mktemp("elastic")
    save_vit(base / "vit")
    dataset = stripes(60)
    for index, (image, label) in enumerate(zip(dataset.images, dataset.labels, strict=True)):
        file = base / "images" / dataset.names[label] / f"{index:02}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(file)
    return base


def test_register_profile_classify(folders):
    options = ("--task", "stripes", "--max-batch", 1)
    images, given = folders / "images", (folders / "vit", "--data", folders / "images", "--prompts", "2", "--steps", 20)
    done = run("register", *given, *options)
    assert done.exit_code == 0, done.output
    assert "Registered 'stripes', version 1, 2 classes." in done.output
    assert "+2" in done.output
    assert (folders / "vit" / "tasks" / "stripes" / "v1" / "checkpoint.safetensors").is_file()
    again = run("register", *given, *options)
    assert again.exit_code == 2
    assert "error: " in again.output
    assert "task 'stripes' is registered" in again.output

    shown = run("profile", folders / "vit", *options)
    assert shown.exit_code == 0, shown.output
    assert "12 validation images" in shown.output
    anew = run("profile", folders / "vit", "--data", images, *options)
    assert anew.exit_code == 0, anew.output
    assert (folders / "vit" / "tasks" / "stripes" / "v2").is_dir()

    files = [*sorted((images / "rows").iterdir())[:2], *sorted((images / "columns").iterdir())[:2]]
    found = run("classify", folders / "vit", *files, "--level", -2, *options)
    assert found.exit_code == 0, found.output
    lines = [line.split("\t") for line in found.output.splitlines()]
    assert [line[:2] for line in lines] == [[str(file), file.parent.name] for file in files]
    assert all(0.5 <= float(line[2]) <= 1 for line in lines)


def test_serve_simulate_report(folders, tmp_path):
    pytest.importorskip("matplotlib")
    data = ("--data", f"stripes={folders / 'images'}")
    tasks, runs = tmp_path / "tasks", tmp_path / "runs"
    options = ("--repository", tasks, "--max-batch", 1)
    assert run("simulate", folders / "vit", *options).output.startswith("error: ")  # there are no tasks
    given = (folders / "vit", "--data", folders / "images", "--steps", 20, "--task", "stripes", *options)
    assert run("register", *given, "--test-share", 0.25).exit_code == 0
    common = (folders / "vit", *options, *data, "--seconds", 0.3, "--arrivals", "poisson", "--out", runs)
    simulated = run("simulate", *common, "--policy", "elastic", "--policy", "level-2")
    assert simulated.exit_code == 0, simulated.output
    assert "poisson at 0.80x the capacity of level 0, simulated" in simulated.output
    assert "arrivals: rate " in simulated.output
    served = run("serve", *common, "--policy", "slack", "--device-memory", "1GiB")
    assert served.exit_code == 0, served.output
    names = [f"simulated-poisson-0.80x-{name}-0" for name in ("elastic", "level-2")] + ["wall-poisson-0.80x-slack-0"]
    assert [file.stem for file in sorted(runs.glob("*.jsonl"))] == names
    (trace,) = (runs / "traces").iterdir()
    again = run("simulate", folders / "vit", *options, *data, "--trace", trace, "--policy", "pets", "--out", runs)
    assert again.exit_code == 0, again.output
    assert len(list(runs.glob("simulated-poisson-0.80x-0-*x-pets-0.jsonl"))) == 1

    page = tmp_path / "report.html"
    done = run("report", runs, "--out", page)
    assert done.exit_code == 0, done.output
    assert "poisson at 0.80x the capacity of level 0, live" in done.output
    assert page.read_text().count("<h2>") == 4  # the levels, simulated, live, the trace
    for arguments, message in (
        (("simulate", *common, "--arrivals", "daily"), "--arrivals must be one of wandering, bursty, poisson"),
        (("simulate", *common, "--load", -1), "--load must be > 0, got -1.0"),
        (("serve", *common, "--policy", "best"), "no policy 'best'; known: elastic, paper"),
        (("serve", *common, "--data", "stripes"), "--data must be TASK=DATA, got 'stripes'"),
        (("serve", *common, "--task", "faces"), "no task 'faces'; registered: stripes"),
        (("report", tmp_path), "no runs (*.jsonl)"),
    ):
        found = run(*arguments)
        assert found.exit_code == 2, found.output
        assert message in " ".join(found.output.split())


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("register", "--data", "nowhere"), "nowhere: no such folder, and no data set with this name; known: digits"),
        (("register", "--data", "digits", "--prompts", "2,x"), "--prompts must be integers separated by commas"),
        (("register", "--data", "digits", "--prompt-mode", "keep"), "'keep' is not a valid PromptMode"),
        (("profile",), "no task 'a'; registered: none"),
        (("classify", "missing.png"), "missing.png: no such file"),
    ],
)
def test_bad_input(tmp_path, folders, command, message):
    name, *rest = command
    done = run(name, folders / "vit", *rest, "--task", "a", "--repository", tmp_path / "tasks")
    assert done.exit_code == 2
    assert done.output.startswith("error: ")
    assert message in " ".join(done.output.split())
