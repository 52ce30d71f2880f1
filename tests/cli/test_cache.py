import os
import re
import stat
from pathlib import Path

from typer.testing import CliRunner

from jaxinfer.cli import app
from jaxinfer.cli.cache import KINDS
from jaxinfer.disk_cache import KeptFiles
from jaxinfer.hub.conversions import CONVERSION
from jaxinfer.models.files.loading import open_model
from jaxinfer.streaming.layer_folders import write_layer_files

ROOT = Path(__file__).parents[2]


def cells(output):
    """The rows of the table by their first cell."""
    rows = [re.split(r" {2,}", line.strip()) for line in output.splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) > 2}


def test_all_that_is_put_into_the_cache_is_known():
    sources = [file for room in ("jaxinfer", "examples", "benchmarks") for file in (ROOT / room).rglob("*.py")]
    names = {name for file in sources for name in re.findall(r'cache_folder\(\) / "([^"]+)"', file.read_text())}
    assert names == KINDS.keys()


def test_what_is_kept_is_shown_and_cleared(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path))
    (tmp_path / "mine.txt").write_text("not of the cache")
    kept = KeptFiles(tmp_path / "executables", max_bytes=10_000)
    kept.put("a", bytes(968))
    kept.put("b", bytes(968))
    (tmp_path / "models" / "from-an-example").mkdir(parents=True)
    (tmp_path / "models" / "from-an-example" / "weights").write_bytes(bytes(3000))
    result = CliRunner().invoke(app, ["cache"])
    assert result.exit_code == 0
    assert str(tmp_path) in result.stdout
    nothing = {name: [meaning, "0", "0 bytes"] for name, meaning in KINDS.items()}
    kinds = {
        "executables": [KINDS["executables"], "2", "2.0 kB"],
        "models": [KINDS["models"], "1", "3.0 kB"],
    }
    assert cells(result.stdout) == nothing | kinds
    cleared = CliRunner().invoke(app, ["cache", "--clear"]).stdout
    assert cells(cleared) == nothing
    assert cleared.endswith("Freed 5.0 kB.\n")
    assert kept.get("a") is None
    assert os.listdir(tmp_path) == ["mine.txt"]
    kept.put("a", b"again")
    assert stat.S_IMODE(kept.folder.stat().st_mode) == 0o700


def test_models_of_earlier_versions_are_shown_and_cleared(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path))
    models = tmp_path / "models"
    old, new = models / f"Qwen--Qwen3@0123456789ab.{CONVERSION - 1}", models / f"tiny@0123456789ab.{CONVERSION}"
    others = [models / "from-an-example", models / "mine@home.draft"]
    for folder in (old, new, *others):
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(bytes(3000))
    shown = CliRunner().invoke(app, ["cache"]).stdout
    assert re.search(rf"{old.name} +3.0 kB", shown)
    assert not any(folder.name in shown for folder in (new, *others))
    cleared = CliRunner().invoke(app, ["cache", "--clear-old"])
    assert (cleared.exit_code, cleared.stdout.endswith("Freed 3.0 kB.\n")) == (0, True)
    assert old.name not in cleared.stdout
    assert sorted(models.iterdir()) == sorted([new, *others])
    refused = CliRunner().invoke(app, ["cache", "--clear-old", str(tmp_path)])
    assert (refused.exit_code, "leave one of them out" in refused.stderr) == (2, True)


def test_layer_files_are_shown_and_cleared(model_dir, monkeypatch, tmp_path):
    folder = write_layer_files(open_model(model_dir), tmp_path)
    unfinished = tmp_path / f".layers-{'0' * 16}.partial"
    unfinished.mkdir()
    shown = cells(CliRunner().invoke(app, ["cache", str(tmp_path)]).stdout)
    assert shown[unfinished.name] == ["being written, or left by a process that was killed", "0 bytes"]
    assert shown[folder.name][-1].endswith("kB")
    cleared = CliRunner().invoke(app, ["cache", str(tmp_path), "--clear"])
    assert cleared.exit_code == 0
    assert folder.name not in cleared.stdout
    assert cleared.stdout.endswith(f"Freed {shown[folder.name][-1]}.\n")
    assert not os.listdir(tmp_path)
    done = CliRunner().invoke(app, ["cache", str(tmp_path / "none")])
    assert (done.exit_code, "no such directory" in done.stderr) == (2, True)
