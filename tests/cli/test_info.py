import inspect
import pathlib
import re

import pytest
from rich.filesize import decimal
from typer.testing import CliRunner

from jaxinfer import LLM
from jaxinfer.cli import app
from jaxinfer.cli.generate import generate
from jaxinfer.generation.api.build import build_engine
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.models.files.conversion import convert
from jaxinfer.models.files.loading import load_model, open_model
from jaxinfer.serving.budget import HOST
from jaxinfer.streaming.layer_folders import remove_layer_folders, write_layer_files

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("info") / "model"
    convert(GOLDENS / "llama_llama3", path)
    return path


def _rows(*arguments: object) -> dict[str, str]:
    done = CliRunner().invoke(app, ["info", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    cells = (line.strip("│").split("│") for line in done.stdout.splitlines() if line.startswith("│"))
    return {name.strip(): value.strip() for name, value, *_ in cells}


def test_contents_of_a_model(model):
    rows = _rows(model)
    assert rows["family"] == "llama (decoder)"
    assert rows["heads"] == "4 of 6, 2 KV"
    assert rows["stored as"] == "float32"
    assert rows["parameters"] == "12,408"
    assert rows["stored bytes"] == rows["weights"] == "49.6 kB"
    assert rows["tokenizer"] == "no: token ids only"
    assert "layer files" not in rows
    write_layer_files(open_model(model))
    assert _rows(model)["layer files"].startswith("1 folder of ")
    remove_layer_folders(model)


def test_memory_for_a_mesh_a_context_and_a_batch(model):
    rows = _rows(model, "--mesh", "tensor=2", "--context", 50, "--max-batch", 4, "--quantize", "int8")
    assert rows["mesh"] == "data=1, tensor=2"
    cache = 2 * 2 * 4 * 50 * (2 * 6) * 4 // 2  # keys and values, layers, batch, context, heads, bytes, devices
    assert cache == 19_200
    assert rows["KV pages"] == "19.2 kB"
    done = CliRunner().invoke(app, ["info", str(model), "--context", "50", "--max-batch", "4"])
    assert "each device, float32, batch 4 of 50 tokens: 88.0 kB reserved" in done.stdout
    assert rows["weights"] < "9"  # kB: a quarter, half of it, and the scales


def test_what_is_reserved_is_what_a_model_reserves(model):
    with LLM(model) as llm:
        held = {held.tenant: decimal(held.bytes) for held in llm.budgets[HOST].holdings if held.owner == "LLM model"}
    assert held.keys() == {"weights", "KV pages"}
    assert _rows(model).items() >= held.items()
    assert _rows(model, "--dtype", "bfloat16")["weights"] == "25.1 kB"  # half, but for the norms


def test_info_announces_what_generate_takes(tmp_path):
    convert(GOLDENS / "llama_llama3", tmp_path / "model", dtype="bfloat16")
    options = inspect.signature(generate).parameters
    defaults = {name: options[name].default for name in ("dtype", "context", "max_batch", "kv_dtype")}
    with LLM(tmp_path / "model", **defaults) as llm:
        held = {held.tenant: decimal(held.bytes) for held in llm.budgets[HOST].holdings if held.owner == "LLM model"}
    rows = _rows(tmp_path / "model")
    assert rows["stored as"] == "bfloat16"
    assert held["weights"] == "49.6 kB"  # a CPU computes in float32
    assert rows.items() >= held.items()


def test_encoders_have_no_cache(tmp_path):
    convert(GOLDENS / "bert_pooled", tmp_path / "model")
    rows = _rows(tmp_path / "model")
    assert "KV pages" not in rows
    assert rows["weights"] == rows["stored bytes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mesh", "tensor=0"), "MeshConfig.tensor must be an integer >= 1, got 0"),
        (("--mesh", "pipeline=2"), "pipeline=2 is not implemented yet"),
        (("--mesh", "data=2"), "data=2 is not implemented yet"),
        (("--mesh", "none.toml"), "none.toml"),
        (("--context", "65"), "--context 65 is more than the model's 64"),
        (("--dtype", "int4"), "dtype='int4' is not implemented"),
    ],
)
def test_refusals(model, arguments, message):
    done = CliRunner().invoke(app, ["info", str(model), *arguments])
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_no_model(tmp_path):
    done = CliRunner().invoke(app, ["info", str(tmp_path)])
    assert done.exit_code == 2
    assert "jaxinfer convert" in done.stderr


def test_costs_that_were_measured_on_this_machine(model, tmp_path, monkeypatch):
    def shown(path):
        return CliRunner().invoke(app, ["info", str(path), "--costs"]).stdout

    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path / "cache"))
    assert "No programs of this model were measured on" in shown(model)
    engine = build_engine(load_model(model), None, EngineConfig(max_batch=1, context=16), num_pages=1)
    for batch in (1, 2, 4):
        for _ in range(3):
            engine.executor.costs.record("decode", (("batch", batch), ("pages", 8)), 0.001 * batch + 0.5)
    engine.executor.costs.save()
    output = shown(model)
    rows = [re.split(" {2,}", line.strip()) for line in output.splitlines()]
    assert ["decode", "batch=4, pages=8", "2", "504.0"] in [row[:4] for row in rows]
    assert ["decode", "batch", "pages=8", "1.000", "500.0", "1.000", "3"] in rows
    narrow = (
        CliRunner().invoke(app, ["info", str(model), "--costs"], env={"TTY_COMPATIBLE": "1", "COLUMNS": "80"}).stdout
    )
    assert "…" not in narrow
    assert {"504.0", "502.0", "501.0", "500.0", "1.000"} <= {*narrow.split()}
    assert "float32, kernels=True, page_size=16" in output
    assert not re.search(r"WeightFormat|dtype\(|=None|max_adapters=0", output)
    convert(GOLDENS / "bert_pooled", tmp_path / "other")
    assert "No programs of this model were measured on" in shown(tmp_path / "other")
