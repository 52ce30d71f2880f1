"""lm-eval and guidellm, which bring PyTorch and are optional (optional.txt), run to their end at the demo model."""

import json
import os
import subprocess
import sys

import pytest

from tests.conformance.conftest import ROOT, TOOLS, serving

pytestmark = pytest.mark.slow

OFFLINE = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
MODEL = ROOT / "examples/demo_model"
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The demo model's tokenizer as transformers reads it."""
    folder = tmp_path_factory.mktemp("exported") / "demo"
    subprocess.run([sys.executable, ROOT / "examples/export_demo_model.py", folder], check=True, cwd=ROOT)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    with serving(MODEL, tmp_path_factory.mktemp("demo") / "log") as server:
        yield server


def needs(program):
    if not (TOOLS / "bin" / program).exists():
        pytest.skip(f"{program} is optional: tests/conformance/optional.txt")


def test_lm_eval(tool, request, tmp_path):
    """Of a task's choices by log probabilities, of texts, and of the perplexity of whole texts."""
    needs("lm-eval")
    server, tokenizer = request.getfixturevalue("demo"), request.getfixturevalue("tokenizer")
    arguments = {"model": "demo_model", "base_url": f"{server.url}/v1/completions", "tokenizer": tokenizer}
    options = ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items()) + ",num_concurrent=4"]
    options += ["--tasks", "local_code,local_gen,local_ppl", "--include_path", ".", "--output_path", tmp_path]
    folder = ROOT / "tests/conformance/lm_eval"
    tool("lm-eval", "run", "--model", "local-completions", *options, cwd=folder, env=OFFLINE, timeout=600)
    (found,) = tmp_path.rglob("results*.json")
    results = json.loads(found.read_text())["results"]
    assert results["local_code"]["acc,none"] == 1
    assert results["local_ppl"]["word_perplexity,none"] < 1000


def test_guidellm(tool, request, tmp_path):
    needs("guidellm")
    server, tokenizer = request.getfixturevalue("demo"), request.getfixturevalue("tokenizer")
    backend = f"kind=openai_http,target={server.url},model=demo_model,request_format=/v1/completions"
    options = ["--backend", backend, "--profile", "kind=concurrent,streams=4"]
    options += ["--constraint", "kind=max_requests,count=16", "--tokenizer", f"kind=huggingface_auto,model={tokenizer}"]
    options += ["--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=16"]
    report = tmp_path / "report.json"
    tool("guidellm", "run", *options, "--output", f"kind=json,path={report}", env=OFFLINE, timeout=600)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    assert benchmark["metrics"]["request_totals"] == {"successful": 16, "errored": 0, "incomplete": 0, "total": 16}
