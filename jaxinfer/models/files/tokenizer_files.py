"""The tokenizer of a Hugging Face directory: which files a model directory needs, and whether its ids fit.

`tokenizer.json` is copied unchanged, unless the files beside it change the tokenizer (`tokenizer_config.py`). For older
checkpoints that have only vocab.json and merges.txt (byte-level BPE) or vocab.txt (WordPiece), one is built from those.
"""

import functools
import logging
import pathlib
from collections.abc import Iterable
from typing import Any, Literal

import msgspec
import tokenizers

from jaxinfer.checkpoints import CheckpointError
from jaxinfer.models.files.tokenizer_config import (
    ADDED_TOKENS,
    SPECIAL_TOKENS,
    TOKENIZER_CONFIG,
    TokenizerConfig,
    TokenizerJson,
)
from jaxinfer.sandbox.process import Sandbox

log = logging.getLogger(__name__)

TOKENIZER = "tokenizer.json"
CHAT_TEMPLATES = "additional_chat_templates"
_COPIED = (TOKENIZER_CONFIG, "chat_template.jinja", "chat_template.json", SPECIAL_TOKENS)
_UNREADABLE = ("tokenizer.model", "spiece.model", "tekken.json")
READ = (TOKENIZER, *_COPIED, ADDED_TOKENS)
OLDER = ("vocab.json", "merges.txt", "vocab.txt", *_UNREADABLE)
"""Read where there is no `tokenizer.json`; the unreadable ones, of SentencePiece and Tekken, to say so."""


class FolderTokenizer:
    """The tokenizer of a directory, read once.

    Args:
      path: the directory.
      family: the `model_type` of its `config.json`.
      lowercase: whether texts become lower case first, unless they do anyway.

    Attributes:
      max_length: the most tokens of a text to embed; None: any number.
      truncation_side: the end of a longer one that is cut.

    Raises CheckpointError for settings that are not implemented, and for a tokenizer that exists only in a form that we
    cannot read.
    """

    def __init__(self, path: pathlib.Path, family: str, *, lowercase: bool = False):
        self._path, self._file = path, path / TOKENIZER
        content = self._file.read_bytes() if self._file.is_file() else None
        self._config = TokenizerConfig(path, family, content)
        self._tokenizer: tokenizers.Tokenizer | None = None
        parts = self._config.without_json() if content is None else _decoded(self._file, content)
        self.max_length = self._config.max_length
        self.truncation_side: Literal["left", "right"] = self._config.truncation_side(parts)
        if parts is not None:
            self._build(parts, content, lowercase=lowercase)
        elif models := [name for name in _UNREADABLE if (path / name).is_file()]:
            raise CheckpointError(
                f"{path}: {models[0]} is not implemented and there is no {TOKENIZER}; make one with "
                "transformers.AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)."
            )

    def _build(self, parts: TokenizerJson, content: bytes | None, *, lowercase: bool) -> None:
        before = msgspec.json.encode(parts)
        self._config.apply_to_parts(parts)
        if lowercase:
            parts.normalizer = _lowercased(parts.normalizer)
        edited = msgspec.json.encode(parts)
        source = content if content is not None and edited == before else edited
        if content is not None:
            _try(self._file)
        try:
            self._tokenizer = tokenizer = tokenizers.Tokenizer.from_buffer(source)
            tokenizer.no_padding()
            tokenizer.no_truncation()
            state = _state(tokenizer)
            self._config.apply_to_tokens(tokenizer, parts.added_tokens)
            self._config.apply_to_rest(tokenizer)
        except CheckpointError:
            raise
        except Exception as error:  # the Rust library raises a bare Exception
            raise CheckpointError(
                f"{self._path if content is None else self._file}: not a tokenizer ({error}); fetch it again."
            ) from error
        self._changed = source is edited or _state(tokenizer) != state

    def files(self, vocab: int) -> dict[str, bytes | pathlib.Path]:
        """Return the files of a model directory by name: their contents, or where they are. Empty without a tokenizer.

        Warns of tokens without a row among the `vocab` rows of the embedding, such as Gemma 3's for images.
        """
        if self._tokenizer is None:
            return {}
        names = [*_COPIED, *(f"{CHAT_TEMPLATES}/{file.name}" for file in (self._path / CHAT_TEMPLATES).glob("*.jinja"))]
        files: dict[str, bytes | pathlib.Path] = {
            name: self._path / name for name in names if (self._path / name).is_file()
        }
        files[TOKENIZER] = self._tokenizer.to_str().encode() if self._changed else self._file
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        if beyond := [token for token, id_ in ids.items() if id_ >= vocab]:
            log.warning(
                "%s: %d tokens of the tokenizer, such as %r, have no row among the %d of the embedding. Prompts with "
                "such tokens are refused.",
                *(self._path, len(beyond), min(beyond), vocab),
            )
        return files

    @functools.cached_property
    def end_of_text(self) -> tuple[int, ...]:
        """The id of the token that is the end of a text to the tokenizer; none if it has none."""
        if self._tokenizer is None or (text := self._config.text_of("eos_token")) is None:
            return ()
        id_ = self._tokenizer.token_to_id(text)
        return () if id_ is None else (id_,)


def _decoded(file: pathlib.Path, content: bytes) -> TokenizerJson:
    try:
        return msgspec.json.decode(content, type=TokenizerJson)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: not a tokenizer ({error}); fetch it again.") from error


@functools.cache
def _sandbox() -> Sandbox:
    """One for all conversions of this process, which may be many."""
    return Sandbox("try_tokenizer", "it", seconds=120.0, memory_bytes=8_000_000_000)


def _try(file: pathlib.Path) -> None:
    """Raise CheckpointError for a tokenizer that would abort the process that reads it."""
    try:
        _sandbox().call(file=str(file.resolve()))
    except ValueError as error:
        raise CheckpointError(f"{file}: not a tokenizer ({error}); fetch it again.") from error


def _state(tokenizer: tokenizers.Tokenizer) -> tuple[Any, ...]:
    """The settings that may change once a tokenizer is read."""
    parts = (tokenizer.post_processor, tokenizer.decoder)
    tokens = {id_: str(token.__getstate__()) for id_, token in tokenizer.get_added_tokens_decoder().items()}
    return tokens, getattr(tokenizer.model, "unk_token", None), *(part and part.__getstate__() for part in parts)


def _lowercased(normalizer: dict[str, Any] | None) -> dict[str, Any]:
    """A normalizer that begins with lower case, as that of sentence-transformers, unless it has the step."""
    steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    if normalizer is not None and any(step.get("type") == "Lowercase" for step in steps):
        return normalizer
    return {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, *steps]}


def tokenizer_files(
    path: pathlib.Path, family: str, vocab: int, *, lowercase: bool = False
) -> dict[str, bytes | pathlib.Path]:
    """Return the files of `FolderTokenizer`."""
    return FolderTokenizer(path, family, lowercase=lowercase).files(vocab)


def token_texts(ids: Iterable[int], tokenizer: bytes) -> dict[int, str]:
    """Return the texts of tokens by the content of `tokenizer.json`; empty for those that it has not."""
    known = tokenizers.Tokenizer.from_buffer(tokenizer)
    return {id_: known.id_to_token(id_) or "" for id_ in ids}
