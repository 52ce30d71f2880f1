"""Between text and token ids: the tokenizer of a model directory, chat templates, text that grows token by token."""

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

Prompt = str | list[int]
"""What is asked of a model: a text, or token ids."""
PROMPT_TOKENS = 6
"""How many of a prompt's last tokens the first of the output is decoded with."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What decoders write for bytes that are no character, or not yet."""


class Tokenizer:
    """A model directory's `tokenizer.json`, with its chat template if it has one."""

    def __init__(self, folder: Path):
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.special_ids = {i for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.special}
        self.byte_ids = self._byte_ids()
        self._config = _read_json(folder / "tokenizer_config.json")
        template = folder / "chat_template.jinja"
        self._template = template.read_text() if template.exists() else self._config.get("chat_template")

    @classmethod
    def of(cls, folder: Path) -> "Tokenizer | None":
        """The tokenizer of a model directory, or None if it has none."""
        return cls(folder) if (folder / "tokenizer.json").exists() else None

    def to_json(self) -> str:
        """The text of its `tokenizer.json`."""
        return self._tokenizer.to_str()

    def _byte_ids(self) -> set[int]:
        """Tokens for single bytes, which the decoder joins to characters (SentencePiece's byte fallback)."""
        ids = [self._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        letter = ids[ord("a")]
        joins = letter is not None and self._tokenizer.decode([letter]) == "a"
        return {i for i in ids if i is not None} if joins else set()

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens the tokenizer adds (Llama's begin-of-text, BERT's frame)."""
        return self._tokenizer.encode(text).ids

    def decode(self, ids: list[int]) -> str:
        """Text without special tokens."""
        return self._tokenizer.decode(ids)

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        Raises ValueError if the model has no chat template or the template refuses the messages.
        """
        if not isinstance(self._template, str):
            raise ValueError("The model directory has no chat template (chat_template.jinja): send a prompt instead.")

        def refuse(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        special = {name: _token_text(self._config.get(name)) for name in ("bos_token", "eos_token", "unk_token")}
        try:
            text = environment.from_string(self._template).render(
                messages=messages, add_generation_prompt=True, **special
            )
        except TemplateError as error:
            raise ValueError(f"The chat template refuses these messages: {error}") from error
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def stream(self, prompt_ids: Sequence[int]) -> "TextStream":
        """A text that follows a prompt and grows with the tokens pushed to it."""
        return TextStream(self, prompt_ids)


def encode_prompt(tokenizer: Tokenizer | None, prompt: Prompt, vocab: int) -> list[int]:
    """A prompt's token ids. Raises ValueError for text without a tokenizer, and for ids outside [0, vocab)."""
    if not isinstance(prompt, str):
        ids = list(prompt)
    elif tokenizer is None:
        raise ValueError("The model directory has no tokenizer: give the prompt as token ids.")
    else:
        ids = tokenizer.encode(prompt)
    if unknown := [i for i in ids if not 0 <= i < vocab]:
        raise ValueError(f"Token ids {unknown[:5]} of the prompt are outside the vocabulary [0, {vocab}).")
    return ids


def encode_chat(tokenizer: Tokenizer | None, messages: list[dict[str, Any]]) -> list[int]:
    """A conversation as a prompt, by `Tokenizer.chat`. Raises ValueError without a tokenizer too."""
    if tokenizer is None:
        raise ValueError("The model directory has no tokenizer, so it cannot chat.")
    return tokenizer.chat(messages)


class TextStream:
    """Turns tokens into text as they come; the text of the tokens so far, after the prompt's, is all that it has given.

    Whatever the decoder makes of a token beside others (a space that it strips at the beginning of a text, a character
    of several tokens) it makes of it here: a token is decoded with some before it, the prompt's last ones at first.
    Text that later tokens may change waits, until `flush`: a character's first bytes, and a run of byte tokens, which
    many decoders turn into other characters altogether if one byte of the run is wrong.

    Args:
      prompt_ids: the tokens before the first one.
    """

    def __init__(self, tokenizer: "Tokenizer", prompt_ids: Sequence[int]):
        self._tokenizer = tokenizer
        start = max(0, len(prompt_ids) - PROMPT_TOKENS)
        while start and prompt_ids[start] in tokenizer.byte_ids:
            start -= 1
        self._begin([i for i in prompt_ids[start:] if i not in tokenizer.special_ids])

    def _begin(self, ids: list[int]) -> None:
        """Decode what comes with these tokens before it, whose text has been given."""
        self._ids, self._num_given, self._given = ids, len(ids), self._tokenizer.decode(ids)

    def push(self, token: int) -> str:
        """The text that this token completes, often empty."""
        if token in self._tokenizer.special_ids:
            return ""
        self._ids.append(token)
        return "" if token in self._tokenizer.byte_ids else self._take()

    def flush(self) -> str:
        """The text that has waited, as no token follows."""
        return self._take(whole=True)

    def _take(self, *, whole: bool = False) -> str:
        text = self._tokenizer.decode(self._ids)
        if text.endswith(UNFINISHED) and not whole:
            return ""
        if self._given.endswith(UNFINISHED) and not text.startswith(self._given):
            self._given = self._given[: -len(UNFINISHED)]  # the prompt's last character, which is whole now
        new = text[len(self._given) :]
        if new:
            self._begin(self._ids[self._num_given :])
        return new


def held_back(text: str, stop: tuple[str, ...]) -> int:
    """How many characters at the end of `text` could be the beginning of a stop string."""
    for size in range(min(len(text), max(map(len, stop), default=0)), 0, -1):
        if any(s.startswith(text[-size:]) for s in stop):
            return size
    return 0


def _read_json(path: Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}


def _token_text(token: object) -> str:
    """tokenizer_config.json writes a special token as a string or as {"content": ...}."""
    if isinstance(token, dict):
        return token["content"]
    return token if isinstance(token, str) else ""
