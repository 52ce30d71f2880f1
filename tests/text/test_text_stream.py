"""Text that grows token by token: together it is the text of all tokens, whatever the tokenizer's decoder does."""

from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxinfer.text import TextStream, Tokenizer
from tests.tiny import byte_tokenizer

WORDS = ["▁", "▁hello", "▁world", "hello", "a", "'", "s", ".", "你", "日", "\N{REPLACEMENT CHARACTER}"]


def byte_fallback() -> Tokenizers:
    """As Llama 2 has it: words, and bytes for what is in none; a text's first space is left out."""
    names = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    tokenizer = Tokenizers(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


BYTE, WORD, VOCAB = 2, 258, 258 + len(WORDS)  # where the bytes, and the words, begin


@pytest.fixture(scope="module")
def open_tokenizer(tmp_path_factory):
    def opened(tokenizer):
        folder = tmp_path_factory.mktemp("tokenizer")
        tokenizer.save(str(folder / "tokenizer.json"))
        return Tokenizer(folder)

    return opened


@pytest.fixture(scope="module")
def words(open_tokenizer):
    return open_tokenizer(byte_fallback())


@pytest.fixture(scope="module")
def bytes_only(open_tokenizer):
    return open_tokenizer(byte_tokenizer())


def pieces(tokenizer, prompt, ids):
    stream = TextStream(tokenizer, prompt)
    return [stream.push(i) for i in ids] + [stream.flush()]


def word(text: str) -> int:
    return WORD + WORDS.index(text)


def in_bytes(text: str) -> list[int]:
    return [BYTE + byte for byte in text.encode()]


TOKENS = st.one_of(
    st.integers(0, VOCAB - 1),
    st.sampled_from([word(w) for w in WORDS]),
    st.sampled_from(in_bytes("日é🎉")),
)


def marked(ids: list[int]) -> list[int]:
    """The tokens that have text, with a replacement character for each byte that is in no character."""
    marked, run = [], b""
    for token in [*(token for token in ids if token >= BYTE), None]:
        if token is not None and BYTE <= token < WORD:
            run += bytes([token - BYTE])
            continue
        for character in run.decode(errors="surrogateescape"):
            marked += [word("\N{REPLACEMENT CHARACTER}")] if "\udc80" <= character <= "\udcff" else in_bytes(character)
        marked, run = [*marked, *([] if token is None else [token])], b""
    return marked


@given(st.lists(TOKENS, max_size=10), st.lists(TOKENS, max_size=12))
@example([word("a")], [*in_bytes("你"), in_bytes("你")[0], word("a")])  # one wrong byte leaves the run before it
@example([word("a")], [word("▁hello"), *in_bytes("日")[:2]])
@example([word("a")], [1, 1, word("▁hello")])
def test_prompt_and_text_are_the_text_of_all_tokens(words, prompt, ids):
    prompt = [*prompt, word("a")]  # an end that nothing after it can change
    assert words.decode(prompt) + "".join(pieces(words, prompt, ids)) == words.decode(prompt + marked(ids))


@example([in_bytes("é")[0], 0, in_bytes("é")[1]])  # a special token, which has no text, parts no character
@given(st.lists(TOKENS, max_size=12))
def test_without_a_prompt_it_is_the_text_of_the_tokens(words, ids):
    assert "".join(pieces(words, [], ids)) == words.decode(marked(ids))


@given(st.text(max_size=8), st.sampled_from([[], [word("a")], [word("▁hello"), word("日")]]))
def test_characters_in_bytes_are_the_text_that_the_tokenizer_decodes(words, text, end):
    ids = [word("a"), *in_bytes(text), *end]
    assert "".join(pieces(words, [], ids)) == words.decode(ids)


@example(b"", ["日".encode()[:2], b"x", "日".encode(), b"y"])
@example("日".encode()[:2], ["日".encode()[2:], b"x"])
@given(st.binary(max_size=8), st.lists(st.one_of(st.binary(max_size=6), st.text(max_size=3).map(str.encode))))
def test_bytes_of_any_kind(bytes_only, prompt, parts):
    ids = [bytes_only.encode(chr(0))[0], *_byte_ids(bytes_only, b"".join(parts))]
    assert "".join(pieces(bytes_only, _byte_ids(bytes_only, prompt), ids)) == bytes_only.decode(ids)


def _byte_ids(tokenizer, data: bytes) -> list[int]:
    """Each byte's token: bytes and characters of Latin 1 have the same order but for those that are not printable."""
    names = {tokenizer.decode([i]): i for i in range(256)}
    ascii_ids = {ord(text): i for text, i in names.items() if len(text) == 1 and ord(text) < 128}
    others = sorted(set(range(256)) - set(ascii_ids.values()))
    return [ascii_ids[byte] if byte in ascii_ids else others[byte - 128] for byte in data]


def test_the_prompt_keeps_the_space_that_a_decoder_strips(words):
    assert pieces(words, [0, word("▁hello")], [word("▁world"), word(".")]) == [" world", ".", ""]
    assert pieces(words, [], [word("▁hello"), word("▁world")]) == ["hello", " world", ""]


def test_a_prompt_may_end_inside_a_character(words, bytes_only):
    first, second, third = in_bytes("日")
    assert "".join(pieces(words, [word("a"), first], [second, third, word("a")])) == "日a"
    first, second, third = bytes_only.encode("日")
    assert "".join(pieces(bytes_only, [first], [second, third])) == "日"


def test_what_is_unfinished_comes_at_the_end(bytes_only):
    ids = bytes_only.encode("x日")
    assert pieces(bytes_only, [], ids[:-1]) == ["x", "", "", "\N{REPLACEMENT CHARACTER}"]
    assert pieces(bytes_only, [], ids) == ["x", "", "", "日", ""]


def test_tokens_of_several_characters_and_parts_of_some(open_tokenizer):
    """As byte-level BPE has them: a token may end one character and begin another."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizers(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_tokens(["日x", "ab"])
    tokenizer = open_tokenizer(made)
    ids = tokenizer.encode("é日xabc日")
    assert len(ids) == 2 + 1 + 1 + 1 + 3
    assert pieces(tokenizer, [], ids) == ["", "é", "日x", "ab", "c", "", "", "日", ""]
    random = Random(0)
    for _ in range(300):
        ids = random.choices([*range(256), *tokenizer.encode("日xab"), *tokenizer.encode("é")], k=12)
        assert "".join(pieces(tokenizer, [], ids)) == tokenizer.decode(ids)


def test_special_tokens_have_no_text(words):
    assert pieces(words, [word("a")], [1, word("▁hello"), 1, word("▁world")]) == ["", " hello", "", " world", ""]


def test_characters_in_bytes_come_once_they_are_complete(words):
    assert pieces(words, [word("a")], in_bytes("x日é")) == ["x", "", "", "日", "", "é", ""]
    first, second, _ = in_bytes("日")
    wrong = [*in_bytes("x"), first, *in_bytes("y"), first, second, word("▁hello")]
    assert pieces(words, [word("a")], wrong) == [
        "x",
        "",
        "\N{REPLACEMENT CHARACTER}y",
        "",
        "",
        "\N{REPLACEMENT CHARACTER}" * 2 + " hello",
        "",
    ]


def test_a_prompt_may_end_inside_a_character_that_nothing_completes(words):
    first, second, third = in_bytes("日")
    assert pieces(words, [word("a"), first], [word("▁hello")]) == [" hello", ""]
    assert pieces(words, [word("a"), first], [second, word("▁hello")]) == ["", "\N{REPLACEMENT CHARACTER} hello", ""]
    assert pieces(words, [word("a"), first, second], [third]) == ["日", ""]


class Counting(Tokenizer):
    """Counts the tokens that are decoded."""

    def decode(self, ids, **options):
        self.count = getattr(self, "count", 0) + len(ids)
        return super().decode(ids, **options)


@pytest.mark.parametrize(
    ("make", "token"),
    [(byte_tokenizer, 132), (byte_tokenizer, 222), (byte_fallback, BYTE + 0x80), (byte_fallback, 9999)],
)
def test_a_run_without_characters_takes_linear_time_and_comes_at_once(tmp_path, make, token):
    make().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Counting(tmp_path)
    stream = TextStream(tokenizer, [])
    parts = [stream.push(token) for _ in range(1000)]
    assert tokenizer.count < 5000
    text = "".join(parts) + stream.flush()
    assert text == tokenizer.decode([token] * 1000)
    assert "".join(parts) in (text, text[:-1])


def test_a_run_of_tokens_without_text_takes_linear_time(tmp_path):
    vocab = {"a": 0, "": 1, "▁b": 2}
    tokenizer = Tokenizers(models.WordLevel(vocab, unk_token=""))
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    counting = Counting(tmp_path)
    for before, text in (([], "b"), ([0], " b")):
        stream, counting.count = TextStream(counting, before), 0
        assert {stream.push(1) for _ in range(1000)} == {""}
        assert stream.push(2) == text
        assert counting.count < 50_000


def test_unknown_tokens_have_no_text(words):
    assert pieces(
        words, [word("a")], [VOCAB, word("▁hello"), VOCAB, *in_bytes("日")[:1], VOCAB, *in_bytes("日")[1:]]
    ) == ["", " hello", "", "", "", "", "日", ""]
