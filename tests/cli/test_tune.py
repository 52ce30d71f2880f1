"""`jaxinfer tune`: measured choices of implementations, kept and forgotten."""

import pytest
from typer.testing import CliRunner

from jaxinfer.cli import app
from jaxinfer.cli.display import PIPED_WIDTH
from jaxinfer.compiled import choices
from jaxinfer.compiled.cpu_library import cpu_library


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path))
    choices.stored_choices.cache_clear()
    yield tmp_path
    choices.stored_choices.cache_clear()


def tune(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["tune", "examples/demo_model", *arguments], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    assert all(len(line.rstrip()) <= PIPED_WIDTH for line in done.output.splitlines())
    return done.output


@pytest.mark.slow
def test_what_is_measured_is_kept_until_it_is_forgotten(folder):
    output = tune("--batch", "1", "--context", "64")
    assert "decode_attention" in output
    assert "cached_attention" in output
    choices.stored_choices.cache_clear()  # as in another process
    entries = choices.stored_choices().entries
    linear = {"norm_linear", "linear_residual", "small_batch_linear"} if cpu_library() else set()
    others = {"decode_attention", "cached_attention", "max_and_argmax", "top_k"}
    assert {operation for operation, _, _ in entries} == others | linear
    assert {name for _, _, name in entries} <= {"ffi", "composed", "xla", "reference"}
    assert all(name in ("ffi", "composed") for operation, _, name in entries if operation in linear)
    tune("--forget")
    choices.stored_choices.cache_clear()
    assert not choices.stored_choices().entries
    assert [path.name for path in (folder / "choices").iterdir()] == [".lock"]
