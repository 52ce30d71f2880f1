"""The tokenizer of a Hugging Face directory: which files a model directory needs, and whether its ids fit.

`tokenizer.json` is copied unchanged. For older checkpoints that have only vocab.json and merges.txt (byte-level BPE)
or vocab.txt (WordPiece), one is built from those.
"""

import logging
import pathlib
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import processors
from tokenizers.implementations.bert_wordpiece import BertWordPieceTokenizer
from tokenizers.implementations.byte_level_bpe import ByteLevelBPETokenizer

from jaxinfer.checkpoints import CheckpointError
from jaxinfer.checkpoints.huggingface import read_json

log = logging.getLogger(__name__)

TOKENIZER = "tokenizer.json"
_USUALLY_SPECIAL = ("<|endoftext|>", "<s>", "</s>", "<pad>", "<unk>", "<mask>")
COPIED = ("tokenizer_config.json", "chat_template.jinja", "chat_template.json", "special_tokens_map.json")
CHAT_TEMPLATES = "additional_chat_templates"
_UNREADABLE = ("tokenizer.model", "spiece.model", "tekken.json")
OLDER = ("vocab.json", "merges.txt", "vocab.txt", "added_tokens.json", *_UNREADABLE)
"""Read where there is no `tokenizer.json`; the unreadable ones, of SentencePiece and Tekken, to say so."""


def tokenizer_files(path: pathlib.Path, family: str, vocab: int) -> dict[str, bytes | pathlib.Path]:
    """Return files by name, empty for a checkpoint without a tokenizer.

    Warns of tokens without a row among the `vocab` rows of the embedding, such as Gemma 3's for images. Raises
    CheckpointError for a tokenizer that exists only in a form that we cannot read.
    """
    names = [*COPIED, *(f"{CHAT_TEMPLATES}/{file.name}" for file in (path / CHAT_TEMPLATES).glob("*.jinja"))]
    files: dict[str, bytes | pathlib.Path] = {name: path / name for name in names if (path / name).is_file()}
    if (path / TOKENIZER).is_file():
        tokenizer = _read(path / TOKENIZER)
        files[TOKENIZER] = path / TOKENIZER
    elif (tokenizer := _build(path, family)) is not None:
        files[TOKENIZER] = tokenizer.to_str().encode()
    else:
        return {}
    if beyond := [token for token, id_ in tokenizer.get_vocab(with_added_tokens=True).items() if id_ >= vocab]:
        log.warning(
            "%s: %d tokens of the tokenizer, such as %r, have no row among the %d of the embedding. Prompts with such "
            "tokens are refused.",
            *(path, len(beyond), min(beyond), vocab),
        )
    return files


def end_of_text(path: pathlib.Path) -> tuple[int, ...]:
    """The id of the token that `tokenizer_config.json` calls the end of a text; none if there is none."""
    token = read_json(path / "tokenizer_config.json").get("eos_token") if path.is_dir() else None
    token = token.get("content") if isinstance(token, dict) else token
    if not isinstance(token, str) or not (path / TOKENIZER).is_file():
        return ()
    id_ = _read(path / TOKENIZER).token_to_id(token)
    return () if id_ is None else (id_,)


def _read(file: pathlib.Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust library raises a bare Exception
        raise CheckpointError(f"{file}: not a tokenizer ({error}); fetch it again.") from error


def _build(path: pathlib.Path, family: str) -> tokenizers.Tokenizer | None:
    vocab, merges, words = path / "vocab.json", path / "merges.txt", path / "vocab.txt"
    settings = read_json(path / "tokenizer_config.json")
    if vocab.is_file() and merges.is_file():
        built = ByteLevelBPETokenizer(
            str(vocab), str(merges), add_prefix_space=bool(settings.get("add_prefix_space", False))
        )
    elif words.is_file():
        built = BertWordPieceTokenizer(str(words), lowercase=bool(settings.get("do_lower_case", True)))
    elif models := [file.name for file in (path / name for name in _UNREADABLE) if file.is_file()]:
        raise CheckpointError(
            f"{path}: {models[0]} is not implemented and there is no {TOKENIZER}; make one with "
            "transformers.AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)."
        )
    else:
        return None
    # The classes above wrap a Tokenizer; serialising gives the plain one.
    tokenizer = tokenizers.Tokenizer.from_str(built.to_str())
    added = {token: id_ for token, id_ in read_json(path / "added_tokens.json").items() if isinstance(id_, int)}
    tokenizer.add_tokens(sorted(added, key=lambda token: added[token]))
    special = (*_special_tokens(read_json(path / "special_tokens_map.json")), *_USUALLY_SPECIAL)
    tokenizer.add_special_tokens([token for token in special if tokenizer.token_to_id(token) is not None])
    _frame(tokenizer, family)
    return tokenizer


def _special_tokens(special_map: Mapping[str, Any]) -> list[str]:
    """The tokens with a role; each is written as a string or as {"content": ...}."""
    values = [value.get("content") if isinstance(value, dict) else value for value in special_map.values()]
    return [value for value in values if isinstance(value, str)]


def _frame(tokenizer: tokenizers.Tokenizer, family: str) -> None:
    """Add the tokens that these two families put around a text; BERT's come with its tokenizer class."""
    begin, end = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")
    if family == "roberta" and begin is not None and end is not None:
        tokenizer.post_processor = processors.RobertaProcessing(("</s>", end), ("<s>", begin), add_prefix_space=False)
    elif family == "opt" and end is not None:
        tokenizer.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", end)])
