"""The tokenizer and the chat templates in a GGUF file's metadata, as the files that a model directory has of them.

Pure: metadata in, contents of files out. There are two kinds of tokenizers: byte-level BPE, whose merges are listed and
whose way of splitting texts has a name; and SentencePiece's, whose merges follow from the scores of its tokens.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, Self

import msgspec
import tokenizers
from gguf import TokenType
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from jaxinfer.models.files.tokenizer_classes import pieces
from jaxinfer.models.files.tokenizer_files import CHAT_TEMPLATES, TOKENIZER

_KEY = "tokenizer.ggml."
_ABSENT = ("none", "no_vocab")  # tokenizer.ggml.model of a file without a tokenizer
_ENDS = (
    *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<end_of_turn>", "<|end|>"),
    *("<EOT>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
)
"""Control tokens that end a turn or a text whether the metadata says so or not, as they do in llama.cpp."""
_HARMLESS = {
    *("seperator_token_id", "mask_token_id", "cls_token_id", "token_type_count"),  # roles in BERT's texts alone
    # What llama.cpp writes around gaps that a model is to fill in; a prompt of ours has its own tokens.
    *("fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id"),
    *("prefix_token_id", "suffix_token_id", "middle_token_id"),
}
_OTHERS = r"tokenizer\.(chat_templates?(\..*)?|huggingface\.json)"
"""Keys outside `tokenizer.ggml.`: those that `_chat_templates` reads, and a copy that llama.cpp does not read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Splitting:
    """One value of `tokenizer.ggml.pre`: what byte-level BPE does to a text before it merges.

    Attributes:
      pieces: the pattern of what is merged by itself; None: GPT-2's.
      digits: whether each digit is a piece.
      nfc: whether the text is normalised to NFC.
      whole: whether a piece that is a token is taken as it is, and not merged.
      begins: whether a text gets the token of its beginning unless the metadata says otherwise.
    """

    pieces: str | None = None
    digits: bool = False
    nfc: bool = False
    whole: bool = False
    begins: bool = False


_LLAMA3 = _Splitting(pieces=pieces(r"\p{N}{1,3}"), whole=True, begins=True)
_SPLITTINGS = {
    "gpt-2": _Splitting(),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _Splitting(pieces=pieces(r"\p{N}"), nfc=True),
    "qwen35": _Splitting(pieces=pieces(r"\p{N}", marks=r"\p{M}"), nfc=True),
    "smollm": _Splitting(digits=True),
}


_ENDING_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""The roles of tokens that end a text, as they do in llama.cpp."""
_NO_TOKEN = (1 << 32) - 1
"""llama.cpp's -1 for "none", as some converters write it for a padding token."""


class _Fields(msgspec.Struct, kw_only=True):
    """The metadata of a tokenizer: keys that begin with `tokenizer.ggml.`, without it."""

    model: str = "none"
    pre: str | None = None
    tokens: list[str] = []
    token_type: list[int] | None = None
    scores: list[float] = []
    merges: list[str] = []
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    eot_token_id: int | None = None
    eom_token_id: int | None = None
    fim_pad_token_id: int | None = None
    fim_rep_token_id: int | None = None
    fim_sep_token_id: int | None = None
    padding_token_id: int | None = None
    unknown_token_id: int | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool = False
    add_sep_token: bool = False
    add_space_prefix: bool = True
    remove_extra_whitespaces: bool = False
    precompiled_charsmap: list[int] = []

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> Self:
        """Read and check the metadata; leaves out tokens behind the last that is used, which fill up the embedding."""
        known = {f"{_KEY}{name}" for name in (*cls.__struct_fields__, *_HARMLESS)}
        for key, value in metadata.items():
            if key.startswith("tokenizer.") and key not in known and not re.fullmatch(_OTHERS, key):
                raise ValueError(f"{key}={str(value)[:40]} is not implemented; choose another model.")
        try:
            fields = msgspec.convert(
                {key.removeprefix(_KEY): value for key, value in metadata.items() if key.startswith(_KEY)}, cls
            )
        except msgspec.ValidationError as error:
            raise ValueError(f"{_KEY}*: {error}; convert the model again.") from error
        if fields.model in _ABSENT:
            return fields
        if fields.model not in ("gpt2", "llama"):
            raise ValueError(f"{_KEY}model={fields.model!r} is not implemented; known: gpt2, llama.")
        for name in ("precompiled_charsmap", "remove_extra_whitespaces", "add_sep_token"):
            if getattr(fields, name):
                raise ValueError(f"{_KEY}{name} is not implemented; choose another model.")
        kinds = fields.kinds
        if not fields.tokens or len(kinds) != len(fields.tokens):
            raise ValueError(f"{_KEY}tokens has {len(fields.tokens)} entries, token_type {len(kinds)}; fetch it again.")
        count = max((id_ + 1 for id_, kind in enumerate(kinds) if kind != TokenType.UNUSED), default=0)
        fields.tokens, fields.token_type = fields.tokens[:count], kinds[:count]
        used = [token for token, kind in zip(fields.tokens, fields.token_type, strict=True) if kind != TokenType.UNUSED]
        if len(set(used)) != len(used):
            raise ValueError(f"{_KEY}tokens has a token twice; convert the model again.")
        if fields.model == "gpt2" and not fields.merges and any(len(token) > 1 for token in fields.plain_tokens):
            raise ValueError(f"{_KEY}merges is missing, so words would become bytes; convert the model again.")
        for role in ("bos", "padding", "unknown", *_ENDING_ROLES):
            fields.token(role)
        return fields

    @property
    def kinds(self) -> list[int]:
        """The type of each token."""
        return [int(TokenType.NORMAL)] * len(self.tokens) if self.token_type is None else self.token_type

    @property
    def plain_tokens(self) -> Iterator[str]:
        """The tokens that a text is split into, without those that are looked for in it first."""
        kinds = zip(self.tokens, self.kinds, strict=True)
        return (token for token, kind in kinds if kind == TokenType.NORMAL)

    @property
    def splitting(self) -> _Splitting:
        """How byte-level BPE splits a text."""
        if self.pre not in _SPLITTINGS:
            raise ValueError(f"{_KEY}pre={self.pre!r} is not implemented; known: {', '.join(_SPLITTINGS)}.")
        return _SPLITTINGS[self.pre]

    def token(self, role: str) -> str | None:
        """The token that has a role; None: none has."""
        if (id_ := getattr(self, f"{role}_token_id")) in (None, _NO_TOKEN):
            return None
        if not 0 <= id_ < len(self.tokens):
            raise ValueError(f"{_KEY}{role}_token_id={id_} is none of {len(self.tokens)} tokens; convert it again.")
        return self.tokens[id_]


def token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return `bos_token_id` and `eos_token_id` of a `config.json`: those that the metadata names, and `_ENDS`."""
    fields = _Fields.read(metadata)
    if fields.model in _ABSENT:
        return {}
    kinds = zip(fields.tokens, fields.kinds, strict=True)
    controls = [id_ for id_, (token, kind) in enumerate(kinds) if kind == TokenType.CONTROL and token in _ENDS]
    ends = [*(getattr(fields, f"{role}_token_id") for role in _ENDING_ROLES if fields.token(role)), *controls]
    return {
        "bos_token_id": fields.bos_token_id,
        "eos_token_id": list(dict.fromkeys(ends)),
    }


def tokenizer_files(metadata: Mapping[str, Any], vocab: int) -> dict[str, bytes]:
    """Return files by name; none if there is no tokenizer.

    Args:
      metadata: of the file.
      vocab: rows of the embedding.

    Raises ValueError for a tokenizer that is not implemented, or is not one.
    """
    fields = _Fields.read(metadata)
    if fields.model in _ABSENT:
        return {}
    if len(fields.tokens) > vocab:
        raise ValueError(f"{_KEY}tokens has {len(fields.tokens)} tokens but the embedding has {vocab} rows.")
    make = _byte_level if fields.model == "gpt2" else _sentencepiece
    try:
        tokenizer = make(fields)
        _add_tokens(tokenizer, fields)
        _frame(tokenizer, fields)
        content = tokenizer.to_str().encode()
    except ValueError:
        raise
    except Exception as error:  # the Rust library raises a bare Exception
        raise ValueError(f"{_KEY}* is not a tokenizer ({error}); convert the model again.") from error
    tokens = {"bos_token": fields.token("bos"), "eos_token": fields.token("eos"), "pad_token": fields.token("padding")}
    config = msgspec.json.encode({role: token for role, token in tokens.items() if token is not None})
    return {
        TOKENIZER: content,
        "tokenizer_config.json": msgspec.json.format(config, indent=2) + b"\n",
        **_chat_templates(metadata),
    }


def _byte_level(fields: _Fields) -> tokenizers.Tokenizer:
    splitting = fields.splitting
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in fields.merges)]
    tokenizer = tokenizers.Tokenizer(models.BPE(_ids(fields), merges, ignore_merges=splitting.whole))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if splitting.digits else []
    if splitting.pieces:
        steps += [pre_tokenizers.Split(Regex(splitting.pieces), "isolated")]
    steps += [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pieces is None)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if splitting.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(fields: _Fields) -> tokenizers.Tokenizer:
    """A SentencePiece model as transformers converts them: blanks are written ▁, and nothing splits a text."""
    if fields.pre not in (None, "default"):
        raise ValueError(f"{_KEY}pre={fields.pre!r} is not implemented for SentencePiece, only 'default'.")
    if len(fields.scores) < len(fields.tokens):
        raise ValueError(f"{_KEY}scores has {len(fields.scores)} entries, tokens {len(fields.tokens)}; fetch it again.")
    bpe = models.BPE(
        _ids(fields),
        _merges(fields),
        unk_token=fields.token("unknown") or fields.tokens[0],
        fuse_unk=True,
        byte_fallback=TokenType.BYTE in fields.kinds,
    )
    tokenizer = tokenizers.Tokenizer(bpe)
    before: list[Any] = [normalizers.Replace(" ", "▁")]
    after: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.add_space_prefix:
        before, after = [normalizers.Prepend("▁"), *before], [*after, decoders.Strip(" ", 1, 0)]
    tokenizer.normalizer = normalizers.Sequence(before)
    tokenizer.decoder = decoders.Sequence(after)
    return tokenizer


def _merges(fields: _Fields) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token, the best first.

    SentencePiece merges the pair whose token has the highest score, and the first of those in a text.
    """
    known = set(fields.tokens)
    merges = [
        (-score, -at, at - len(token), token[:at], token[at:])
        for token, kind, score in zip(fields.tokens, fields.kinds, fields.scores, strict=False)
        if kind in (TokenType.NORMAL, TokenType.USER_DEFINED)
        for at in range(1, len(token))
        if token[:at] in known and token[at:] in known
    ]
    return [(left, right) for *_, left, right in sorted(merges, key=lambda merge: merge[:3])]


def _ids(fields: _Fields) -> dict[str, int]:
    """The id of each token; of unused ones only where nothing else has the name, which may be empty."""
    by_use = sorted(
        enumerate(zip(fields.tokens, fields.kinds, strict=True)), key=lambda item: item[1][1] != TokenType.UNUSED
    )
    return {token: id_ for id_, (token, kind) in by_use if token or kind != TokenType.UNUSED}


def _add_tokens(tokenizer: tokenizers.Tokenizer, fields: _Fields) -> None:
    """Add the tokens that are looked for in a text before it is split."""
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind == TokenType.CONTROL)
            for token, kind in zip(fields.tokens, fields.kinds, strict=True)
            if kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
        ]
    )


def _frame(tokenizer: tokenizers.Tokenizer, fields: _Fields) -> None:
    """Have the tokens of its beginning and its end put around a text, as the metadata says."""
    begins = fields.model == "llama" or fields.splitting.begins
    if fields.add_bos_token is not None:
        begins = fields.add_bos_token
    before = [token] if begins and (token := fields.token("bos")) else []
    after = [token] if fields.add_eos_token and (token := fields.token("eos")) else []
    if before or after:
        ids = _ids(fields)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *(f"{part}:1" for part in (*before, "$B", *after))],
            special_tokens=[(token, ids[token]) for token in dict.fromkeys((*before, *after))],
        )


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """The file of the default template, and of each that has a name."""
    key = "tokenizer.chat_template"
    names = metadata.get(key + "s", [])
    if not isinstance(names, list) or not all(isinstance(n, str) and re.fullmatch(r"[\w-]+", n) for n in names):
        raise ValueError(f"{key}s={names!r} must be names of templates; convert the model again.")
    files = {f"{CHAT_TEMPLATES}/{name}.jinja": metadata.get(f"{key}.{name}") for name in names}
    files |= {"chat_template.jinja": metadata[key]} if key in metadata else {}
    if wrong := [name for name, text in files.items() if not isinstance(text, str)]:
        raise ValueError(f"{key}: {wrong[0]} is not text; convert the model again.")
    return {name: str(text).encode() for name, text in files.items()}
