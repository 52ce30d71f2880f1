import os
import stat

from typer.testing import CliRunner

from jaxinfer.cli import app
from jaxinfer.disk_cache import KeptFiles
from jaxinfer.models.files.loading import open_model
from jaxinfer.streaming.layer_folders import write_layer_files


def cells(output):
    """The rows of the table by their first cell."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if "│" in line]
    return {row[0]: row[1:3] for row in rows}


def test_what_is_kept_is_shown_and_cleared(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "mine.txt").write_text("not of the cache")
    kept = KeptFiles(tmp_path / "executables", max_bytes=10_000)
    kept.put("a", bytes(968))
    kept.put("b", bytes(968))
    result = CliRunner().invoke(app, ["cache"])
    assert result.exit_code == 0
    assert str(tmp_path) in result.stdout
    assert cells(result.stdout) == {
        "executables": ["2", "2.0 kB"],
        "leaves": ["0", "0 bytes"],
        "experts": ["0", "0 bytes"],
        "costs": ["0", "0 bytes"],
        "choices": ["0", "0 bytes"],
    }
    assert cells(CliRunner().invoke(app, ["cache", "--clear"]).stdout)["executables"] == ["0", "0 bytes"]
    assert kept.get("a") is None
    assert os.listdir(tmp_path) == ["mine.txt"]
    kept.put("a", b"again")
    assert stat.S_IMODE(kept.folder.stat().st_mode) == 0o700


def test_layer_files_are_shown_and_cleared(model_dir, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "300")
    folder = write_layer_files(open_model(model_dir), tmp_path)
    unfinished = tmp_path / f".layers-{'0' * 16}.partial"
    unfinished.mkdir()
    shown = cells(CliRunner().invoke(app, ["cache", str(tmp_path)]).stdout)
    assert shown[folder.name][1] == f"{model_dir}: float32"
    assert shown[unfinished.name] == ["0 bytes", "being written, or left by a process that was killed"]
    cleared = CliRunner().invoke(app, ["cache", str(tmp_path), "--clear"])
    assert cleared.exit_code == 0
    assert folder.name not in cleared.stdout
    assert not os.listdir(tmp_path)
    done = CliRunner().invoke(app, ["cache", str(tmp_path / "none")])
    assert (done.exit_code, "no such directory" in done.stderr) == (2, True)
