"""`jaxinfer chat`: by lines of standard input, by its commands, and in a terminal."""

import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jaxinfer.cli import app
from jaxinfer.cli.conversation import Conversation
from jaxinfer.generation import LLM, SamplingParams
from jaxinfer.generation.params import StructuredOutputsParams
from jaxinfer.models.files.conversion import convert
from tests.tiny import CONFIG

DEMO = Path(__file__).parents[2] / "examples/demo_model"
GREEDY = SamplingParams(temperature=0, max_tokens=6, allowed_token_ids=range(94))  # each is a character


@pytest.fixture
def talk(llm):
    return Conversation(llm, GREEDY, system="be")


def roles(talk):
    return [message["role"][0] for message in talk.messages]


def test_each_line_is_a_turn(model_dir, llm):
    arguments = ["chat", str(model_dir), "--system", "be", "--max-tokens", "6", "--temperature", "0"]
    done = CliRunner().invoke(app, arguments, input="hi\n\nmore\n/exit\nnot this\n")
    assert done.exit_code == 0, done.output
    messages, params = [{"role": "system", "content": "be"}], SamplingParams(temperature=0, max_tokens=6)
    for text in ("hi", "more"):
        messages.append({"role": "user", "content": text})
        messages.append({"role": "assistant", "content": llm.chat(messages, params).outputs[0].text})
    assert done.stdout == "".join(m["content"] + "\n" for m in messages if m["role"] == "assistant")


def test_the_history_of_commands(talk, tmp_path, capsys):
    file = tmp_path / "talk.json"
    for line, expected in (
        ("hi", "sua"),
        ("/retry", "sua"),
        ("more", "suaua"),
        (f"/save {file}", "suaua"),
        ("/undo", "sua"),
        ("/clear", "s"),
        (f"/load {file}", "suaua"),
        ("/system", ""),
        ("/system be kind", "s"),
        ("/help", "s"),
        ("  ", "s"),
    ):
        assert talk.take(line)
        assert "".join(roles(talk)) == expected, line
    assert [m["content"] for m in json.loads(file.read_text()) if m["role"] != "assistant"] == ["be", "hi", "more"]
    assert list(tmp_path.iterdir()) == [file]
    assert "/set NAME VALUE" in capsys.readouterr().out
    assert not talk.take("/exit")


def test_sampling_options_are_set(talk, capsys):
    for line in ("/set temperature 0.25", '/set stop ["a", "b"]', '/set bad_words ["x"]', "/set max_tokens 2", "/set"):
        talk.take(line)
    shown = capsys.readouterr().out.splitlines()
    assert {"temperature 0.25", "stop ('a', 'b')", "bad_words ('x',)", "max_tokens 2"} <= set(shown)
    talk.take("hi")
    assert "[length; /set max_tokens allows more]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/bogus", "/bogus is not a command; known: /help, /clear"),
        ("/set temprature 1", "/set temprature: not a sampling option; known: max_tokens,"),
        ("/set temperature", "/set temperature: the value is missing"),
        ("/set temperature hot", "SamplingParams.temperature must be finite and >= 0"),
        ("/undo", "The conversation has no turn yet"),
        ("/retry", "The conversation has no turn yet"),
        ("/save", "/save: the file name is missing"),
        ("/load nowhere.json", "/load nowhere.json: No such file"),
        ("x" * 200, "The prompt has 226 tokens; the context of 128"),
    ],
)
def test_what_is_refused_changes_nothing(talk, line, message):
    before = list(talk.messages)
    with pytest.raises(ValueError, match=message):
        talk.take(line)
    assert talk.messages == before


def test_a_file_that_is_no_conversation_is_refused(talk, tmp_path):
    for content in ("{", '["a"]', '[{"content": "a"}]'):
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(ValueError, match=r"^/load .*a\.json: "):
            talk.take(f"/load {tmp_path / 'a.json'}")
    assert roles(talk) == ["s"]


def test_the_oldest_turns_are_forgotten_when_the_context_is_full(talk, capsys):
    for text in ("a" * 10, "b" * 10, "c" * 10):
        talk.take(text)
    assert "forgotten" not in capsys.readouterr().err
    talk.take("d" * 50)
    assert "[the oldest 2 turns are forgotten: the context has 128 tokens]" in capsys.readouterr().err
    assert [m["content"][0] for m in talk.messages if m["role"] == "user"] == ["c", "d"]
    assert talk.messages[0] == {"role": "system", "content": "be"}


class Interrupted(io.StringIO):
    """Ctrl-C while the second piece of an answer is printed."""

    pieces = 0

    def write(self, text):
        written = super().write(text)
        self.pieces += bool(text)
        if self.pieces == 2:
            raise KeyboardInterrupt
        return written


def test_a_stopped_answer_is_kept_as_far_as_it_came(talk, monkeypatch):
    talk.take("/set max_tokens 60")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", printed := Interrupted())
        with pytest.raises(KeyboardInterrupt):
            talk.take("hi")
    assert roles(talk) == ["s", "u", "a"]
    assert 0 < len(talk.messages[-1]["content"]) < 60
    assert printed.getvalue() == talk.messages[-1]["content"] + "\n"
    talk.take("more")
    assert roles(talk) == ["s", "u", "a", "u", "a"]


def test_a_model_without_a_template_is_refused(monkeypatch):
    monkeypatch.setattr(LLM, "__init__", lambda *a, **k: pytest.fail("it was loaded first"))
    done = CliRunner().invoke(app, ["chat", str(DEMO)])
    assert done.exit_code == 2
    assert done.stderr.endswith(
        "has no chat template, so it may not be a chat model: pass one with --chat-template FILE, or continue texts "
        "with jaxinfer generate.\n"
    )


def test_a_template_of_a_file(model_dir, llm, tmp_path):
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}")
    arguments = ["chat", str(model_dir), "--chat-template", str(tmp_path / "mine.jinja"), "--temperature", "0"]
    done = CliRunner().invoke(app, [*arguments, "--max-tokens", "3", "--context", str(CONFIG.context)], input="abc\n")
    assert done.exit_code == 0, done.output
    alone = llm.generate("abc", SamplingParams(temperature=0, max_tokens=3))
    assert done.stdout == alone[0].outputs[0].text + "\n"


def test_in_a_terminal(model_dir):
    """Ctrl-C stops an answer, and at the prompt it ends."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "jaxinfer", "chat", str(model_dir), "--max-tokens", "200", "--temperature", "0"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    shown = b""

    def wait_for(text, seconds=60):
        nonlocal shown
        until = time.monotonic() + seconds
        while text not in shown:
            assert select.select([ours], [], [], max(0, until - time.monotonic()))[0], shown
            shown += os.read(ours, 4096)
        shown = shown[shown.index(text) + len(text) :]

    wait_for(b"> ")
    os.write(ours, b"/set stop_token_ids []\n/set ignore_eos true\nhi\n")
    wait_for(b"tokens is full]")
    wait_for(b"> ")
    os.write(ours, b"/bogus\n")
    wait_for(b"error: /bogus is not a command")
    wait_for(b"> ")
    for _ in range(10):  # readline loses one that comes before it waits, just after it has printed the prompt
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
            break
    assert process.returncode == 0
    os.close(ours)


# Reasoning

TEMPLATE = "{% for m in messages %}{{ m.content.split('</think>')[-1] }};{% endfor %}"
MISTRAL = "{{ messages[-1].content }}{# [THINK] #}"
HARMONY = "{{ messages[-1].content }}{# <|channel|> #}"
CHANNELS = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b"


def forced(llm, answer, **options):
    """A conversation whose answers are this text."""
    choice = StructuredOutputsParams(choice=(answer,))
    options.setdefault("chat_template", TEMPLATE)
    return Conversation(llm, SamplingParams(temperature=0, max_tokens=100, structured_outputs=choice), **options)


@contextlib.contextmanager
def terminal(monkeypatch):
    """Yields a function that reads from a terminal, which standard output is meanwhile, up to an ending."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)

        def read_until(ending):
            shown = ""
            while not shown.endswith(ending):
                assert select.select([ours], [], [], 60)[0], shown
                shown = (shown + os.read(ours, 4096).decode()).replace("\r\n", "\n")
            return shown

        yield read_until
    os.close(ours)


@pytest.mark.parametrize(
    ("template", "answer", "kept"),
    [
        (TEMPLATE, "<think>a</think>\n\nb", "<think>a</think>\n\nb"),
        (MISTRAL, "[THINK]a[/THINK]b", "[THINK]a[/THINK]b"),
        (HARMONY, CHANNELS, "b"),
    ],
)
def test_reasoning_is_dimmed_in_a_terminal(llm, monkeypatch, capsys, template, answer, kept):
    talk = forced(llm, answer, chat_template=template)
    with terminal(monkeypatch) as read_until:
        talk.take("hi")
        shown = read_until("b\n")
    assert "".join(re.findall("\x1b\\[2m(.*?)\x1b\\[0m", shown)) == "a"
    assert re.sub("\x1b\\[2m.*?\x1b\\[0m", "", shown) == "\n\nb\n"
    assert talk.messages[-1]["content"] == kept
    talk.take("hi")  # where standard output is no terminal, it has the text alone
    assert capsys.readouterr().out == answer + "\n"


def test_reasoning_is_hidden(llm, capsys):
    talk = forced(llm, "<think>a</think>\n\nb", hide_thinking=True)
    talk.take("hi")
    assert capsys.readouterr().out == "b\n"
    assert talk.messages[-1]["content"] == "<think>a</think>\n\nb"
    talk.take("/set max_tokens 9")
    talk.take("hi")  # it ends while the model thinks
    printed = capsys.readouterr()
    assert (printed.out, "[length; /set max_tokens allows more]" in printed.err) == ("\n", True)


def test_a_template_that_begins_the_reasoning(llm, capsys):
    template = "{{ messages[-1].content }}<think>\n{% if quick %}\n</think>{% endif %}\n"
    talk = forced(llm, "a</think>b", hide_thinking=True, chat_template=template)
    talk.take("hi")
    assert capsys.readouterr().out == "b\n"
    options = {"chat_template": template, "chat_template_kwargs": {"quick": True}}
    forced(llm, "a</think>b", hide_thinking=True, **options).take("hi")
    assert capsys.readouterr().out == "a</think>b\n"


def test_arguments_of_the_template(model_dir, llm, tmp_path):
    (tmp_path / "mine.jinja").write_text("{{ word or 'none' }}{{ enable_thinking }}")
    arguments = ["chat", str(model_dir), "--chat-template", str(tmp_path / "mine.jinja"), "--temperature", "0"]
    given = '{"word": "abc", "enable_thinking": false}'
    done = CliRunner().invoke(app, [*arguments, "--max-tokens", "3", "--chat-template-kwargs", given], input="x\n")
    assert done.exit_code == 0, done.output
    alone = llm.generate("abcFalse", SamplingParams(temperature=0, max_tokens=3))
    assert done.stdout == alone[0].outputs[0].text + "\n"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{enable_thinking: false}", "not JSON (Expecting property name"),
        ("[1]", "chat_template_kwargs must be a dict of arguments by name or None, got [1]"),
        ('{"tools": []}', "chat_template_kwargs holds tools: give it as an argument of its own"),
    ],
)
def test_wrong_arguments_of_the_template_are_refused_at_once(model_dir, monkeypatch, given, message):
    monkeypatch.setattr(LLM, "__init__", lambda *a, **k: pytest.fail("it was loaded first"))
    done = CliRunner().invoke(app, ["chat", str(model_dir), "--chat-template-kwargs", given])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: --chat-template-kwargs {given}: {message}")
    assert done.stderr.count("\n") == 1


def test_models_that_write_no_text_are_refused(vit, tmp_path):
    encoder = tmp_path / "bert"
    convert(Path(__file__).parents[1] / "goldens" / "bert_awkward", encoder)
    for model, message in (
        (vit, f"{vit} is an image model (vision_transformer), which does not read text; name a text model."),
        (encoder, f"{encoder} is an encoder, which writes no text; compute vectors with jaxinfer embed."),
    ):
        done = CliRunner().invoke(app, ["chat", str(model)])
        assert (done.exit_code, done.stderr) == (2, f"error: {message}\n")
