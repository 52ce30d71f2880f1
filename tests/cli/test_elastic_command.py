"""`jaxinfer elastic`: a task from a folder of images, registered, shown and used."""

import io
import re
import shutil
import signal

import pytest
from rich.console import Console
from typer.testing import CliRunner

from jaxinfer.cli import app, elastic
from jaxinfer.compiled import ProgramSpec
from jaxinfer.disk_cache import cache_folder
from jaxinfer.evaluation.elastic.dashboard import Dashboard
from jaxinfer.evaluation.elastic.measurements import Measurements
from jaxinfer.evaluation.elastic.runs import read_run
from tests.elastic.vits import SMALL, save_vit, stripes

Image = pytest.importorskip("PIL.Image")


def run(*args):
    return CliRunner().invoke(app, ["elastic", *map(str, args)])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model, a folder of images for each class, and a repository with a task of them."""
    base = tmp_path_factory.mktemp("elastic")
    save_vit(base / "vit", config=SMALL)
    dataset = stripes(50)
    for index, (image, label) in enumerate(zip(dataset.images, dataset.labels, strict=True)):
        file = base / "images" / dataset.names[label] / f"{index:02}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(file)
    return base


OPTIONS = ("--task", "stripes", "--max-batch", 1)


@pytest.fixture(scope="module")
def registered(folders):
    """What registering the images as "stripes" shows; and what registering them again does."""
    given = ("--data", folders / "images", "--prompts", "2", "--steps", 20, "--test-share", 0.2)
    return [run("register", folders / "vit", *given, *OPTIONS) for _ in range(2)]


def keep_times(folder, monkeypatch):
    """Keep measured times in this folder, which other tests do not."""
    (folder / "executables").symlink_to(cache_folder() / "executables")
    monkeypatch.setenv("JAXINFER_CACHE", str(folder))


def test_register_profile_classify(folders, registered, tmp_path, monkeypatch):
    images, (done, again) = folders / "images", registered
    assert done.exit_code == 0, done.output
    assert "Registered 'stripes', version 1, 2 classes." in done.output
    assert "+2" in done.output
    assert (folders / "vit" / "tasks" / "stripes" / "v1" / "checkpoint.safetensors").is_file()
    assert again.exit_code == 2
    assert "error: " in again.output
    assert "task 'stripes' is registered" in again.output

    keep_times(tmp_path, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(ProgramSpec, "compile", None)
        shown = run("profile", folders / "vit", *OPTIONS)
    assert shown.exit_code == 0, shown.output
    assert "8 validation images" in shown.stdout
    assert shown.stderr.count("\n") == 1
    assert f"to time them: jaxinfer elastic profile {folders / 'vit'} --task stripes --data DATA]" in shown.stderr

    anew = run("profile", folders / "vit", "--data", images, *OPTIONS)
    assert anew.exit_code == 0, anew.output
    with monkeypatch.context() as patch:
        patch.setattr(ProgramSpec, "compile", None)
        shown = run("profile", folders / "vit", *OPTIONS)
    assert (shown.exit_code, shown.stderr) == (0, ""), shown.output
    assert shown.stdout.count(" ± ") == anew.stdout.count(" ± ") > 0
    assert len(re.findall(r"\d\.\d\d  +\d", shown.stdout)) == len(re.findall(r"\d\.\d\d  +\d", anew.stdout)) > 0
    assert (folders / "vit" / "tasks" / "stripes" / "v2").is_dir()

    files = [*sorted((images / "rows").iterdir())[:2], *sorted((images / "columns").iterdir())[:2]]
    found = run("classify", folders / "vit", *files, "--level", -2, *OPTIONS)
    assert found.exit_code == 0, found.output
    lines = [line.split("\t") for line in found.output.splitlines()]
    assert [line[:2] for line in lines] == [[str(file), file.parent.name] for file in files]
    assert all(0.5 <= float(line[2]) <= 1 for line in lines)


@pytest.mark.slow
def test_run_simulate_report(folders, registered, tmp_path):
    pytest.importorskip("matplotlib")
    data = ("--data", f"stripes={folders / 'images'}")
    tasks, runs = tmp_path / "tasks", tmp_path / "runs"
    options = ("--repository", tasks, "--max-batch", 1)
    assert run("simulate", folders / "vit", *options).output.startswith("error: ")  # there are no tasks
    shutil.copytree(folders / "vit" / "tasks", tasks, dirs_exist_ok=True)
    common = (folders / "vit", *options, *data, "--seconds", 0.1, "--arrivals", "poisson", "--out", runs)
    simulated = run("simulate", *common, "--policy", "elastic", "--policy", "level-2")
    assert simulated.exit_code == 0, simulated.output
    assert "poisson at 0.80x the capacity of level 0, simulated" in simulated.output
    assert "arrivals: rate " in simulated.output
    assert simulated.output.count("right") == 1  # one table for both
    assert simulated.output.count("\nWrote ") == 3
    served = run("run", *common, "--policy", "slack", "--device-memory", "1GiB")
    assert served.exit_code == 0, served.output
    names = [f"simulated-poisson-0.80x-{name}-0" for name in ("elastic", "level-2")] + ["wall-poisson-0.80x-slack-0"]
    assert [file.stem for file in sorted(runs.glob("*.jsonl"))] == names
    (trace,) = (runs / "traces").iterdir()
    again = run("simulate", folders / "vit", *options, *data, "--trace", trace, "--policy", "pets", "--out", runs)
    assert again.exit_code == 0, again.output
    assert len(list(runs.glob("simulated-poisson-0.80x-0-*x-pets-0.jsonl"))) == 1

    check_interrupts(common, runs)

    page = tmp_path / "report.html"
    done = run("report", runs, "--out", page)
    assert done.exit_code == 0, done.output
    assert "poisson at 0.80x the capacity of level 0, live" in done.output
    assert page.read_text().count("<h2>") == 4  # the levels, simulated, live, the trace
    for arguments, message in (
        (
            ("simulate", *common, "--policy", "level-3"),
            "policy 'level-3': there is no such level; levels: -2, -1, 0, 2",
        ),
        (("run", *common, "--task", "faces"), "no task 'faces'; known: stripes"),
        (
            ("run", *common, "--data", "faces=faces"),
            "--data names the task 'faces', which is not queried; queried tasks: stripes",
        ),
        (("report", tmp_path), "no runs (*.jsonl)"),
    ):
        found = run(*arguments)
        assert found.exit_code == 2, found.output
        assert message in " ".join(found.output.split())


def check_interrupts(common, runs):
    """Ctrl-C while queries are sent, or simulated: what is done is shown and recorded."""
    watched, simulated = Dashboard.watch, Measurements.simulate

    def watch(self, sent):
        watched(self, sent)
        if sent > 20:
            signal.raise_signal(signal.SIGINT)

    def simulate(self, *args, **options):
        if interrupted:
            raise KeyboardInterrupt
        interrupted.append(True)
        return simulated(self, *args, **options)

    interrupted = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dashboard, "watch", watch)
        patch.setattr(Measurements, "simulate", simulate)
        live = run("run", *common, "--seconds", 1, "--policy", "slack", "--policy", "pets")
        done = run("simulate", *common, "--policy", "level-2", "--policy", "pets")
    assert (live.exit_code, done.exit_code) == (130, 130)
    assert "Replaced" in live.output
    assert "Replaced" in done.output
    assert " queries\n" in live.output  # fewer than all
    assert "level-2" in done.output
    assert "pets" not in live.output + done.output
    assert read_run(runs / "wall-poisson-0.80x-slack-0.jsonl").served.answers


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--arrivals", "daily"), "--arrivals must be one of wandering, bursty, poisson"),
        (("--load", -1), "--load must be > 0, got -1.0"),
        (("--seconds", "inf"), "--seconds must be > 0, got inf"),
        (("--policy", "best"), "no policy 'best'; known: elastic, paper"),
        (("--data", "stripes"), "--data must be TASK=DATA, got 'stripes'"),
        (
            ("--trace", "missing.jsonl"),
            "error: missing.jsonl: No such file or directory; name a trace, one JSON object a line.",
        ),
        (("--trace", "missing.jsonl", "--load", 2), "--load has no effect with --trace: leave it out"),
        (("--out", __file__), "is not a writable folder"),
    ],
)
def test_bad_options_are_refused_before_the_model_is_opened(tmp_path, arguments, message):
    for command in ("run", "simulate"):
        found = run(command, tmp_path / "no_model", *arguments)
        assert found.exit_code == 2, found.output
        assert message in " ".join(found.output.split())


def test_a_report_of_no_runs_is_refused_before_its_packages_are_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(elastic, "require_extra", lambda *_: pytest.fail("it asked for matplotlib first"))
    done = run("report", tmp_path / "nothere")
    assert done.exit_code == 2
    assert "nothere: no runs (*.jsonl); record some with" in done.output


@pytest.fixture
def without_weights(monkeypatch):
    """Weights are not read, and nothing is compiled."""

    def refuse(*_, **__):
        raise AssertionError("began something long")

    monkeypatch.setattr("jaxinfer.models.files.loading.OpenedModel.read", refuse)
    monkeypatch.setattr("jaxinfer.compiled.spec.ProgramSpec.compile", refuse)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("register", "--data", "nowhere"), "nowhere: no such folder, and no data set with this name; known: digits"),
        (("register", "--data", "digits", "--prompts", "2,x"), "--prompts must be integers separated by commas"),
        (("register", "--data", "digits", "--prompt-mode", "keep"), "'keep' is not a valid PromptMode"),
        (("register", "--data", "digits", "--test-share", "1"), "--test-share must be a number in [0, 1), got 1.0"),
        (("profile",), "no task 'a'; known: none"),
        (("classify", "missing.png"), "missing.png: no such file"),
        (("classify", __file__), "not an image that can be read"),
        (("classify", "IMAGE"), "no task 'a'; known: none"),
    ],
)
def test_bad_input_is_refused_before_weights_are_read(tmp_path, folders, without_weights, command, message):
    name, *rest = command
    image = next((folders / "images" / "rows").iterdir())
    rest = [image if value == "IMAGE" else value for value in rest]
    done = run(name, folders / "vit", *rest, "--task", "a", "--repository", tmp_path / "tasks")
    assert done.exit_code == 2
    assert done.output.startswith("error: ")
    assert message in " ".join(done.output.split())


def test_a_task_that_was_not_profiled_says_what_to_type(folders, tmp_path):
    from jaxinfer.elastic import Service, TrainingConfig

    repository, model = tmp_path / "tasks", folders / "vit"
    plain = Service.from_checkpoint(model, repository=repository, merge_levels=(), max_batch=1)
    plain.register_task("digits", stripes(), training=TrainingConfig(steps=1))
    for command in ("profile", "run", "simulate"):
        task = ("--task", "digits", "--repository", repository)
        found = run(
            command, model, *task, *(() if command == "profile" else ("--data", f"digits={folders / 'images'}"))
        )
        assert found.exit_code == 2
        typed = f"jaxinfer elastic profile {model} --task digits --data digits"
        assert typed in " ".join(found.output.split()), found.output


def test_tables_fit_into_80_columns(folders, registered):
    """Whatever the names and figures, and none is cut."""
    from jaxinfer.cli.elastic.tables import levels_table
    from jaxinfer.elastic import Service
    from jaxinfer.evaluation.elastic.tables import by_cell, terminal_table
    from tests.evaluation.elastic.test_reporting import run_of

    service = Service.from_checkpoint(folders / "vit", max_batch=1)
    for level in service.levels:
        service.latency.renew(level, 1, [12.34567] * 5)
    ((cell, runs),) = by_cell([run_of("paper_profiled"), run_of("level-20", load=1.2)]).items()
    for table in (levels_table(service, "stripes"), terminal_table(cell, runs)):
        texts = []
        for width in (80, 500):
            console = Console(width=width, file=io.StringIO())
            console.print(table)
            texts.append(console.file.getvalue())
        narrow, wide = texts
        assert max(map(len, narrow.splitlines())) <= 80
        assert "…" not in narrow
        assert narrow.split() == wide.split()
        assert len(narrow.splitlines()) == len(wide.splitlines())
