import pathlib
import runpy
import sys

ROOT = pathlib.Path(__file__).parents[2]


def test_converts_and_checks(tmp_path, monkeypatch, capsys):
    source, out = ROOT / "tests/goldens/gpt2_tied", tmp_path / "model"
    monkeypatch.setattr(sys, "argv", ["convert_from_hf.py", str(source), str(out)])
    runpy.run_path(str(ROOT / "examples/convert_from_hf.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.startswith(f"{out}: gpt2, ")
    assert "largest difference from the original: 0\n" in printed
