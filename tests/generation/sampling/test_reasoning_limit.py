"""Reasoning has at most so many tokens; then its end marker must come, and the answer goes on as it would have."""

import numpy as np
import pytest
import tokenizers

from jaxinfer.generation.params import StructuredOutputsParams
from jaxinfer.generation.sampling.structured_outputs import GrammarCompiler
from tests.tiny import byte_tokenizer

EOS = 256
TEXT = ("<t>", "</t>")
SPECIAL = ("<special>", "</special>")
VOCAB = 260


@pytest.fixture(scope="module")
def tokenizer():
    made = byte_tokenizer()
    made.add_special_tokens(list(SPECIAL))
    made.add_tokens([tokenizers.AddedToken("<added>", normalized=False)])
    return made


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer.to_str(), vocab=VOCAB, eos_ids=(EOS,))


def allowed(matcher):
    return np.flatnonzero(np.unpackbits(matcher.token_bitmask().view(np.uint8), bitorder="little")).tolist()


def write(compiler, tokenizer, params, rng, *, first=(), most=60):
    """Tokens that a grammar allows, chosen at random; the end markers' characters are likelier than others."""
    matcher, tokens = compiler.matcher(params), []
    likely = tokenizer.encode("".join(params.reasoning_tags) + "é").ids
    while len(tokens) < most and not matcher.finished:
        may = allowed(matcher)
        wanted = [token for token in likely if token in may]
        token = int(rng.choice(wanted if wanted and rng.random() < 0.5 else may))
        if len(tokens) < len(first):
            token = first[len(tokens)]
            assert token in may
        if token == EOS:
            break
        matcher = matcher.copy()
        matcher.accept_token(token)
        tokens.append(token)
    return tokens


def reasoning_tokens(tokenizer, tokens, end):
    """How many tokens come before those with which the end marker comes, and what follows it."""
    text = ""
    for count, token in enumerate(tokens):
        text += tokenizer.id_to_token(token) if token > EOS else tokenizer.decode([token])
        if end in text:
            rest = tokenizer.decode(tokens[count + 1 :], skip_special_tokens=False)
            return count + 1 - len(tokenizer.encode(end).ids), rest
    return len(tokens), None


@pytest.mark.parametrize("tags", [TEXT, SPECIAL, ("<t>", "<added>")])
@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("answer", [{}, {"regex": "[abc]{3}"}])
@pytest.mark.parametrize("budget", [0, 1, 7])
def test_reasoning_takes_no_more_tokens(compiler, tokenizer, tags, opened, answer, budget):
    rng = np.random.default_rng(budget)
    begin, end = tags
    params = StructuredOutputsParams(
        **answer, reasoning_tags=("" if opened else begin, end), thinking_token_budget=budget
    )
    first, counts = [] if opened else tokenizer.encode(begin).ids, set()
    for _ in range(10):
        tokens = write(compiler, tokenizer, params, rng, first=first)
        count, rest = reasoning_tokens(tokenizer, tokens[len(first) :], end)
        if rest is None:
            assert not answer
            assert count <= budget + 3  # the free answer has ended
        else:
            counts.add(count)
        if answer:
            assert set(rest.strip()) <= set("abc")
            assert len(rest.strip()) == 3
    assert max(counts) <= budget + 3  # one more for each further byte of a character
    assert max(counts) >= budget


def test_an_answer_without_reasoning_has_no_limit(compiler, tokenizer):
    params = StructuredOutputsParams(reasoning_tags=TEXT, thinking_token_budget=0)
    matcher = compiler.matcher(params)
    for token in tokenizer.encode("a <t> b").ids:
        assert len(allowed(matcher)) == 260
        assert matcher.accepting
        matcher.accept_token(token)


def test_no_other_token_may_come_when_the_end_marker_must(compiler, tokenizer):
    matcher = compiler.matcher(StructuredOutputsParams(reasoning_tags=("", "</t>"), thinking_token_budget=1))
    matcher.accept_token(tokenizer.encode("a").ids[0])
    assert not matcher.accepting
    for wrong in (EOS, tokenizer.encode("b").ids[0]):
        with pytest.raises(ValueError, match="may not follow"):
            matcher.accept_token(wrong)
    for token in tokenizer.encode("</t>").ids:
        assert allowed(matcher) == [token]
        matcher.accept_token(token)
    assert matcher.accepting
    assert len(allowed(matcher)) == 260


def test_a_marker_that_the_model_cannot_write_is_refused():
    made = byte_tokenizer()
    made.add_special_tokens(["</far>"])
    compiler = GrammarCompiler(made.to_str(), vocab=257, eos_ids=(EOS,))
    with pytest.raises(ValueError, match=r"thinking_token_budget does not compile.*</far>"):
        compiler.matcher(StructuredOutputsParams(reasoning_tags=("", "</far>"), thinking_token_budget=3))
