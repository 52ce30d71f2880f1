import dataclasses
import inspect
import json
import pathlib
import re
import shutil

import jax
import pytest
import tokenizers
from rich.filesize import decimal
from typer.testing import CliRunner

from jaxinfer import LLM
from jaxinfer.cli import app
from jaxinfer.cli.generate import generate
from jaxinfer.compiled import cpu_library
from jaxinfer.compiled.cpu_library import LibraryState, library_state
from jaxinfer.generation.api.build import engine_costs
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.execution.layout import DeviceLayout
from jaxinfer.generation.execution.memory import state_bytes
from jaxinfer.models.files.conversion import convert
from jaxinfer.models.files.loading import load_model, open_model
from jaxinfer.serving.budget import HOST
from jaxinfer.sharding import MeshConfig
from jaxinfer.streaming.layer_folders import remove_layer_folders, write_layer_files
from tests.tiny import CONFIG, HYBRID, MOE_CONFIGS, save_tiny

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("info") / "model"
    convert(GOLDENS / "llama_llama3", path)
    return path


@pytest.fixture(scope="module")
def shown(model):
    """What is shown of the model without options."""
    done = CliRunner().invoke(app, ["info", str(model)])
    assert done.exit_code == 0, done.output
    return done.stdout


def _rows(*arguments: object) -> dict[str, str]:
    given = [*map(str, arguments)]
    if "--mesh" not in given:
        given += ["--mesh", "tensor=1"]  # with a mesh no program is traced for its kernels
    done = CliRunner().invoke(app, ["info", *given])
    assert done.exit_code == 0, done.output
    return _cells(done.stdout)


def _cells(output: str) -> dict[str, str]:
    cells = (line.strip("│").split("│") for line in output.splitlines() if line.startswith("│"))
    return {name.strip(): value.strip() for name, value, *_ in cells}


def test_contents_of_a_model(model, shown):
    rows = _cells(shown)
    assert rows["family"] == "llama (decoder)"
    assert rows["heads"] == "4 of 6, 2 KV"
    assert rows["stored as"] == "float32"
    assert rows["parameters"] == "12,408"
    assert rows["stored bytes"] == rows["weights"] == "49.6 kB"
    assert rows["tokenizer"] == "no: token ids only"
    kept = (1 << 30) // (int(rows["layers"]) * 2 * 2 * 6 * 4)  # keys and values of two heads in float32
    assert f"1 GiB of --host-kv or --disk-kv-limit keeps {kept:,} tokens of the KV cache." in shown
    assert "layer files" not in rows
    write_layer_files(open_model(model), model)
    assert _rows(model)["layer files"].startswith("1 folder of ")
    remove_layer_folders(model)


def test_ends_of_texts_and_sampling_defaults(model, tmp_path):
    """Of a model that is converted, and before: with all its files, and with those that are fetched for `info`."""
    rows = _rows(model)
    assert rows["ends of text"] == "none: texts end by their length or stop strings"
    assert rows["sampling defaults"] == "neutral: the model names none"
    folder = tmp_path / "named"
    shutil.copytree(GOLDENS / "llama_llama3", folder)
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 3], "temperature": 0.6, "top_k": 20, "max_new_tokens": 9})
    )
    vocab = {"<unk>": 0, "</s>": 2, "<|im_end|>": 5}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "added_tokens_decoder": {"2": {"content": "</s>"}}}
    settings["added_tokens_decoder"]["5"] = {"content": "<|im_end|>", "special": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    convert(folder, tmp_path / "converted")
    (tmp_path / "fetched").mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        shutil.copyfile(folder / name, tmp_path / "fetched" / name)
    for path in (folder, tmp_path / "converted", tmp_path / "fetched"):
        rows = _rows(path)
        assert rows["ends of text"] == "2 </s>, 3, 5 <|im_end|>", path
        assert rows["sampling defaults"] == "temperature=0.6, top_k=20, max_tokens=9"
    (folder / "generation_config.json").write_text('{"top_p": 2}')
    for path in (folder, tmp_path / "fetched"):
        shutil.copyfile(folder / "generation_config.json", tmp_path / "fetched" / "generation_config.json")
        done = CliRunner().invoke(app, ["info", str(path)])
        assert (done.exit_code, "top_p=2: expected `float` <= 1.0" in done.stdout) == (1, True)


def test_memory_for_a_mesh_a_context_and_a_batch(model):
    rows = _rows(model, "--mesh", "tensor=2", "--context", 50, "--max-batch", 4, "--quantize", "int8")
    assert rows["mesh"] == "data=1, pipeline=1, expert=1, tensor=2"
    cache = 2 * 2 * 4 * 50 * (2 * 6) * 4 // 2  # keys and values, layers, batch, context, heads, bytes, devices
    assert cache == 19_200
    assert rows["KV pages"] == "19.2 kB"
    done = CliRunner().invoke(app, ["info", str(model), "--context", "50", "--max-batch", "4"])
    assert "each device, float32, batch 4 of 50 tokens: 88.0 kB reserved" in done.stdout
    assert rows["weights"] < "9"  # kB: a quarter, half of it, and the scales


@pytest.mark.parametrize("axes", ["pipeline=2", "pipeline=2,tensor=2", "data=2,pipeline=2"])
def test_each_device_of_a_pipeline_has_the_layers_and_the_cache_of_its_stage(axes, tmp_path):
    config = dataclasses.replace(CONFIG, vocab=256, layers=5)
    path, mesh = save_tiny(tmp_path / "staged", config=config), MeshConfig.parse(axes)
    with LLM(path, mesh=mesh.build(jax.devices()[: mesh.size]), max_batch=4) as llm:
        held = {x.tenant: x.bytes // mesh.size for x in llm.budgets[HOST].holdings if x.owner == "LLM staged"}
    rows, whole = _rows(path, "--mesh", axes, "--max-batch", 4), _rows(path, "--max-batch", 4)
    assert held.keys() == {"weights", "KV pages"}
    assert rows.items() >= {name: decimal(size) for name, size in held.items()}.items()
    assert rows["stages"] == "2 stages of 3, 2 layers"
    assert rows["KV pages"] == decimal(held["KV pages"]) != whole["KV pages"]
    assert "stages" not in whole


def test_what_is_reserved_is_what_a_model_reserves(model, shown):
    with LLM(model) as llm:
        held = {held.tenant: decimal(held.bytes) for held in llm.budgets[HOST].holdings if held.owner == "LLM model"}
    assert held.keys() == {"weights", "KV pages"}
    assert _cells(shown).items() >= held.items()
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


@pytest.mark.parametrize("speculative", [0, 3])
def test_states_have_room_for_speculative_tokens(speculative, tmp_path):
    path = save_tiny(tmp_path / "hybrid", config=HYBRID)
    engine = EngineConfig(max_batch=4, context=64, num_speculative_tokens=speculative)
    layout = DeviceLayout.from_model(open_model(path), engine, num_pages=1)
    rows = _rows(path, "--max-batch", 4, "--num-speculative-tokens", speculative)
    assert rows["recurrent states"] == decimal(state_bytes(layout))


def test_encoders_have_no_cache(tmp_path):
    convert(GOLDENS / "bert_pooled", tmp_path / "model")
    rows = _rows(tmp_path / "model")
    assert "KV pages" not in rows
    assert rows["weights"] == rows["stored bytes"]
    done = CliRunner().invoke(app, ["info", str(tmp_path / "model"), "--mesh", "pipeline=2"])
    assert done.exit_code == 2
    assert done.stderr.startswith("error: mesh pipeline=2: only decoders run in stages")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mesh", "tensor=0"), "MeshConfig.tensor must be an integer >= 1, below 2**30, got 0"),
        (("--mesh", "pipeline=0"), "MeshConfig.pipeline must be an integer >= 1, below 2**30, got 0"),
        (("--mesh", "none.toml"), "none.toml"),
        (("--mesh", "pipeline=3"), "mesh pipeline=3: the model has 2 layers, fewer than stages; lower pipeline"),
        (("--context", "65"), "--context 65 is more than the model's 64"),
        (("--dtype", "int4"), "dtype='int4' is not implemented"),
        (("--target", "h1"), "Unknown target 'h1'; known: a100"),
        (("--target", "h200", "--mesh", "tensor=2"), "--target with --mesh is not implemented"),
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


def folder_of(golden: str, path: pathlib.Path, **changes: object) -> pathlib.Path:
    """Make a folder with a golden's `config.json` alone."""
    path.mkdir()
    fields = json.loads((GOLDENS / golden / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(fields))
    return path


def test_a_config_alone_is_enough(shown, tmp_path):
    folder = folder_of("llama_llama3", tmp_path / "llama")
    alone, converted = _rows(folder), _cells(shown)
    assert alone["supported"] == converted["supported"] == "yes"
    assert alone["converted"].startswith("not yet")
    same = ("family", "heads", "parameters", "vocabulary", "context", "weights", "KV pages")
    assert {name: alone[name] for name in same} == {name: converted[name] for name in same}
    assert [file.name for file in folder.iterdir()] == ["config.json"]
    seeing = _rows(folder_of("qwen3_5_plain", tmp_path / "qwen"))
    assert seeing["supported"] == "texts alone: images are refused"


def test_memory_by_format(shown):
    rows = (re.split(" {2,}", line.strip()) for line in shown.splitlines() if re.match(" (float|bf|int|fp)", line))
    formats = {name: figures for name, *figures in rows}
    assert [*formats] == ["float32", "bfloat16", "int8, float32", "int4, float32", "fp8, float32"]
    cache = 2 * 2 * 1000 * (2 * 6) * 4  # keys and values, layers, tokens, heads, bytes
    assert formats["float32"][:2] == ["49.6 kB", decimal(cache)]
    assert formats["float32"][2] == f"{int((24e9 - 12_408 * 4) * 0.9) * 1000 // cache:,}"
    assert formats["bfloat16"][1] == decimal(cache // 2)


def test_what_does_not_fit(tmp_path):
    folder = folder_of(
        "llama_llama3", tmp_path / "large", hidden_size=8192, intermediate_size=688_128, num_hidden_layers=2
    )
    done = CliRunner().invoke(app, ["info", str(folder)])
    float32, *_, int4, _ = (line.split() for line in done.stdout.splitlines() if re.match(" (float|bf|int|fp)", line))
    assert float32[5] == float32[6] == "no"
    assert "no" not in (int4[6], int4[7])


def test_kernels_of_a_target_and_of_this_machine(model, shown):
    assert "implementations on this CPU" in shown
    assert re.search(rf"decode_attention +{'ffi' if cpu_library.cpu_library() else 'xla'} \(cpu\)", shown)
    assert "mosaic" not in shown
    options = ("--target", "h200", "--dtype", "bfloat16")
    on_gpu = CliRunner().invoke(app, ["info", str(model), *options]).stdout
    assert "implementations on NVIDIA H200" in on_gpu
    assert re.search(r"max_and_argmax +reference +reference", on_gpu)
    assert "No kernel in prefill, 32 tokens: " in on_gpu
    assert "CPU kernels" not in on_gpu
    on_old = CliRunner().invoke(app, ["info", str(model), "--target", "a100"]).stdout
    assert "implementations on NVIDIA A100" in on_old
    assert "mosaic" not in on_old


def test_all_that_is_missing_is_named(tmp_path):
    changes = {"hidden_act": "mish", "rope_parameters": {"rope_type": "axial"}, "is_encoder_decoder": True}
    done = CliRunner().invoke(app, ["info", str(folder_of("llama_llama3", tmp_path / "bad", **changes))])
    assert done.exit_code == 1
    first, *missing = done.stdout.splitlines()
    assert first.endswith("bad is not supported:")
    assert [line.split(": ")[1].split("=")[0] for line in missing] == [
        "is_encoder_decoder",
        "rope_parameters.rope_type",
        "hidden_act",
    ]


def test_a_tensor_that_is_missing_is_named(tmp_path):
    shutil.copytree(GOLDENS / "llama_llama3", tmp_path / "llama")
    config = tmp_path / "llama" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"attention_bias": True}))
    done = CliRunner().invoke(app, ["info", str(tmp_path / "llama")])
    assert done.exit_code == 1
    assert "missing: layers.0.self_attn.q_proj.bias" in done.stdout


def test_costs_that_were_measured_on_this_machine(model, tmp_path, monkeypatch):
    options = ["--costs", "--mesh", "tensor=1"]

    def shown(path):
        return CliRunner().invoke(app, ["info", str(path), *options]).stdout

    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path / "cache"))
    assert "No programs of this model were measured on" in shown(model)
    costs = engine_costs(load_model(model), EngineConfig(max_batch=1, context=16).deciding_costs, kernels=True)
    for batch in (1, 2, 4):
        for _ in range(3):
            costs.record("decode", (("batch", batch), ("pages", 8)), 0.001 * batch + 0.5)
    costs.save()
    output = shown(model)
    rows = [re.split(" {2,}", line.strip()) for line in output.splitlines()]
    assert ["decode", "batch=4, pages=8", "2", "504.0"] in [row[:4] for row in rows]
    assert ["decode", "batch", "pages=8", "1.000", "500.0", "1.000", "3"] in rows
    terminal = {"TTY_COMPATIBLE": "1", "COLUMNS": "80"}
    narrow = CliRunner().invoke(app, ["info", str(model), *options], env=terminal).stdout
    assert "…" not in narrow
    assert {"504.0", "502.0", "501.0", "500.0", "1.000"} <= {*narrow.split()}
    assert "float32, kernels=True, page_size=16" in output
    assert not re.search(r"WeightFormat|dtype\(|=None|max_adapters=0", output)
    convert(GOLDENS / "bert_pooled", tmp_path / "other")
    assert "No programs of this model were measured on" in shown(tmp_path / "other")


def test_which_cpu_kernels_run(model, shown, monkeypatch):
    state = library_state()
    assert re.search(r"\n CPU kernels +" + re.escape(str(state)), shown)
    if state.library is not None:
        assert f"{state.library.level} verified" in shown
        assert "32, not measured" in shown
        assert str(state.file) in shown.replace("\n", "").replace(" ", "")
        assert re.search(r"\n norm_linear +ffi \(cpu\)", shown)
    missing = LibraryState(reason="there is no C++ compiler")
    monkeypatch.setattr(cpu_library, "_states", [missing])
    output = CliRunner().invoke(app, ["info", str(model)]).stdout
    assert re.search(r"\n CPU kernels +none: there is no C\+\+ compiler", output)
    assert re.search(r"\n norm_linear +composed", output)


def test_a_mixture_of_experts(tmp_path):
    """Of the 4 experts of 3 * 32 * 24 numbers in each of 2 layers a token has 2."""
    path = save_tiny(tmp_path / "moe", config=MOE_CONFIGS["shared"])
    done = CliRunner().invoke(app, ["info", str(path), "--quantize", "int8", "--dtype", "bfloat16", "--target", "h200"])
    rows = _cells(done.stdout)
    assert rows["experts"] == "4 of 24 gated"
    assert rows["experts per token"] == "2"
    assert rows["shared expert"] == "16 gated, gated"
    assert rows["layers with experts"] == "2"
    assert "MLP hidden" not in rows
    total, active = (int(rows[name].replace(",", "")) for name in ("parameters", "active parameters"))
    assert total - active == 2 * 2 * 3 * 32 * 24
    assert rows["weights"] == decimal(open_model(path, quantize="int8", dtype="bfloat16").bytes_per_device())
    assert re.search(r"\n grouped_matmul +xla +xla ", done.stdout)
    assert re.search(r"\n top_k_gating +mosaic +mosaic ", done.stdout)
    assert re.search(r"No kernel in decode, batch 8: grouped_matmul takes .*int8", done.stdout)
    mixed = MOE_CONFIGS["sigmoid"].layer(1).mlp
    moe = dataclasses.replace(mixed.moe, router=dataclasses.replace(mixed.moe.router, capacity_factor=1.5))
    config = CONFIG.with_mlps((CONFIG.layer(0).mlp, dataclasses.replace(mixed, moe=moe)))
    rows = _rows(save_tiny(tmp_path / "mixed", config=config))
    assert (rows["MLP hidden"], rows["layers with experts"]) == ("48 gated", "1")
    assert rows["experts per token"] == "2, at most 1.5 times their even share"
