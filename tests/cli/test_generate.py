"""`jaxinfer generate` as a user runs it."""

import inspect
import json
import re

import pytest
from typer.testing import CliRunner

from jaxinfer.cli import app, moe
from jaxinfer.cli.chat import chat
from jaxinfer.cli.common import SAMPLING
from jaxinfer.cli.generate import _summary, generate
from jaxinfer.generation import CompletionOutput, FinishReason, RequestOutput, SamplingParams, Timings
from jaxinfer.generation.params import StructuredOutputsParams
from jaxinfer.generation.sampling.structured_outputs import GrammarCompiler
from jaxinfer.models.files.loading import OpenedModel, save_model
from jaxinfer.text import Tokenizer
from tests.tiny import CONFIG, name_sampling, random_model


def run(*arguments, code=0):
    done = CliRunner().invoke(app, ["generate", *map(str, arguments), "--max-batch", "1"])
    assert done.exit_code == code, done.output
    return done


def test_greedy_text_is_that_of_the_library(model_dir, llm):
    done = run(model_dir, "--prompt", "hello", "--temperature", 0, "--max-tokens", 12, "--ignore-eos")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    assert done.stdout == llm.generate("hello", params)[0].outputs[0].text + "\n"
    assert "[12 tokens, length" in done.stderr
    assert "first token after" in done.stderr
    assert re.search(r"; memory planned: weights .* free; programs used [\d.]+ [kM]B\]$", done.stderr)


def test_json_lines_contain_the_request_and_its_output(model_dir, llm):
    arguments = ("one", "--prompt", "two", "--temperature", 0.9, "--top-p", 0.95, "--seed", 3, "--logprobs", 2)
    done = run(model_dir, *arguments, "--max-tokens", 6, "--ignore-eos", "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == ["one", "two"]
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=3, max_tokens=6, ignore_eos=True)
    for line, output in zip(lines, llm.generate(["one", "two"], params), strict=True):
        assert line["token_ids"] == output.outputs[0].token_ids
        assert line["text"] == output.outputs[0].text
        assert line["finish_reason"] == "length"
        assert [entry["token_id"] for entry in line["logprobs"]] == line["token_ids"]
        assert all(len(entry["top"]) == 2 for entry in line["logprobs"])
        assert line["timings"]["first_token_s"] <= line["timings"]["total_s"]


def test_what_is_left_out_is_the_models(model_dir, llm, tmp_path):
    named = name_sampling(model_dir, tmp_path / "named", temperature=0.0, max_tokens=5)
    greedy = llm.generate("hello", SamplingParams(temperature=0, max_tokens=5))[0].outputs[0].text
    assert run(named, "hello").stdout == greedy + "\n"
    longer = run(named, "hello", "--max-tokens", 8).stdout
    assert longer == llm.generate("hello", SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text + "\n"
    drawn = SamplingParams(temperature=1.5, seed=1, max_tokens=5)
    assert run(named, "hello", "--temperature", 1.5, "--seed", 1).stdout == (
        llm.generate("hello", drawn)[0].outputs[0].text + "\n"
    )


@pytest.mark.parametrize("command", [generate, chat, moe.load])
def test_commands_have_no_sampling_defaults_of_their_own(command):
    defaults = {name: parameter.default for name, parameter in inspect.signature(command).parameters.items()}
    assert {defaults[name] for name in SAMPLING} == {None}


def test_a_bad_prompt_does_not_affect_the_others(model_dir, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": ""}\n{"token_ids": [5, 17, 3]}\n{"token_ids": [999]}\n')
    done = run(model_dir, "--prompts-file", file, "--json", "--max-tokens", 3, "--temperature", 0, code=1)
    lines = {line["index"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert "empty" in lines[0]["error"]
    assert len(lines[1]["token_ids"]) == 3
    assert "[999] of the prompt are outside the vocabulary" in lines[2]["error"]


def test_a_file_has_a_prompt_per_line(model_dir, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("first\nsecond\n")
    done = run(model_dir, "--prompts-file", file, "--json", "--max-tokens", 2, "--temperature", 0)
    assert [json.loads(line)["prompt"] for line in done.stdout.splitlines()] == ["first", "second"]


def test_several_completions_of_token_ids_without_a_tokenizer(tmp_path):
    save_model(tmp_path / "model", random_model(CONFIG), family="tiny", eos_ids=(256,))
    arguments = ("--token-ids", "5,17,3", "--max-tokens", 4, "--ignore-eos", "--seed", 1)
    (line,) = map(json.loads, run(tmp_path / "model", *arguments, "--n", 2, "--json").stdout.splitlines())
    assert line["prompt_token_ids"] == [5, 17, 3]
    assert [len(c["token_ids"]) for c in line["outputs"]] == [4, 4]
    shown = run(tmp_path / "model", *arguments).stdout.strip().strip(",")
    assert [int(i) for i in shown.split(",")] == line["token_ids"]


@pytest.fixture
def calls(monkeypatch):
    """What was tokenised, and which grammars were compiled, in order."""
    found = {"encode": [], "_compile": []}

    def counted(method):
        def call(self, argument):
            found[method.__name__].append(argument)
            return method(self, argument)

        return call

    monkeypatch.setattr(Tokenizer, "encode", counted(Tokenizer.encode))
    monkeypatch.setattr(GrammarCompiler, "_compile", counted(GrammarCompiler._compile))
    return found


@pytest.mark.parametrize("how", [(), ("--n", 2), ("--json",)], ids=["stream", "n", "json"])
def test_a_prompt_is_prepared_once(model_dir, calls, how):
    prompts = ("--prompt", "one", "--prompt", "two", "--max-tokens", 4)
    done = run(model_dir, *prompts, "--regex", "[ab]{2,3}", *how)
    assert calls["encode"] == ["one", "two"]
    assert [params.regex for params in calls["_compile"]] == ["[ab]{2,3}"]  # the same for all prompts
    assert done.stdout


def test_a_bad_prompt_is_prepared_once_too(model_dir, calls):
    done = run(model_dir, "--prompt", "a" * 200, "--prompt", "two", "--max-tokens", 2, "--json", code=1)
    assert calls["encode"] == ["a" * 200, "two"]
    bad, good = map(json.loads, done.stdout.splitlines())
    assert (bad["index"], good["index"]) == (0, 1)
    assert bad["error"].startswith("The prompt has 200 tokens")


def test_a_prompt_that_cannot_run_compiles_no_grammar(llm, calls, monkeypatch):
    monkeypatch.setattr(llm.engine.inputs, "_grammars", None)  # other tests' compiler counts no calls
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[ab]{2,3}"))
    with pytest.raises(ValueError, match="The prompt has 200 tokens"):
        llm.prepare("a" * 200, params)
    assert calls == {"encode": ["a" * 200], "_compile": []}
    assert llm.prepare("a", params).matcher is not None
    assert [params.regex for params in calls["_compile"]] == ["[ab]{2,3}"]


def test_structured_outputs(model_dir, tmp_path):
    (tmp_path / "schema.json").write_text('{"enum": ["red", "blue"]}')
    (tmp_path / "grammar.lark").write_text('start: "up" | "down"')
    common = ("--prompt", "a", "--max-tokens", 16, "--json")
    for option, texts in (
        (("--json-schema", tmp_path / "schema.json"), ('"red"', '"blue"')),
        (("--regex", "red|blue"), ("red", "blue")),
        (("--grammar", tmp_path / "grammar.lark"), ("up", "down")),
        (("--choice", "left", "--choice", "right"), ("left", "right")),
    ):
        assert json.loads(run(model_dir, *common, *option).stdout)["text"] in texts


def test_the_summary_counts_speculative_tokens():
    completion = CompletionOutput(
        index=0,
        text="abc",
        token_ids=[1, 2, 3],
        finish_reason=FinishReason.LENGTH,
        logprobs=None,
        timings=Timings(first_token_s=0.25, total_s=0.5, tokens_per_s=8.0),
        num_draft_tokens=7,
        num_accepted_tokens=2,
    )
    output = RequestOutput(request_id="0", prompt="a", prompt_token_ids=[1], prompt_logprobs=None, outputs=[completion])
    expected = "[3 tokens, length, 8.0 tokens/s, first token after 0.250 s, 2 of 7 speculative tokens accepted]"
    assert _summary(output, SamplingParams(max_tokens=3), context=99) == expected
    full = "[3 tokens, length: the context of 4 tokens is full, 8.0 tokens/s"
    assert _summary(output, SamplingParams(max_tokens=5), context=4).startswith(full)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "error: No prompt: give a text, --prompts-file or --token-ids."),
        (("--token-ids", "1,x"), "error: --token-ids must be integers separated by commas, got '1,x'."),
        (("--prompt", "a", "--temperature", "-1"), "error: --temperature must be finite and >= 0"),
        (("--prompt", "a", "--dtype", "int3"), "error: dtype='int3' is not implemented"),
        (("--prompt", "a", "--quantize", "fp4"), "error: quantize='fp4' is not implemented"),
        (("--prompt", "a", "--context", "9999"), "error: --context must be in [2, 128]"),
        (("--prompt", "a", "--mesh", "pipeline=0"), "error: mesh 'pipeline=0'"),
        (("--prompt", "a" * 200), "error: The prompt has 200 tokens; the context of 128"),
        (("--prompt", "a", "--regex", "a", "--choice", "a"), "error: StructuredOutputsParams needs exactly one of"),
        (("--prompt", "a", "--weights", "device", "--layer-files", "D"), "error: --layer-files=D has no effect with"),
        (("--prompts-file", "none.txt"), "error: --prompts-file none.txt: No such file or directory; name a readable"),
        (("--prompt", "a", "--json-schema", "none.json"), "error: --json-schema none.json: No such file or directory"),
        (("--prompt", "a", "--json-schema", "."), "error: --json-schema .: Is a directory; name a readable"),
        (("--prompt", "a", "--grammar", "none.lark"), "error: --grammar none.lark: No such file or directory"),
        (("--prompt", "a", "--mesh", "none.toml"), "error: --mesh none.toml: no such file; name a TOML file, or axes"),
        (("--prompt", "a", "--adapter", "none"), "error: none/adapter_config.json: no such file"),
        (("--prompt", "a", "--whitespace-pattern", " "), "needs exactly one of json, regex, grammar, choice; got none"),
    ],
)
def test_errors_take_one_line(model_dir, arguments, message):
    done = run(model_dir, *arguments, code=2)
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_grammars_are_checked_before_the_model_is_read(model_dir, monkeypatch, tmp_path):
    monkeypatch.setattr(OpenedModel, "read", None)
    (tmp_path / "bad.lark").write_text("start: nothing")
    for option, value in (("--regex", "[a-"), ("--regex", "("), ("--grammar", tmp_path / "bad.lark")):
        done = run(model_dir, "--prompt", "a", option, value, code=2)
        assert done.stderr.startswith(f"error: {option} does not compile: ")
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{nope", r"JSON is malformed.*; the file must contain a JSON object\.$"),
        (b"[1]", r"Expected `object`, got `array`; the file must contain a JSON object\.$"),
        (b"\xff\xfe", r"not UTF-8 text \('utf-8' codec can't decode byte 0xff.*\)\.$"),
    ],
)
def test_an_unreadable_schema_is_named(model_dir, tmp_path, content, message):
    file = tmp_path / "schema.json"
    file.write_bytes(content)
    stderr = run(model_dir, "--prompt", "a", "--json-schema", file, code=2).stderr
    assert re.match(rf"error: --json-schema {re.escape(str(file))}: {message}", stderr), stderr


def test_an_invalid_line_is_named(model_dir, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    assert f"{file}:2: " in run(model_dir, "--prompts-file", file, code=2).stderr
