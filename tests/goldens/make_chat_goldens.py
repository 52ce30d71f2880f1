"""Makes `chat_templates.json`: what `transformers` renders of conversations by the templates in `chat_templates/`.

The templates are our own; together they use what those of published families do. Runs in the environment of the peers,
never in the tests, which take the table of cases from here:

    make peers && .venv-peers/bin/python tests/goldens/make_chat_goldens.py
"""

import itertools
import json
import pathlib
import tempfile
from collections.abc import Iterator

HERE = pathlib.Path(__file__).parent
TEMPLATES, EXPECTED = HERE / "chat_templates", HERE / "chat_templates.json"

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
ADDED_TOKEN = {"__type": "AddedToken", "content": "<e>", "special": True}
ADDED = {"0": {"content": "<s>", "special": True}}

# name -> files of a model directory; a text that begins with @ is a file of `chat_templates/`
FOLDERS: dict[str, dict] = {
    "headers": {"tokenizer_config.json": TOKENS, "chat_template.jinja": "@headers.jinja"},
    "thinking": {"tokenizer_config.json": {"eos_token": ADDED_TOKEN, "chat_template": "@thinking.jinja"}},
    "brackets": {
        "tokenizer_config.json": {"bos_token": None, "chat_template": "@brackets.jinja"},
        "special_tokens_map.json": {"bos_token": {"content": "<legacy>", "lstrip": False}, "eos_token": "</legacy>"},
    },
    "turns": {
        "tokenizer_config.json": TOKENS
        | {"added_tokens_decoder": ADDED, "extra_special_tokens": {"image_token": "<img>"}}
        | {"chat_template": "@turns.jinja"},
        "special_tokens_map.json": {"bos_token": "<overruled>"},
    },
    "macros": {"tokenizer_config.json": TOKENS | {"chat_template": [{"name": "default", "template": "@macros.jinja"}]}},
    "calls": {
        "tokenizer_config.json": TOKENS
        | {
            "chat_template": [
                {"name": "default", "template": "@plain.jinja"},
                {"name": "tool_use", "template": "@calls.jinja"},
            ]
        },
    },
    "flags": {
        "tokenizer_config.json": TOKENS | {"chat_template": "never, as there is a file"},
        "chat_template.jinja": "@flags.jinja",
    },
    "loops": {
        "tokenizer_config.json": TOKENS | {"sop_token": "<sop>", "start_token": "<start>", "chat_template": "never"},
        "chat_template.jinja": "@plain.jinja",
        "additional_chat_templates/loops.jinja": "@loops.jinja",
        "additional_chat_templates/tool_use.jinja": "@thinking.jinja",
    },
    "switches": {"tokenizer_config.json": TOKENS, "chat_template.jinja": "@switches.jinja"},
    "filters": {"tokenizer_config.json": TOKENS, "chat_template.jinja": "@filters.jinja"},
    "no_default": {"tokenizer_config.json": {"chat_template": [{"name": "rag", "template": "@plain.jinja"}]}},
}
TEMPLATED = [name for name in FOLDERS if name != "no_default"]

ADD = {
    "type": "function",
    "function": {
        "name": "add-up",
        "description": "Adds numbers <exactly> & \"quickly\", even in 'é'",
        "parameters": {
            "type": "object",
            "properties": {
                "numbers": {"type": "array", "items": {"type": "number"}},
                "how": {"type": "string", "enum": ["exact", "fast"]},
                "by": {"type": ["string", "null"]},
                "seen": {"type": "object", "additionalProperties": {"type": "boolean"}},
            },
            "required": ["numbers", "how"],
        },
        "return": {"type": "number"},
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
CALL = {
    "id": "call9",
    "type": "function",
    "function": {"name": "add-up", "arguments": {"numbers": [1, 2.5], "how": "exact"}},
}

CONVERSATIONS: dict[str, list[dict]] = {
    "one": [{"role": "user", "content": "  Is 1 < 2 & \"quoted\", 'é' 日本?\n"}],
    "several": [
        {"role": "system", "content": "Be brief. /no_think"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello to you ", "tool_calls": None},
        {"role": "user", "content": "And now?\n\nTwo lines."},
    ],
    "tools": [
        {"role": "user", "content": "Add 1 and 2.5"},
        {"role": "assistant", "content": None, "reasoning": "I add.", "tool_calls": [CALL]},
        {"role": "tool", "content": "3.5", "tool_call_id": "call9", "name": "add-up"},
        {"role": "assistant", "content": "It is 3.5"},
        {"role": "user", "content": "Thanks"},
    ],
    "open": [
        {"role": "system", "content": "Twice. /whole"},
        {"role": "user", "content": "Add, twice"},
        {"role": "assistant", "content": "Both:", "tool_calls": [CALL, CALL | {"id": "call10"}]},
        {"role": "tool", "content": "3.5", "tool_call_id": "call9"},
        {"role": "tool", "content": "<3.5>", "tool_call_id": "call10"},
    ],
    "mapping": [
        {"role": "user", "content": "Add"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": {"content": "<3.5>", "é": [1]}, "tool_call_id": "call9"},
    ],
    "parts": [
        {"role": "system", "content": [{"type": "text", "text": "Look."}]},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " What is it? "}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A cat "}]},
    ],
    "stop": [
        {"role": "user", "content": "a"},
        {"role": "system", "content": "b"},
        {"role": "assistant", "content": "c", "thinking": "because"},
        {"role": "user", "content": "STOP"},
        {"role": "user", "content": "d"},
    ],
}

TOOLS = {"without": None, "with": [ADD, CLOCK]}
DOCUMENTS = [{"title": "Cats", "text": "They purr & <sleep>."}, {"title": "Dogs", "text": "Woof"}]

# (folder, conversation, options) of what not all templates have
FURTHER: list[tuple[str, str, dict]] = [
    ("headers", "several", {"tools": [ADD], "chat_template_kwargs": {"functions_beside_user": False}}),
    ("headers", "several", {"chat_template_kwargs": {"custom_functions": [CLOCK], "bos_token": "<mine>"}}),
    ("headers", "one", {"tools": []}),
    ("thinking", "one", {"chat_template_kwargs": {"enable_thinking": False}}),
    ("thinking", "one", {"chat_template_kwargs": {"enable_thinking": True}}),
    ("macros", "several", {"documents": DOCUMENTS, "tools": [CLOCK]}),
    ("calls", "one", {"tools": [], "chat_template": "default"}),
    ("calls", "one", {"tools": [ADD], "chat_template": "default"}),
    ("loops", "tools", {"chat_template": "loops"}),
    ("loops", "stop", {"chat_template": "loops"}),
    ("loops", "several", {"chat_template": "loops", "add_generation_prompt": False}),
    ("loops", "one", {"chat_template": "{{ messages[0].content | upper }}!"}),
    ("no_default", "one", {"chat_template": "rag"}),
    ("no_default", "one", {}),
    ("switches", "one", {"chat_template_kwargs": {"python_tools": ["a()", "b()"], "enable_thinking": False}}),
    ("switches", "one", {"chat_template_kwargs": {"xml_tools": [{"a": 1}]}}),
    *(
        ("filters", "one", {"chat_template_kwargs": {"fail": fail}})
        for fail in ("type", "zero", "name", "json", "sandbox", "dunder", "said")
    ),
    *(
        (name, conversation, {"add_generation_prompt": False, "continue_final_message": True})
        for name in ("thinking", "turns", "switches", "brackets")
        for conversation in ("one", "several", "parts", "tools", "stop")
    ),
]


def cases() -> Iterator[tuple[str, str, str, dict]]:
    """Of each case its name, folder, conversation and options."""
    for folder, talk, tools, begun in itertools.product(TEMPLATED, CONVERSATIONS, TOOLS, (True, False)):
        options: dict = {} if begun else {"add_generation_prompt": False}
        yield (
            f"{folder} {talk} {tools} tools{'' if begun else ', ended'}",
            folder,
            talk,
            options | ({"tools": TOOLS[tools]} if TOOLS[tools] else {}),
        )
    for number, (folder, talk, options) in enumerate(FURTHER):
        yield f"{folder} {talk} {number}", folder, talk, options


def write_folder(name: str, path: pathlib.Path) -> None:
    """The files of a folder that is not there yet."""
    for file, content in FOLDERS[name].items():
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        (path / file).write_text(_filled(content) if isinstance(content, str) else json.dumps(_filled(content)))


def _filled(content):
    if isinstance(content, dict):
        return {key: _filled(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_filled(value) for value in content]
    is_file = isinstance(content, str) and content.startswith("@")
    return (TEMPLATES / content[1:]).read_text(encoding="utf-8") if is_file else content


def main() -> None:
    import tokenizers
    import transformers

    expected: dict[str, str | None] = {}
    with tempfile.TemporaryDirectory() as temporary:
        loaded = {}
        for name in FOLDERS:
            folder = pathlib.Path(temporary) / name
            write_folder(name, folder)
            tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a")).save(str(folder / "tokenizer.json"))
            loaded[name] = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        for case, folder, talk, options in cases():
            given = {"add_generation_prompt": True} | options
            further = given.pop("chat_template_kwargs", {})
            try:
                text = loaded[folder].apply_chat_template(CONVERSATIONS[talk], tokenize=False, **given, **further)
            except Exception as error:  # whatever a template raises: that it does so is what is kept
                print(f"{case}: {type(error).__name__}: {str(error)[:100]}")
                text = None
            expected[case] = text
    document = {"transformers": transformers.__version__, "rendered": expected}
    EXPECTED.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
