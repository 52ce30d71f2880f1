"""`jaxinfer moe` as a user runs it."""

import dataclasses
import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from jaxinfer.cli import app
from jaxinfer.generation import LLM, SamplingParams
from tests.tiny import MOE_CONFIGS, save_tiny

SMALL = ("--max-tokens", 4, "--temperature", 0, "--ignore-eos", "--context", 32, "--max-batch", 1)


def run(*arguments, code=0):
    done = CliRunner().invoke(app, ["moe", "load", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done


@pytest.fixture(scope="module")
def moe_dir(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("moe") / "sigmoid", config=MOE_CONFIGS["sigmoid"])


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one prompt\n")
    return file


@pytest.mark.slow
def test_the_table_and_the_json_are_what_the_engine_counted(moe_dir, prompts, tmp_path):
    llm = LLM(moe_dir, context=32, max_batch=1, expert_load=True)
    llm.generate("one prompt", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    load = llm.stats().expert_load
    (layer,) = json.loads(run(moe_dir, "--prompts-file", prompts, *SMALL, "--json").stdout)["layers"]
    assert (layer["layer"], layer["tokens"]) == (1, load.tokens[0].tolist())
    plot = tmp_path / "load.svg"
    done = run(moe_dir, "--prompts-file", prompts, *SMALL, "--plot", plot)
    assert "13 tokens, 2 of 8 experts each" in done.stdout  # 10 of the prompt, 3 of the output
    busiest = int(load.tokens[0].argmax())
    share = load.tokens[0].max() / load.tokens[0].sum()
    assert re.search(rf"\n 1 +{busiest} \({share:.1%}\), ", done.stdout)
    assert f"{load.imbalance[0]:.2f}" in done.stdout
    assert f" {np.sum(load.tokens == 0)} \n" in done.stdout
    pytest.importorskip("matplotlib")
    assert "tokens of each expert, 1 is even" in plot.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--plot", "there/is/none.svg"), "--plot there/is/none.svg: there/is is not a directory"),
        (("--plot", "load.pdf"), r"--plot load\.pdf must end in \.png or \.svg"),
        (("--temperature", -1), "--temperature must be"),
    ],
)
def test_wrong_options_end_before_the_model_is_loaded(moe_dir, prompts, arguments, message, monkeypatch):
    monkeypatch.setattr(LLM, "__init__", None)
    assert re.search(f"^error: {message}", run(moe_dir, "--prompts-file", prompts, *arguments, code=2).stderr)


def test_a_mixture_in_stages_is_refused_in_one_line(prompts, tmp_path):
    path = save_tiny(tmp_path / "moe", config=dataclasses.replace(MOE_CONFIGS["shared"], layers=4))
    file = tmp_path / "mesh.toml"
    file.write_text("[mesh]\npipeline = 2\ntensor = 2\nexpert = 2\n")  # the eight devices of tests
    refused = run(path, "--prompts-file", prompts, "--mesh", file, code=2).stderr
    assert re.fullmatch(
        r"error: .*not implemented for a model in stages \(pipeline=2\).* or use pipeline = 1\.\n", refused
    )


def test_dense_models_and_files_without_prompts_are_refused(model_dir, moe_dir, prompts, monkeypatch):
    monkeypatch.setattr(LLM, "__init__", None)
    done = run(model_dir, "--prompts-file", prompts, code=2)
    assert done.stderr == f"error: {model_dir} is not a mixture of experts; name a model with experts.\n"
    prompts.write_text("\n")
    assert "the file has no prompt" in run(moe_dir, "--prompts-file", prompts, code=2).stderr
