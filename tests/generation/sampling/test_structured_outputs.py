import functools
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from jaxinfer.generation.params import StructuredOutputsParams
from jaxinfer.generation.sampling.bitmasks import bitmask_words
from jaxinfer.generation.sampling.structured_outputs import GrammarCompiler, GrammarMatcher
from tests.schemas import random_schema
from tests.tiny import byte_tokenizer

DEMO = Path(__file__).parents[3] / "examples/demo_model/tokenizer.json"
END = 256


class Model:
    """A tokenizer, and a vocabulary that it does not fill."""

    def __init__(self, tokenizer: Tokenizer, *, vocab: int, eos_ids: tuple[int, ...]):
        self.tokenizer, self.vocab, self.eos_ids = tokenizer, vocab, eos_ids
        self.compiler = GrammarCompiler(tokenizer.to_str(), vocab=vocab, eos_ids=eos_ids)
        self.texts = [tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size())]

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def accepts(self, params: StructuredOutputsParams, text: str) -> bool:
        """Whether the whole of a text follows a grammar."""
        matcher = self.compiler.matcher(params)
        try:
            for token in self.ids(text):
                matcher.accept_token(token)
        except ValueError:
            return False
        return matcher.accepting

    def write(self, params: StructuredOutputsParams, rng: np.random.Generator, *, patience: int = 100) -> str:
        """A random text with a params: any allowed token, and those that lead to an end after `patience` tokens."""
        matcher, tokens = self.compiler.matcher(params), []
        while True:
            allowed = check_bitmask(matcher, self)
            hurried = len(tokens) >= patience
            if matcher.finished or (matcher.accepting and hurried):
                return self.tokenizer.decode(tokens)
            token = int(rng.choice(self._closing(allowed) if hurried else allowed))
            if token in self.eos_ids:
                return self.tokenizer.decode(tokens)
            matcher.accept_token(token)
            tokens.append(token)
            assert len(tokens) < 400

    def _closing(self, allowed: list[int]) -> list[int]:
        closing = [i for i in allowed if set(self.texts[i]) <= set('"]}')]
        going_on = [i for i in allowed if self.texts[i] == ","]  # ends a number before a required property
        plain = [i for i in allowed if "\\" not in self.texts[i] and not self.texts[i].isspace()]
        return closing or going_on or plain or allowed


def check_bitmask(matcher: GrammarMatcher, model: Model) -> list[int]:
    """The tokens of a bitmask, which agree with what else the matcher says."""
    bits = unpack(matcher.token_bitmask())
    allowed = allowed_ids(matcher)
    assert len(bits) == 32 * bitmask_words(model.vocab)
    assert not bits[len(model.texts) :].any()  # ids without a text, and beyond the vocabulary
    assert [bits[i] for i in model.eos_ids] == [matcher.accepting] * len(model.eos_ids)
    assert matcher.finished == (set(allowed) == set(model.eos_ids))
    return allowed


def unpack(bitmask: np.ndarray) -> np.ndarray:
    assert bitmask.dtype == np.uint32
    i = np.arange(32 * len(bitmask))
    return (bitmask[i // 32] >> (i % 32) & 1).astype(bool)


@functools.cache
def model(name: str) -> Model:
    if name == "byte":
        return Model(byte_tokenizer(), vocab=300, eos_ids=(END,))
    return Model(Tokenizer.from_file(str(DEMO)), vocab=4100, eos_ids=(0,))


@pytest.fixture(params=["byte", "demo"])
def any_model(request) -> Model:
    return model(request.param)


@pytest.fixture
def tiny() -> Model:
    return model("byte")


def allowed_ids(matcher: GrammarMatcher) -> list[int]:
    return np.flatnonzero(unpack(matcher.token_bitmask())).tolist()


@pytest.mark.parametrize("block", range(10))
def test_random_schemas_are_satisfied(any_model, block):
    for seed in range(20 * block, 20 * block + 20):
        rng = np.random.default_rng(seed)
        schema = random_schema(rng)
        text = any_model.write(StructuredOutputsParams(json=schema), rng)
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def test_any_json_is_an_empty_schema(any_model):
    assert any_model.accepts(StructuredOutputsParams(json={}), '{"a":[1,"b",null,{"c":-2.5e3}]}')
    assert not any_model.accepts(StructuredOutputsParams(json={}), '{"a": 1')


@pytest.mark.parametrize("name", ["password", "binary", "byte", "file-path", "uuid4", "base64url", "regex", "iri"])
def test_formats_that_describe_are_no_rules(tiny, name):
    """As in the standard; those that are enforced are, and a property or a value may be called format."""
    described = {"type": "string", "format": name}
    schema = {"type": "object", "properties": {"format": described}, "required": ["format"]}
    schema["properties"]["day"] = {"type": "string", "format": "date"}
    params = StructuredOutputsParams(json=schema | {"additionalProperties": False})
    assert tiny.accepts(params, '{"format":"any text"}')
    assert not tiny.accepts(params, '{"format":1}')
    assert tiny.accepts(params, '{"format":"a","day":"2026-11-28"}')
    assert not tiny.accepts(params, '{"format":"a","day":"soon"}')
    assert tiny.accepts(StructuredOutputsParams(json={"enum": [described]}), json.dumps(described, separators=",:"))


def test_properties_come_in_the_order_of_the_schema(tiny):
    params = StructuredOutputsParams(json={"properties": {"b": {}, "a": {}}, "required": ["a", "b"]})
    assert tiny.accepts(params, '{"b":1,"a":2}')
    assert not tiny.accepts(params, '{"a":2,"b":1}')


def test_json_is_compact_unless_blanks_are_asked_for(tiny):
    schema = {"type": "array", "items": {"type": "object", "properties": {"a b": {}}}}
    compact, spaced = '[{"a b":"c d"},{}]', '[ {"a b": "c d"}, {}]'
    params = StructuredOutputsParams(json=schema)
    assert tiny.accepts(params, compact)
    for blank in ("[ {}]", "[{} ]", "[{},\n{}]", '[{"a b": 1}]', '[{"a b":1 }]', " []", "[]\t"):
        assert not tiny.accepts(params, blank), blank
    flexible = StructuredOutputsParams(json=schema, whitespace_pattern=r"[ \n]{1,2}")
    assert tiny.accepts(flexible, compact)
    assert tiny.accepts(flexible, spaced)
    assert not tiny.accepts(flexible, "[   {}]")
    in_schema = StructuredOutputsParams(json=schema | {"x-guidance": {"whitespace_flexible": True}})
    assert tiny.accepts(in_schema, "[" + 99 * " " + "{}]")


@pytest.mark.parametrize(
    "regex", [r"[a-f]{2,8}", r"[0-9]{3}-[0-9]{4}", r"(é|日本|😀)+x?", r"/\*[^*\n]{0,9}\*/", "yes|no"]
)
def test_regex_matches_the_whole_text(any_model, regex):
    for seed in range(10):
        text = any_model.write(StructuredOutputsParams(regex=regex), np.random.default_rng(seed), patience=20)
        assert re.fullmatch(regex, text)


def test_choice_is_taken_literally(any_model):
    choice = ('say "hi"', "a\\n", "a\nb", "/x/i", "日本", "$", "aa", "a", ".*")
    params = StructuredOutputsParams(choice=choice)
    assert all(any_model.accepts(params, text) for text in choice)
    assert not any(any_model.accepts(params, text) for text in ("aaa", "a\\", "b", "日"))
    written = {any_model.write(params, np.random.default_rng(seed)) for seed in range(200)}
    assert written == set(choice)


def test_thousands_of_choices(tiny):
    params = StructuredOutputsParams(choice=tuple(f"item {i}" for i in range(5000)))
    assert tiny.accepts(params, "item 4999")
    assert not tiny.accepts(params, "item 5000")


def test_lark_grammar(any_model):
    params = StructuredOutputsParams(grammar='start: "(" start ")" | NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]{1,3}/')
    assert all(any_model.accepts(params, text) for text in ("7", "((12+345))", "(1+2+3)"))
    assert not any(any_model.accepts(params, text) for text in ("(7", "7)", "1234", "1+"))


def test_tokens_may_be_named_in_a_grammar(tiny):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["<tool>"])
    tool = tokenizer.token_to_id("<tool>")
    compiler = GrammarCompiler(tokenizer.to_str(), vocab=258, eos_ids=(END,))
    matcher = compiler.matcher(StructuredOutputsParams(grammar='start: <tool> "x"'))
    assert allowed_ids(matcher) == [tool]
    assert tool not in allowed_ids(compiler.matcher(StructuredOutputsParams(regex="(?s:.)+")))


def test_ends_and_copies(tiny):
    a, b = tiny.ids("ab")
    matcher = tiny.compiler.matcher(StructuredOutputsParams(regex="ab?"))
    assert (matcher.accepting, matcher.finished, allowed_ids(matcher)) == (False, False, [a])
    matcher.accept_token(a)
    assert (matcher.accepting, matcher.finished, allowed_ids(matcher)) == (True, False, sorted([b, END]))
    ended = matcher.copy()
    ended.accept_token(END)
    assert (ended.accepting, ended.finished, allowed_ids(ended)) == (True, True, [END])
    with pytest.raises(ValueError, match=f"Token {b} may not follow"):
        ended.accept_token(b)
    assert not matcher.finished
    matcher.accept_token(b)
    assert (matcher.accepting, matcher.finished, allowed_ids(matcher)) == (True, True, [END])
    assert allowed_ids(tiny.compiler.matcher(StructuredOutputsParams(regex="ab?"))) == [
        a
    ]  # compiled once, and still at its beginning


@pytest.mark.parametrize("token", [-1, END, 257, 299, 300, 10**6])
def test_a_refused_token_changes_nothing(tiny, token):
    matcher = tiny.compiler.matcher(StructuredOutputsParams(regex="ab"))
    for refused in (token, *tiny.ids("b")):
        with pytest.raises(ValueError, match=f"Token {refused} may not follow"):
            matcher.accept_token(refused)
    for allowed in tiny.ids("ab"):
        matcher.accept_token(allowed)
    assert matcher.finished


def test_every_end_of_text_token_is_allowed_and_is_never_text():
    tokenizer = byte_tokenizer()
    (x,) = tokenizer.encode("x").ids
    ends = (END, 270, x)  # special, without a text, and an ordinary letter
    model = Model(tokenizer, vocab=300, eos_ids=ends)
    matcher = model.compiler.matcher(StructuredOutputsParams(regex="[wx]{1,2}"))
    assert allowed_ids(matcher) == model.ids("w")
    matcher.accept_token(*model.ids("w"))
    assert allowed_ids(matcher) == sorted([*ends, *model.ids("w")])
    for end in ends:
        ended = matcher.copy()
        ended.accept_token(end)
        assert ended.finished


def test_the_token_added_for_llguidance_is_never_one_of_the_model():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["<|end of grammar|>"])
    compiler = GrammarCompiler(tokenizer.to_str(), vocab=300, eos_ids=(END,))
    matcher = compiler.matcher(StructuredOutputsParams(regex="a"))
    matcher.accept_token(*tokenizer.encode("a").ids)
    assert allowed_ids(matcher) == [END]


def test_a_model_without_an_end_of_text_token():
    model = Model(byte_tokenizer(), vocab=257, eos_ids=())
    zero = model.tokenizer.id_to_token(0)
    matcher = model.compiler.matcher(StructuredOutputsParams(regex=f"{zero}a?"))
    assert allowed_ids(matcher) == [0]  # token 0 is a letter like any other
    matcher.accept_token(0)
    assert allowed_ids(matcher) == model.ids("a")
    assert matcher.accepting
    matcher.accept_token(*model.ids("a"))
    assert matcher.finished
    with pytest.raises(ValueError, match="No token of the model may follow"):
        matcher.token_bitmask()


def test_a_vocabulary_smaller_than_the_tokenizer():
    tokenizer = byte_tokenizer()
    (a,) = tokenizer.encode("a").ids
    compiler = GrammarCompiler(tokenizer.to_str(), vocab=a + 1, eos_ids=(0,))
    assert allowed_ids(compiler.matcher(StructuredOutputsParams(regex="[ab]"))) == [a]
    with pytest.raises(ValueError, match="its vocabulary cannot continue this text"):
        compiler.matcher(StructuredOutputsParams(regex="b"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"json": {"type": "text"}}, "StructuredOutputsParams.json does not compile: Invalid type: text"),
        ({"json": {"not": {}}}, r'StructuredOutputsParams.json does not compile: Unimplemented keys: \["not"\]'),
        ({"json": {"minimum": 2, "maximum": 1, "type": "integer"}}, "Unsatisfiable schema: minimum"),
        ({"json": {"oneOf": [{"type": "string"}, {"maxLength": 3}]}}, "oneOf constraints are not supported. Use anyOf"),
        ({"json": {"x-guidance": {"indent": 2}}}, "StructuredOutputsParams.json does not compile: unknown field"),
        (
            {"json": {}, "whitespace_pattern": "("},
            "StructuredOutputsParams.json does not compile: (?s:.)*unclosed group",
        ),
        (
            {"json": '{"items":' * 1100 + "{}" + "}" * 1100},
            "json (does not compile|is not JSON): maximum recursion depth",
        ),
        ({"regex": "a("}, "StructuredOutputsParams.regex does not compile: (?s:.)*unclosed group"),
        ({"regex": "(?=a)a"}, "look-around(?s:.)*is not supported"),
        ({"regex": r"[^\s\S]"}, "StructuredOutputsParams.regex does not compile: (?s:.)*no text fits"),
        ({"regex": ""}, "allows no text but the empty one"),
        ({"grammar": "start: word"}, 'StructuredOutputsParams.grammar does not compile: (?s:.)*unknown name: "word"'),
        ({"choice": ("\ud800",)}, "StructuredOutputsParams.choice does not compile: "),
    ],
)
def test_says_why_params_do_not_compile(tiny, options, message):
    with pytest.raises(ValueError, match=message):
        tiny.compiler.matcher(StructuredOutputsParams(**options))


def test_says_that_a_grammar_is_too_complex_to_follow(tiny):
    ways = range(2100)  # llguidance follows at most 2000 at a time
    rules = [f'way{i}: "{i}" "."' for i in ways]
    params = StructuredOutputsParams(grammar="\n".join([f'start: "x" ({" | ".join(f"way{i}" for i in ways)})', *rules]))
    matcher = tiny.compiler.matcher(params)
    for call in (
        lambda: matcher.accept_token(*tiny.ids("x")),
        matcher.token_bitmask,
        lambda: matcher.accept_token(END),
    ):
        with pytest.raises(ValueError, match=r"The grammar cannot be followed from here: .* max is 2000"):
            call()
    assert not matcher.finished


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of json, regex, grammar, choice; got none"),
        ({"regex": "a", "choice": ("b",)}, "got regex, choice"),
        ({"json": "{nope"}, "StructuredOutputsParams.json is not JSON: Expecting property name"),
        ({"json": {"const": float("nan")}}, "StructuredOutputsParams.json is not JSON: "),
        (
            {"json": {"const": {1}}},
            "StructuredOutputsParams.json must be a dict or the text of a JSON object or None, got",
        ),
        ({"json": "[1]"}, r"must be a dict or the text of a JSON object, got '\[1\]'"),
        (
            {"regex": "a", "whitespace_pattern": " "},
            "whitespace_pattern must be given with json, got ' ' with regex",
        ),
        (
            {"json": {}, "whitespace_pattern": 3},
            "whitespace_pattern must be a string or None, got 3",
        ),
        ({"whitespace_pattern": " "}, "exactly one of json, regex, grammar, choice; got none"),
        ({"regex": 5}, "StructuredOutputsParams.regex must be a string or None, got 5"),
        ({"grammar": b"start"}, "StructuredOutputsParams.grammar must be a string or None, got b'start'"),
        (
            {"choice": "yes"},
            "StructuredOutputsParams.choice must be one or more non-empty strings or None, got 'yes'",
        ),
        ({"choice": ()}, "one or more"),
        ({"choice": ("a", "")}, "non-empty strings"),
    ],
)
def test_refuses_bad_params_when_they_are_made(options, message):
    with pytest.raises(ValueError, match=message):
        StructuredOutputsParams(**options)


def test_equal_params_are_one_key():
    schema = {"type": "object", "properties": {"é": {"const": 1}}}
    same = {StructuredOutputsParams(json=schema), StructuredOutputsParams(json=json.dumps(schema, indent=2))}
    assert len(same) == 1
    assert StructuredOutputsParams(json=schema, whitespace_pattern=" ") not in same
    listed: dict[str, Any] = {"choice": ["a", "b"]}  # as JSON has it
    assert StructuredOutputsParams(**listed) == StructuredOutputsParams(choice=("a", "b"))
    assert StructuredOutputsParams(regex="a") != StructuredOutputsParams(grammar="a")


def test_refuses_ends_outside_the_vocabulary_and_tokenizers_it_cannot_read():
    with pytest.raises(ValueError, match=r"End-of-text ids \[257\] are outside the vocabulary \[0, 257\)"):
        GrammarCompiler(byte_tokenizer().to_str(), vocab=257, eos_ids=(END, 257))
    tokenizer = byte_tokenizer()
    tokenizer.decoder = None  # nothing says how tokens become bytes
    with pytest.raises(ValueError, match="This tokenizer cannot be used for structured output"):
        GrammarCompiler(tokenizer.to_str(), vocab=257, eos_ids=(END,))
