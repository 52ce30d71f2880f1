import functools
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from jaxinfer.generation.structured import Matcher, Structure, StructureCompiler, words
from tests.schemas import random_schema
from tests.tiny import byte_tokenizer

DEMO = Path(__file__).parents[2] / "examples/demo_model/tokenizer.json"
END = 256


class Model:
    """A tokenizer, and a vocabulary that it does not fill."""

    def __init__(self, tokenizer: Tokenizer, *, vocab: int, eos_ids: tuple[int, ...]):
        self.tokenizer, self.vocab, self.eos_ids = tokenizer, vocab, eos_ids
        self.compiler = StructureCompiler(tokenizer.to_str(), vocab=vocab, eos_ids=eos_ids)
        self.texts = [tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size())]

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def accepts(self, structure: Structure, text: str) -> bool:
        """Whether the whole of a text has a structure."""
        matcher = self.compiler.matcher(structure)
        try:
            for token in self.ids(text):
                matcher.accept(token)
        except ValueError:
            return False
        return matcher.accepting

    def write(self, structure: Structure, rng: np.random.Generator, *, patience: int = 100) -> str:
        """A random text with a structure: any allowed token, and those that lead to an end after `patience` tokens."""
        matcher, tokens = self.compiler.matcher(structure), []
        while True:
            allowed = check_mask(matcher, self)
            hurried = len(tokens) >= patience
            if matcher.finished or (matcher.accepting and hurried):
                return self.tokenizer.decode(tokens)
            token = int(rng.choice(self._closing(allowed) if hurried else allowed))
            if token in self.eos_ids:
                return self.tokenizer.decode(tokens)
            matcher.accept(token)
            tokens.append(token)
            assert len(tokens) < 400

    def _closing(self, allowed: list[int]) -> list[int]:
        closing = [i for i in allowed if set(self.texts[i]) <= set('"]}')]
        plain = [i for i in allowed if "\\" not in self.texts[i] and not self.texts[i].isspace()]
        return closing or plain or allowed


def check_mask(matcher: Matcher, model: Model) -> list[int]:
    """The tokens of a mask, which agree with what else the matcher says."""
    bits = unpack(matcher.mask())
    allowed = allowed_ids(matcher)
    assert len(bits) == 32 * words(model.vocab)
    assert not bits[len(model.texts) :].any()  # ids without a text, and beyond the vocabulary
    assert [bits[i] for i in model.eos_ids] == [matcher.accepting] * len(model.eos_ids)
    assert matcher.finished == (set(allowed) == set(model.eos_ids))
    return allowed


def unpack(mask: np.ndarray) -> np.ndarray:
    assert mask.dtype == np.uint32
    i = np.arange(32 * len(mask))
    return (mask[i // 32] >> (i % 32) & 1).astype(bool)


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


def allowed_ids(matcher: Matcher) -> list[int]:
    return np.flatnonzero(unpack(matcher.mask())).tolist()


@pytest.mark.parametrize("block", range(10))
def test_random_schemas_are_satisfied(any_model, block):
    for seed in range(20 * block, 20 * block + 20):
        rng = np.random.default_rng(seed)
        schema = random_schema(rng)
        text = any_model.write(Structure(json_schema=schema), rng)
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def test_any_json_is_an_empty_schema(any_model):
    assert any_model.accepts(Structure(json_schema={}), '{"a": [1, "b", null, {"c": -2.5e3}]}')
    assert not any_model.accepts(Structure(json_schema={}), '{"a": 1')


def test_properties_come_in_the_order_of_the_schema(tiny):
    structure = Structure(json_schema={"properties": {"b": {}, "a": {}}, "required": ["a", "b"]})
    assert tiny.accepts(structure, '{"b":1,"a":2}')
    assert not tiny.accepts(structure, '{"a":2,"b":1}')


def test_blanks_in_json_are_bounded_unless_the_schema_says_otherwise(tiny):
    schema = {"type": "array", "items": {"type": "null"}}
    assert tiny.accepts(Structure(json_schema=schema), "[" + 32 * " " + "null\n]")
    assert not tiny.accepts(Structure(json_schema=schema), "[" + 33 * " " + "null]")
    compact = Structure(json_schema=schema | {"x-guidance": {"whitespace_pattern": ""}})
    assert tiny.accepts(compact, "[null]")
    assert not tiny.accepts(compact, "[ null]")


@pytest.mark.parametrize(
    "regex", [r"[a-f]{2,8}", r"[0-9]{3}-[0-9]{4}", r"(é|日本|😀)+x?", r"/\*[^*\n]{0,9}\*/", "yes|no"]
)
def test_regex_matches_the_whole_text(any_model, regex):
    for seed in range(10):
        text = any_model.write(Structure(regex=regex), np.random.default_rng(seed), patience=20)
        assert re.fullmatch(regex, text)


def test_choice_is_taken_literally(any_model):
    choice = ('say "hi"', "a\\n", "a\nb", "/x/i", "日本", "$", "aa", "a", ".*")
    structure = Structure(choice=choice)
    assert all(any_model.accepts(structure, text) for text in choice)
    assert not any(any_model.accepts(structure, text) for text in ("aaa", "a\\", "b", "日"))
    written = {any_model.write(structure, np.random.default_rng(seed)) for seed in range(200)}
    assert written == set(choice)


def test_thousands_of_choices(tiny):
    structure = Structure(choice=tuple(f"item {i}" for i in range(5000)))
    assert tiny.accepts(structure, "item 4999")
    assert not tiny.accepts(structure, "item 5000")


def test_lark_grammar(any_model):
    structure = Structure(grammar='start: "(" start ")" | NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]{1,3}/')
    assert all(any_model.accepts(structure, text) for text in ("7", "((12+345))", "(1+2+3)"))
    assert not any(any_model.accepts(structure, text) for text in ("(7", "7)", "1234", "1+"))


def test_tokens_may_be_named_in_a_grammar(tiny):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["<tool>"])
    tool = tokenizer.token_to_id("<tool>")
    compiler = StructureCompiler(tokenizer.to_str(), vocab=258, eos_ids=(END,))
    matcher = compiler.matcher(Structure(grammar='start: <tool> "x"'))
    assert allowed_ids(matcher) == [tool]
    assert tool not in allowed_ids(compiler.matcher(Structure(regex="(?s:.)+")))


def test_ends_and_copies(tiny):
    a, b = tiny.ids("ab")
    matcher = tiny.compiler.matcher(Structure(regex="ab?"))
    assert (matcher.accepting, matcher.finished, allowed_ids(matcher)) == (False, False, [a])
    matcher.accept(a)
    assert (matcher.accepting, matcher.finished, allowed_ids(matcher)) == (True, False, sorted([b, END]))
    ended = matcher.copy()
    ended.accept(END)
    assert (ended.accepting, ended.finished, allowed_ids(ended)) == (True, True, [END])
    with pytest.raises(ValueError, match=f"Token {b} may not follow"):
        ended.accept(b)
    assert not matcher.finished
    matcher.accept(b)
    assert (matcher.accepting, matcher.finished, allowed_ids(matcher)) == (True, True, [END])
    assert allowed_ids(tiny.compiler.matcher(Structure(regex="ab?"))) == [
        a
    ]  # compiled once, and still at its beginning


def test_mask_is_written_where_it_is_asked_for(tiny):
    matcher = tiny.compiler.matcher(Structure(regex="ab?"))
    batch = np.full((2, words(tiny.vocab)), 2**32 - 1, np.uint32)
    matcher.mask(batch[1])
    np.testing.assert_array_equal(batch[1], matcher.mask())
    assert (batch[0] == 2**32 - 1).all()


@pytest.mark.parametrize("token", [-1, END, 257, 299, 300, 10**6])
def test_a_refused_token_changes_nothing(tiny, token):
    matcher = tiny.compiler.matcher(Structure(regex="ab"))
    for refused in (token, *tiny.ids("b")):
        with pytest.raises(ValueError, match=f"Token {refused} may not follow"):
            matcher.accept(refused)
    for allowed in tiny.ids("ab"):
        matcher.accept(allowed)
    assert matcher.finished


def test_every_end_of_text_token_is_allowed_and_is_never_text():
    tokenizer = byte_tokenizer()
    (x,) = tokenizer.encode("x").ids
    ends = (END, 270, x)  # special, without a text, and an ordinary letter
    model = Model(tokenizer, vocab=300, eos_ids=ends)
    matcher = model.compiler.matcher(Structure(regex="[wx]{1,2}"))
    assert allowed_ids(matcher) == model.ids("w")
    matcher.accept(*model.ids("w"))
    assert allowed_ids(matcher) == sorted([*ends, *model.ids("w")])
    for end in ends:
        ended = matcher.copy()
        ended.accept(end)
        assert ended.finished


def test_the_token_added_for_llguidance_is_never_one_of_the_model():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["<|end of structure|>"])
    compiler = StructureCompiler(tokenizer.to_str(), vocab=300, eos_ids=(END,))
    matcher = compiler.matcher(Structure(regex="a"))
    matcher.accept(*tokenizer.encode("a").ids)
    assert allowed_ids(matcher) == [END]


def test_a_model_without_an_end_of_text_token():
    model = Model(byte_tokenizer(), vocab=257, eos_ids=())
    zero = model.tokenizer.id_to_token(0)
    matcher = model.compiler.matcher(Structure(regex=f"{zero}a?"))
    assert allowed_ids(matcher) == [0]  # token 0 is a letter like any other
    matcher.accept(0)
    assert allowed_ids(matcher) == model.ids("a")
    assert matcher.accepting
    matcher.accept(*model.ids("a"))
    assert matcher.finished
    with pytest.raises(ValueError, match="No token of the model may follow"):
        matcher.mask()


def test_a_vocabulary_smaller_than_the_tokenizer():
    tokenizer = byte_tokenizer()
    (a,) = tokenizer.encode("a").ids
    compiler = StructureCompiler(tokenizer.to_str(), vocab=a + 1, eos_ids=(0,))
    assert allowed_ids(compiler.matcher(Structure(regex="[ab]"))) == [a]
    with pytest.raises(ValueError, match="its vocabulary cannot continue this text"):
        compiler.matcher(Structure(regex="b"))


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ({"json_schema": {"type": "text"}}, "Structure.json_schema does not compile: Invalid type: text"),
        ({"json_schema": {"not": {}}}, r'Structure.json_schema does not compile: Unimplemented keys: \["not"\]'),
        ({"json_schema": {"minimum": 2, "maximum": 1, "type": "integer"}}, "Unsatisfiable schema: minimum"),
        ({"json_schema": {"x-guidance": {"indent": 2}}}, "Structure.json_schema does not compile: unknown field"),
        ({"regex": "a("}, "Structure.regex does not compile: (?s:.)*unclosed group"),
        ({"regex": "(?=a)a"}, "look-around(?s:.)*is not supported"),
        ({"regex": r"[^\s\S]"}, "Structure.regex does not compile: (?s:.)*no text fits"),
        ({"regex": ""}, "allows no text but the empty one"),
        ({"grammar": "start: word"}, 'Structure.grammar does not compile: (?s:.)*unknown name: "word"'),
        ({"choice": ("\ud800",)}, "Structure.choice does not compile: "),
    ],
)
def test_says_why_a_structure_does_not_compile(tiny, structure, message):
    with pytest.raises(ValueError, match=message):
        tiny.compiler.matcher(Structure(**structure))


def test_says_that_a_structure_is_too_complex_to_follow(tiny):
    ways = range(2100)  # llguidance follows at most 2000 at a time
    rules = [f'way{i}: "{i}" "."' for i in ways]
    structure = Structure(grammar="\n".join([f'start: "x" ({" | ".join(f"way{i}" for i in ways)})', *rules]))
    matcher = tiny.compiler.matcher(structure)
    for call in (lambda: matcher.accept(*tiny.ids("x")), matcher.mask, lambda: matcher.accept(END)):
        with pytest.raises(ValueError, match=r"The structure cannot be followed from here: .* max is 2000"):
            call()
    assert not matcher.finished


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of json_schema, regex, grammar, choice; got none"),
        ({"regex": "a", "choice": ("b",)}, "got regex, choice"),
        ({"json_schema": "{nope"}, "Structure.json_schema is not JSON: Expecting property name"),
        ({"json_schema": {"const": float("nan")}}, "Structure.json_schema is not JSON: "),
        ({"json_schema": {"const": {1}}}, "Structure.json_schema is not JSON: "),
        ({"json_schema": "[1]"}, r"must be a dict or the text of a JSON object, got '\[1\]'"),
        ({"regex": 5}, "Structure.regex must be a string, got 5"),
        ({"grammar": b"start"}, "Structure.grammar must be a string"),
        ({"choice": "yes"}, "Structure.choice must be a tuple of non-empty strings, at least one, got 'yes'"),
        ({"choice": ()}, "at least one"),
        ({"choice": ("a", "")}, "non-empty strings"),
    ],
)
def test_refuses_a_structure_at_birth(options, message):
    with pytest.raises(ValueError, match=message):
        Structure(**options)


def test_equal_structures_are_one_key():
    schema = {"type": "object", "properties": {"é": {"const": 1}}}
    same = {Structure(json_schema=schema), Structure(json_schema=json.dumps(schema, indent=2))}
    assert len(same) == 1
    listed: dict[str, Any] = {"choice": ["a", "b"]}  # as JSON has it
    assert Structure(**listed) == Structure(choice=("a", "b"))
    assert Structure(regex="a") != Structure(grammar="a")


def test_refuses_ends_outside_the_vocabulary_and_tokenizers_it_cannot_read():
    with pytest.raises(ValueError, match=r"End-of-text ids \[257\] are outside the vocabulary \[0, 257\)"):
        StructureCompiler(byte_tokenizer().to_str(), vocab=257, eos_ids=(END, 257))
    tokenizer = byte_tokenizer()
    tokenizer.decoder = None  # nothing says how tokens become bytes
    with pytest.raises(ValueError, match="This tokenizer cannot be used for structured output"):
        StructureCompiler(tokenizer.to_str(), vocab=257, eos_ids=(END,))
