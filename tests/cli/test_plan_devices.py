"""`jaxinfer plan --devices` as a user runs it."""

import dataclasses
import re

import pytest
from typer.testing import CliRunner

from jaxinfer.cli import app
from jaxinfer.cli.plan.devices import dollars
from jaxinfer.cli.plan.notes import offload_note
from jaxinfer.sharding import MeshConfig, read_mesh
from jaxinfer.sharding.planner import Catalogue, Runner, Ways, Workload, rank
from jaxinfer.sharding.planner.plans import USABLE
from jaxinfer.sharding.planner.search import FORMATS
from jaxinfer.streaming.config import MemoryConfig

PAPER = ("--model", "lm-175b", "--devices", "a100-40:16", "--batch", 24, "--prompt", 512, "--generate", 50)


def run(*arguments, code=0):
    done = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done


def refused(*arguments):
    return run(*arguments, code=2).stderr


def ranked():
    catalogue = Catalogue.read()
    model, form = catalogue.model("lm-175b"), FORMATS[None]
    work = Workload(batch=24, prompt=512, generate=50)
    return rank(model, catalogue.device("a100-40"), 16, catalogue.system(model, form), form, work)


def test_the_papers_meshes_are_ranked_with_what_bounds_them():
    text, made = run(*PAPER).stdout, ranked()
    assert "lm-175b (174.6B, 16 bits) on 16 a100-40 for 24 requests of 512 + 50 tokens" in text
    rows = [line for line in text.splitlines() if re.match(r" (pipeline|tensor|data)=", line)]
    assert rows[0].startswith(f" {str(made[0].plan.ways).replace(',', ', ')} ")
    assert f"{made[0].first.bound}, {made[0].each.bound}" in rows[0]
    assert f" {dollars(made[0], 1.3):.1f} " in rows[0]
    assert any("hybrid 8, 2" in row for row in rows)
    rates = [float(row.split()[-2].replace(",", "")) for row in rows]
    assert rates == sorted(rates, reverse=True)
    assert "its points are off by 8% at most" in text


def test_the_best_mesh_is_written_and_can_be_read(tmp_path):
    file = tmp_path / "mesh.toml"
    assert run(*PAPER, "--write", file).stderr.endswith(f"Wrote {file}\n")
    ways = ranked()[0].plan.ways
    assert read_mesh(file).mesh == MeshConfig(tensor=ways.tensor, pipeline=ways.pipeline, data=ways.data)
    run("--model", "lm-175b", "--devices", "h200:2", "--write", file, "--by", "ttft")
    assert read_mesh(file).memory == {"weights": "host"}


def written(file, *arguments):
    """The options of memory in the file that is written; they are such that an engine takes them."""
    run(*arguments, "--write", file)
    memory = read_mesh(file).memory
    return memory, MemoryConfig.from_options(memory)


def test_tiers_are_rows_with_what_they_gain_and_options_of_the_file(tmp_path):
    large = ("--model", "gpt-50b", "--devices", "a100-40", "--batch", 256, "--prompt", 512, "--generate", 512)
    text = run(*large).stdout
    assert re.search(r"cohorts 512, \d+ at once, weights on", text)
    assert re.search(r"kv_offload: 3\.\d+ times the tokens/s of the best plan without it", text.replace("\n", " "))
    assert "With --hit-rate, the share of prompts that come again" in text
    memory, config = written(tmp_path / "offload.toml", *large)
    each = 62 * 2 * 8192 * 2
    assert memory == {"weights": "host", "kv_offload": 256 * 1024 * each}
    assert config.kv_offload == 256 * 1024 * each
    assert "first token in 40.0 s, then one each 39,964 ms, 6.41 tokens/s" in (tmp_path / "offload.toml").read_text()
    known = ("--model", "llama-3.1-8b", "--devices", "h200", "--batch", 64, "--prompt", 4096, "--hit-rate", 0.75)
    text = run(*known).stdout
    assert re.search(r"cohorts \d+, host_kv", text)
    assert re.search(r"host_kv: 2\.\d+ times the tokens/s of the best plan", text.replace("\n", " "))
    assert "weights on disk, host_kv" not in text  # nor other tiers of prompts where the weights need none
    memory, config = written(tmp_path / "known.toml", *known)
    assert memory == {"host_kv": int(USABLE * Catalogue.read().device("h200").host_memory)}  # all of it


def test_a_price_changes_the_bill_and_none_is_made_up():
    cheap, dear = (run(*PAPER, "--price", price).stdout for price in (1, 10))
    bills = [float(re.search(r"(\S+) *$", text.splitlines()[4])[1].replace(",", "")) for text in (cheap, dear)]
    assert bills[1] == pytest.approx(10 * bills[0], rel=0.01)
    unknown = run("--model", "gpt-j-6b", "--devices", "h20:1").stdout
    assert "$/M" not in unknown
    assert "No price of h20 is known: give --price" in unknown


def test_plans_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    run(*PAPER, "--plot", tmp_path / "plans.svg")
    svg = (tmp_path / "plans.svg").read_text()
    assert "lm-175b on 16 a100-40, 24 requests" in svg
    assert "cohorts" in svg


def test_notes_say_what_tiers_keep_and_which_experts_are_read():
    text = run(*PAPER).stdout.replace("\n", " ")
    each = 96 * 2 * 12288 * 2  # keys and values of a token in 16 bits
    assert (
        f"1 GiB of --host-kv or --disk-kv-limit keeps {2**30 // each:,} tokens of the KV cache. A prompt of 512" in text
    )
    assert "ms to read back from the host" in text
    mixture = run("--model", "qwen3-30b-a3b", "--devices", "h200:4", "--batch", 64).stdout.replace("\n", " ")
    assert re.search(r"A pass over 64 tokens reads 12\d of a layer's 128 experts", mixture)


def test_more_sequences_would_share_a_fetch_with_their_cache_on_the_host():
    catalogue = Catalogue.read()
    runner = Runner(
        model=catalogue.model("gpt-13b"),
        device=dataclasses.replace(catalogue.device("a100-40"), host_memory=100e9),
        system=catalogue.systems["deepspeed-fp16"],
        ways=Ways(),
        format=FORMATS[None],
    )
    each = 1000 * 40 * 2 * 5120 * 2
    assert f"{int(90e9 / each)} would share" in offload_note(runner, 1000, most=8, balanced=4000)
    assert "--kv-offload 7813MiB" in offload_note(runner, 1000, most=8, balanced=10)
    assert not offload_note(runner, 1000, most=8, balanced=8)
    unequal = dataclasses.replace(runner, model=catalogue.model("qwen3-next-80b-a3b"))
    assert not offload_note(unequal, 1000, most=8, balanced=4000)


def test_a_model_of_a_directory_is_planned(model_dir):
    text = run(model_dir, "--devices", "a100-40:2", "--quantize", "int8").stdout
    assert f"{model_dir} (0.0B, 8 bits) on 2 a100-40" in text.replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "lm-175b"), "--model is only used with --devices"),
        (("--devices", "h200:8"), "name one model, by --model NAME or as MODEL"),
        (("DIR", "--model", "lm-175b", "--devices", "h200:8"), "name one model"),
        (("lm-175b", "--devices", "h200:8"), "write --model lm-175b for the planner's model"),
        (("--model", "lm-175b", "--devices", "h200:0"), "such as \"h200:8\", got 'h200:0'"),
        (("--model", "lm-175b", "--devices", "tpu:8"), "device 'tpu' is unknown; known: a100-40"),
        (("--model", "lm", "--devices", "h200:8"), "model 'lm' is unknown; known: gpt2-1.5b"),
        (("--model", "lm-175b", "--devices", "h200:8", "--batch", 0), "--batch must be an integer >= 1, got 0"),
        (("--model", "lm-175b", "--devices", "h200:8", "--by", "speed"), "--by must be one of throughput, ttft, tpot"),
        (("--model", "lm-175b", "--devices", "h200:8", "--price", -1), "--price must be dollars per device and hour"),
        (("--model", "lm-175b", "--devices", "h200:8", "--hit-rate", 1), "--hit-rate must be a share in [0, 1)"),
        (("--model", "lm-175b", "--devices", "h200:8", "--quantize", "fp8"), "known: int8, int4"),
        (("--model", "lm-175b", "--devices", "h200:8", "--mesh", "tensor=8"), "leave out --mesh"),
        (("--model", "lm-175b", "--devices", "h200:8", "--plot", "plans.txt"), "must end in"),
        (("--model", "moe-2t", "--devices", "a100-40:8"), "It would fit on a100-40:128"),
    ],
)
def test_what_is_wrong_is_named(arguments, message):
    assert message in refused(*arguments)
