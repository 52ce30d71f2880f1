"""Conversations as text, held against what transformers renders of them (`goldens/make_chat_goldens.py`)."""

import json

import pytest

from jaxinfer.text.chat_template import ChatTemplates, check_messages, check_options
from tests.goldens.make_chat_goldens import CONVERSATIONS, EXPECTED, FOLDERS, cases, write_folder

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    """Of each folder."""
    base = tmp_path_factory.mktemp("chat")
    for name in FOLDERS:
        write_folder(name, base / name)
    return {name: ChatTemplates(base / name) for name in FOLDERS}


@pytest.fixture
def made(tmp_path):
    """The templates of a folder with these files."""

    def make(files):
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return ChatTemplates(tmp_path)

    return make


@pytest.mark.parametrize("name", FOLDERS)
def test_renders_as_transformers_does(templates, name):
    expected, compared = json.loads(EXPECTED.read_text(encoding="utf-8"))["rendered"], 0
    for case, folder, talk, options in cases():
        if folder != name:
            continue
        try:
            found = templates[folder].render(CONVERSATIONS[talk], **options)
        except ValueError as error:
            found, refusal = None, str(error)
            assert "chat template" in refusal or "last message" in refusal, case
        assert found == expected[case], case
        compared += 1
    assert compared


def test_the_conversation_is_left_as_it_was(templates):
    before = json.dumps(CONVERSATIONS)
    templates["turns"].render(CONVERSATIONS["parts"], add_generation_prompt=False, continue_final_message=True)
    assert json.dumps(CONVERSATIONS) == before


def test_which_file_is_taken(made):
    """A processor's chat_template.json comes before tokenizer_config.json, and a template of its own before both."""
    files = {
        "tokenizer_config.json": {"chat_template": {"default": "config", "rag": "config's rag"}},
        "chat_template.json": {"chat_template": "processor"},
        "additional_chat_templates/tool_use.jinja": "tools",
        "chat_template.jinja": "file",
    }
    for name, expected in zip(files, ("config", "processor", None, "file"), strict=True):
        templates = made({name: files[name]})
        if expected is None:
            with pytest.raises(ValueError, match=r"None of the model.s chat templates is the default one.*tool_use"):
                templates.render(HELLO)
        else:
            assert templates.render(HELLO) == expected
    assert templates.render(HELLO, tools=[]) == "tools"
    with pytest.raises(ValueError, match="chat_template='rag' is no template of this model; it has: default, tool_use"):
        templates.render(HELLO, chat_template="rag")


def test_without_templates(made):
    with pytest.raises(ValueError, match="The model directory has no chat template"):
        made({}).render(HELLO)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "tokenizer_config.json is not JSON"),
        ([1], r"tokenizer_config.json must be .* got \[1\]"),
        ({"chat_template": 5}, "tokenizer_config.json: chat_template must be .* got 5"),
        ({"chat_template": [{"name": "a"}]}, "each entry must have a name and a template"),
    ],
)
def test_damaged_files(made, config, message):
    with pytest.raises(ValueError, match=message):
        made({"tokenizer_config.json": config})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% if %}", "The chat template cannot be read, in line 1: "),
        ("{{ raise_exception('no') }}", "The chat template refuses these messages: no"),
        ("{{ 'a' + 1 }}", "refuses these messages: TypeError: can only concatenate"),
        ("{{ messages[0].content.foo.bar }}", "refuses these messages: 'str object' has no attribute 'foo'"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "refuses these messages: RecursionError"),
        ("{{ range(10**9) | list }}", "refuses these messages: OverflowError"),
    ],
)
def test_what_goes_wrong_in_a_template_is_a_value_error(made, text, message):
    with pytest.raises(ValueError, match=message):
        made({"chat_template.jinja": text}).render(HELLO)


WRONG = [
    ([], {}, "messages must be a list of messages"),
    (None, {}, "messages must be a list of messages"),
    ("Hello", {}, "messages must be a list of messages"),
    (HELLO[0], {}, "messages must be a list of messages"),
    ([["user", "Hello"]], {}, "messages must be a list of messages"),
    ([{"content": "Hello"}], {}, r"messages\[0\] must have a role"),
    ([*HELLO, {"role": 5}], {}, r"messages\[1\] must have a role"),
    ([{"role": "user", "content": b"Hello"}], {}, "messages must be JSON: Object of type bytes"),
    (HELLO, {"tools": {"name": "a"}}, "tools must be a list of functions as JSON schemas"),
    (HELLO, {"tools": [print]}, "tools must be a list of functions as JSON schemas"),
    (HELLO, {"tools": [{"function": print}]}, "tools must be JSON: Object of type builtin_function"),
    (HELLO, {"documents": "a"}, "documents must be a list of dicts"),
    (HELLO, {"chat_template": 5}, "chat_template must be a string or None, got 5"),
    (HELLO, {"chat_template_kwargs": [1]}, "chat_template_kwargs must be a dict of arguments by name or None"),
    (HELLO, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs holds tools: give it as an argument"),
    (HELLO, {"add_generation_prompt": 1}, "add_generation_prompt must be True or False, got 1"),
    (HELLO, {"continue_final_message": True}, "give add_generation_prompt=False"),
    (
        [{"role": "assistant"}],
        {"continue_final_message": True, "add_generation_prompt": False},
        "continue_final_message needs a text in the last message",
    ),
]


@pytest.mark.parametrize(("messages", "options", "message"), WRONG)
def test_what_is_no_conversation(made, messages, options, message):
    with pytest.raises(ValueError, match=message):
        made({"chat_template.jinja": "{{ messages }}"}).render(messages, **options)


def test_copies_of_a_conversation():
    messages, options = [{"role": "user", "content": [{"text": "a"}]}], {"tools": [{"name": "a"}]}
    copied = check_messages(messages), check_options(options)
    messages[0]["content"][0]["text"] = options["tools"][0]["name"] = "b"
    assert copied == ([{"role": "user", "content": [{"text": "a"}]}], {"tools": [{"name": "a"}]})
    with pytest.raises(TypeError, match="chat has no option tool; known: tools"):
        check_options({"tool": []})
