"""Parsers of answers: the same parts for every division of a text into pieces, and broken calls are content."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.text.parsing import AnswerFormat, TextPart, ToolCall
from jaxinfer.text.parsing.families import HARMONY, REASONING, TOOL_CALL_PARSERS, check_parsers

SCHEMAS = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "now": {"type": "object", "properties": {}},
}
PARIS = ToolCall("weather", '{"city": "Paris </tool_call>", "days": 3}')
NOW = ToolCall("now", "{}")


def written(name, call):
    """A call, as a family writes it."""
    values = json.loads(call.arguments)
    match name:
        case "hermes":
            return f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>'
        case "qwen3_coder":
            lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
            return f"<tool_call>\n<function={call.name}>\n{lines}</function>\n</tool_call>"
        case "glm45":
            pairs = "".join(
                f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items()
            )
            return f"<tool_call>{call.name}\n{pairs}</tool_call>"
        case "llama3_json":
            return f'<|python_tag|>{{"name": "{call.name}", "parameters": {call.arguments}}}'
        case "mistral":
            return f"[TOOL_CALLS]{call.name}[ARGS]{call.arguments}"
        case "deepseek_v3":
            return f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{call.arguments}<｜tool▁call▁end｜>"
        case "deepseek_v32":
            parameters = "".join(
                f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">{value}'
                "</｜DSML｜parameter>\n"
                for key, value in values.items()
            )
            return f'<｜DSML｜invoke name="{call.name}">\n{parameters}</｜DSML｜invoke>'
        case "openai":
            header = f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>"
            return f"{header}{call.arguments}<|call|><|start|>assistant"
    return f'{{"name": "{call.name}", "arguments": {call.arguments}}}'


def answer(name, content, *calls):
    """An answer with reasoning, content and calls, as a family writes it."""
    parts = "\n".join(written(name, call) for call in calls)
    if name == HARMONY:
        channel = "<|channel|>{}<|message|>{}<|end|><|start|>assistant"
        return channel.format("analysis", "I think.") + channel.format("final", content) + parts
    if name in ("json", "llama3_json") and not content:
        return ";".join(written("json", call).replace("arguments", "parameters", 1) for call in calls)
    return f"<think>\nI think.\n</think>\n\n{content}\n{parts}"


def parts_of(form, pieces, schemas=SCHEMAS, **options):
    """The parts of an answer, with texts of one kind that follow each other joined."""
    parser = form.parser(schemas, **options)
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    joined = []
    for part in parts:
        if isinstance(part, TextPart) and joined and isinstance(joined[-1], TextPart) and joined[-1].kind == part.kind:
            part = TextPart(part.kind, joined.pop().text + part.text)
        joined.append(part)
    return joined


def same_calls(found, expected):
    assert [call.name for call in found] == [call.name for call in expected]
    assert [json.loads(call.arguments) for call in found] == [json.loads(call.arguments) for call in expected]


def form_of(name):
    return AnswerFormat(name, HARMONY if name == HARMONY else "think")


@pytest.mark.parametrize("name", [name for name in TOOL_CALL_PARSERS if name != "json"])
def test_an_answer_has_reasoning_content_and_calls(name):
    reasoning, content, *calls = parts_of(form_of(name), [answer(name, "Let me look.", PARIS, NOW)])
    assert reasoning == TextPart("reasoning", "I think.")
    assert content == TextPart("content", "Let me look.")
    same_calls(calls, [PARIS, NOW])


@pytest.mark.parametrize("name", ["json", "llama3_json"])
def test_an_answer_that_is_nothing_but_calls_needs_no_marker(name):
    same_calls(parts_of(AnswerFormat(name, None), [answer(name, "", PARIS, NOW)]), [PARIS, NOW])


FENCED = '```json\n[{"name": "now", "arguments": {}}, {"name": "now", "arguments": null}]\n```'


def test_generic_calls_may_be_a_list_in_a_block_of_markdown():
    same_calls(parts_of(AnswerFormat("json", None), [FENCED]), [NOW, NOW])


BROKEN = {
    "truncated": lambda text: text[: len(text) * 2 // 3],
    "without its end": lambda text: text[: -len(text) // 8],
    "doubled": lambda text: text.replace('"', '""').replace("=", "==").replace("arg_value>", "arg_valu>"),
    "no JSON": lambda text: text.replace("{", "{,").replace("</", "<"),
}


@st.composite
def answers(draw):
    """A family, and one of its answers, whole or broken."""
    name = draw(st.sampled_from(TOOL_CALL_PARSERS))
    calls = draw(st.lists(st.sampled_from([PARIS, NOW]), max_size=3))
    content = draw(st.sampled_from(["", "Let me look.", " a <b", "[1, 2]", '{"a": 1}', "two\n\nlines \n"]))
    text = answer(name, content, *calls)
    if draw(st.booleans()):
        text = text.replace("I think.", f"I {written(name, draw(st.sampled_from([PARIS, NOW])))} think.")
    if how := draw(st.sampled_from([None, *BROKEN])):
        text = BROKEN[how](text)
    again = answer(name, content, *calls) if draw(st.booleans()) else ""
    return name, text + again


@settings(max_examples=400)
@given(answers(), st.data())
def test_every_division_gives_the_same_parts(given_answer, data):
    name, text = given_answer
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parts_of(form_of(name), [text])
    assert parts_of(form_of(name), pieces) == whole
    assert parts_of(form_of(name), list(text)) == whole
    for part in whole:
        if isinstance(part, ToolCall):
            assert isinstance(json.loads(part.arguments), dict)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm45", "mistral", "deepseek_v3", "deepseek_v32"])
def test_a_broken_call_is_content_and_the_next_one_is_a_call(name):
    broken = BROKEN["no JSON"](written(name, PARIS)).replace("<arg_key>", "<key>").replace("<parameter", "<param")
    broken = broken.replace("<｜DSML｜parameter", "<｜DSML｜param").replace("<｜tool▁sep｜>", "")
    if name in ("hermes", "qwen3_coder", "glm45"):
        broken += "</tool_call>"
    form = AnswerFormat(name, None)
    parts = parts_of(form, [broken + written(name, NOW)])
    same_calls([part for part in parts if isinstance(part, ToolCall)], [NOW])
    assert isinstance(parts[0], TextPart)


@pytest.mark.parametrize("name", TOOL_CALL_PARSERS)
def test_without_tools_nothing_is_a_call(name):
    text = written(name, PARIS)
    parts = parts_of(AnswerFormat(name, None), [text], None)
    assert all(isinstance(part, TextPart) for part in parts)
    if name != HARMONY:
        assert parts == [TextPart("content", text)]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm45", "llama3_json", "mistral", "deepseek_v3"])
def test_reasoning_may_end_with_a_call(name):
    text = f"<think>I look.\n{written(name, NOW)}"
    for pieces in ([text], list(text)):
        reasoning, call = parts_of(form_of(name), pieces)
        assert reasoning == TextPart("reasoning", "I look.")
        same_calls([call], [NOW])


def test_a_broken_call_in_reasoning_is_reasoning():
    text = "<think>I write <tool_call>{}</tool_call> or so.</think>Yes"
    for pieces in ([text], list(text)):
        assert parts_of(form_of("hermes"), pieces) == [
            TextPart("reasoning", "I write <tool_call>{}</tool_call> or so."),
            TextPart("content", "Yes"),
        ]


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "deepseek_v32"])
def test_a_call_that_is_cut_off_between_arguments_is_content(name):
    text = written(name, PARIS)
    cut = text[: text.rindex({"qwen3_coder": "<param", "glm45": "<arg_key>"}.get(name, "<｜DSML｜param"))]
    parts = parts_of(AnswerFormat(name, None), [cut])
    assert all(isinstance(part, TextPart) for part in parts)


def test_a_call_of_qwen_coder_needs_no_outer_marker():
    text = written("qwen3_coder", PARIS).removeprefix("<tool_call>\n")
    same_calls(parts_of(AnswerFormat("qwen3_coder", None), [text]), [PARIS])


def test_a_call_of_deepseek_v4():
    text = f"<｜DSML｜tool_calls>\n{written('deepseek_v32', PARIS)}\n</｜DSML｜tool_calls>"
    same_calls(parts_of(AnswerFormat("deepseek_v32", None), [text]), [PARIS])


def test_code_for_a_built_in_tool_of_llama_is_content():
    text = '<|python_tag|>brave_search.call(query="weather")'
    assert parts_of(AnswerFormat("llama3_json", None), list(text)) == [TextPart("content", text)]


OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "integer"}, "5", 5),
        ({"type": "number"}, "5", 5),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "array"}, '[1, "a"]', [1, "a"]),
        ({"type": "object"}, "{'a': 1}", "{'a': 1}"),
        (OPTIONAL, "5", "5"),
        (OPTIONAL, "None", None),
        (OPTIONAL, "null", None),
        (OPTIONAL, '"a"', '"a"'),
        ({"type": ["integer", "string"]}, "5", 5),
        ({"type": ["integer", "string"]}, "5.5", "5.5"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": "1"}, "1", "1"),
        ({"$ref": "#/$defs/Color"}, "1", "1"),
        ({"allOf": [{"$ref": "#/$defs/Color"}]}, "1", "1"),
        ({"$ref": "#/$defs/Loop"}, "1", 1),
        ({"$ref": "#/nowhere"}, "1", 1),
        ({}, "1", 1),
        ({}, "None", "None"),
        (True, "a", "a"),
    ],
)
def test_values_without_types_get_those_of_the_schema(schema, text, value):
    parameters = {
        "properties": {"a": schema},
        "$defs": {"Color": {"type": "string"}, "Loop": {"$ref": "#/$defs/Loop"}},
    }
    written_call = f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    (call,) = parts_of(AnswerFormat("glm45", None), [written_call], {"f": parameters})
    assert json.loads(call.arguments) == {"a": value}
    assert type(json.loads(call.arguments)["a"]) is type(value)


@pytest.mark.parametrize("text", ['{"' + "a" * 40_000, "[" * 40_000, '{"name": "' + "a" * 40_000])
def test_answers_that_begin_like_a_call_take_no_time(text):
    """Each piece is looked at once, or 10,000 of them would take minutes."""
    pieces = [text[place : place + 4] for place in range(0, len(text), 4)]
    assert parts_of(AnswerFormat("llama3_json", None), pieces) == [TextPart("content", text)]


def test_an_answer_of_content_alone_stays_as_it_is():
    for text in ("", " ", " a\n\nb \n", "<think", "a </think> b"):
        parts = parts_of(AnswerFormat("hermes", "think"), list(text))
        assert "".join(part.text for part in parts) == text


def test_reasoning_that_the_prompt_has_begun():
    form = AnswerFormat("hermes", "think")
    assert form.opens_reasoning("user<think>\n")
    assert not form.opens_reasoning("<think>\n\n</think>\n\n")
    for text in ("Hm.\n</think>\nYes", "<think>Hm.</think>Yes"):
        assert parts_of(form, list(text), opened=True) == [TextPart("reasoning", "Hm."), TextPart("content", "Yes")]
    assert parts_of(form, ["Hm. "], opened=True) == [TextPart("reasoning", "Hm.")]


def test_content_streams_while_there_are_tools():
    parser = AnswerFormat("hermes", "think").parser(SCHEMAS)
    assert [parser.push(piece) for piece in ("Let", " me", " see: <b")] == [
        [TextPart("content", "Let")],
        [TextPart("content", " me")],
        [TextPart("content", " see: <b")],
    ]


def test_json_that_is_no_call_streams():
    parser = AnswerFormat("llama3_json", None).parser(SCHEMAS)
    assert parser.push('{"city') == []
    assert parser.push('": "P') == [TextPart("content", '{"city": "P')]


@pytest.mark.parametrize("text", ["<tool_call>{" * 5000, '<tool_call>{"a": "' * 3000 + "</tool_call>" * 3000])
def test_hostile_answers_take_no_time(text):
    parts = parts_of(AnswerFormat("hermes", "think"), [text])
    assert parts == [TextPart("content", text)]


@pytest.mark.parametrize("names", [("hermes", "deep"), ("Hermes", None)])
def test_unknown_formats_are_refused(names):
    with pytest.raises(ValueError, match="is unknown; known: "):
        check_parsers(*names)


def test_every_reasoning_marker_is_found_in_a_template():
    for name, tags in REASONING.items():
        assert AnswerFormat.of_template(f"{tags.begin} {tags.end}").reasoning == name
    assert AnswerFormat.of_template("{{ messages }}") == AnswerFormat("json", None, False)


QWEN = "{{ '<tool_call>' ~ (call.arguments | tojson) }}{% if enable_thinking %}<think></think>{% endif %}"
JOINED = "{{ '<｜tool▁call▁begin｜>' + tool['function']['name'] + tool['function']['arguments'] + '</think>' }}"


@pytest.mark.parametrize(
    ("template", "calls", "reasoning", "switches", "text_arguments"),
    [
        (QWEN, "hermes", "think", ("enable_thinking",), False),
        ("<tool_call>\n<function={{ name }}>", "qwen3_coder", None, (), False),
        ("<tool_call>{{ name }}<arg_key>{{ k }}</arg_key></think>", "glm45", "think", (), False),
        ("<|start_header_id|>{{ call.arguments | tojson }}", "llama3_json", None, (), False),
        ("{% if builtin_tools %}<|python_tag|>{% endif %}", "llama3_json", None, (), False),
        ("[TOOL_CALLS][{{ call.function | tojson }}", "mistral", None, (), False),
        ("[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}[THINK]", "mistral", "mistral", (), False),
        (JOINED + "{%- if not thinking %}{% endif %}", "deepseek_v3", "think", ("thinking",), True),
        ("{{ '\n' ~ call.function.arguments }}", "json", None, (), True),
        ("{% set dsml = '｜DSML｜' %}{{ '</think>' }}", "deepseek_v32", "think", (), False),
        ("<|channel|>{{ message.thinking }}{{ reasoning_effort }}", HARMONY, HARMONY, ("reasoning_effort",), False),
    ],
)
def test_families_are_known_by_their_templates(template, calls, reasoning, switches, text_arguments):
    expected = AnswerFormat(calls, reasoning, "tools" in template, switches, text_arguments)
    assert AnswerFormat.of_template(template) == expected
