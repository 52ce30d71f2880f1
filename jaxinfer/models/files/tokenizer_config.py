"""Applies `tokenizer_config.json` and the files beside it to a tokenizer, as transformers 5 does.

Three things differ from transformers. `tokenizer.json` decides how texts are split, where some classes of transformers
replace its parts by their own; the fields change those parts only. Its added tokens stay, where
`added_tokens_decoder` lacks some. Special tokens that only a class names are not added to a vocabulary.
"""

import copy
import logging
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec
import tokenizers
from tokenizers import AddedToken, decoders, models, processors

from jaxinfer.checkpoints import CheckpointError
from jaxinfer.checkpoints.huggingface import read_json
from jaxinfer.models.files.tokenizer_classes import BERT, GPT2, PLAIN, PLAIN_NAMES, class_of

log = logging.getLogger(__name__)

TOKENIZER_CONFIG, SPECIAL_TOKENS, ADDED_TOKENS = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_NAMED = "model_specific_special_tokens"
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
READ = {
    *_ROLES,
    *("tokenizer_class", "added_tokens_decoder", "additional_special_tokens", "extra_special_tokens"),
    *(_NAMED, "add_bos_token", "add_eos_token", "add_prefix_space", "legacy"),
    *("do_lower_case", "strip_accents", "tokenize_chinese_chars", "clean_up_tokenization_spaces"),
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
}
"""The fields that change ids or texts here. So does each other field `*_token` with a text, a special token."""
HARMLESS = {
    "only texts to embed are cut, as max_length and truncation_side below say, and none is padded": (
        *("model_max_length", "max_len", "max_length", "stride", "truncation", "truncation_side"),
        *("truncation_strategy", "padding", "padding_side", "pad_to_multiple_of", "pad_token_type_id"),
    ),
    "it names files, versions or code": (
        *("_commit_hash", "_name_or_path", "auto_map", "backend", "device_map", "files_loaded", "from_slow"),
        *("full_tokenizer_file", "is_local", "local_files_only", "merges_file", "name_or_path", "processor_class"),
        *("revision", "special_tokens_map_file", "tokenizer_file", "tokenizer_type", "tokenizer_version"),
        *("transformers_version", "trust_remote_code", "use_fast", "verbose", "vocab_file"),
    ),
    "it is for conversations": (
        *("chat_control_tokens", "chat_template", "grounded_generation_template", "response_schema"),
        *("response_template", "tool_use_template", "use_default_system_prompt"),
    ),
    "config.json decides": ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "vocab_size"),
    "models get token ids alone": (
        *("model_input_names", "return_attention_mask", "return_offsets_mapping", "return_special_tokens_mask"),
        *("return_tensors", "return_token_type_ids", "trim_offsets"),
    ),
    "no class that transformers 5 has for these models reads it": (
        *("clean_text", "do_basic_tokenize", "errors", "keep_accents", "never_split", "remove_space"),
        *("sp_model_kwargs", "spaces_between_special_tokens", "wordpieces_prefix"),
    ),
}
"""The other fields of published files, by why they change nothing."""
_KNOWN = READ.union(*HARMLESS.values())
_FIXED_MISTRAL = r"[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+"
"""The beginning, as JSON, of the pattern that `fix_mistral_regex` puts into a tokenizer."""
_CHILDREN = ("normalizers", "pretokenizers", "decoders")
_CLEANED = {
    **{f" {mark}": mark for mark in ".?!,"},
    " ' ": "'",
    **{f" {end}": end for end in ("n't", "'m", "'s", "'ve", "'re")},
}


class TokenizerJson(msgspec.Struct, kw_only=True):
    """A `tokenizer.json` whose model, most of the file, is not decoded."""

    version: str = "1.0"
    truncation: dict[str, Any] | None = None
    padding: Any = None
    added_tokens: list[dict[str, Any]] = []
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    post_processor: Any = None
    decoder: dict[str, Any] | None = None
    model: msgspec.Raw


class TokenizerConfig:
    """The settings of a directory.

    Args:
      path: the directory.
      model_type: of its model.
      content: of its `tokenizer.json`; None: it has none.

    Attributes:
      kind: the class that transformers has for it.

    Raises CheckpointError for fields that are not known to be harmless.
    """

    def __init__(self, path: pathlib.Path, model_type: str, content: bytes | None):
        self._path = path
        config = read_json(path / TOKENIZER_CONFIG)
        self._named_class = config.get("tokenizer_class") or read_json(path / "config.json").get("tokenizer_class")
        if not isinstance(self._named_class, str | None):
            raise self._error(TOKENIZER_CONFIG, f"tokenizer_class={self._named_class!r} must be a name; correct it")
        self.kind = class_of(model_type, self._named_class, bytewise=b'"ByteLevel"' in (content or b""))
        self._has_json = content is not None
        self._check(TOKENIZER_CONFIG, config, content or b"")
        self._fields = self._merged(config)
        self._from_decoder = "added_tokens_decoder" in config
        self._named: dict[str, AddedToken] = {}

    def _check(self, file: str, fields: Mapping[str, Any], content: bytes) -> None:
        for name, value in fields.items():
            if name in _KNOWN or value in (None, False, "", [], {}):
                continue
            if name.endswith("_token") and (
                isinstance(value, str) or (isinstance(value, dict) and _is_token(file, value))
            ):
                continue
            if name == "fix_mistral_regex" and _FIXED_MISTRAL.encode() in content:
                continue
            raise self._error(
                file, f"{name}={value!r} is not implemented; remove it if texts become the same tokens without it"
            )

    def _error(self, file: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._path / file}: {problem}.")

    def _merged(self, config: dict[str, Any]) -> dict[str, Any]:
        """The fields of the config, and of `special_tokens_map.json` unless the config lists its added tokens."""
        fields = _with_named(_with_extra(config))
        if "added_tokens_decoder" in config:
            return _with_extra(fields)
        special = read_json(self._path / SPECIAL_TOKENS)
        self._check(SPECIAL_TOKENS, special, b"")
        extra = special.get("extra_special_tokens")
        if isinstance(extra, list):
            earlier = fields.get("extra_special_tokens") or []
            special["extra_special_tokens"] = [*earlier, *(token for token in extra if token not in earlier)]
        fields = _with_named(fields | special)
        return fields if "extra_special_tokens" in fields else _with_extra(fields)

    def without_json(self) -> TokenizerJson | None:
        """Make the `tokenizer.json` of a directory that has `vocab.json` and `merges.txt`, or `vocab.txt`."""
        vocab, merges, words = (self._path / name for name in ("vocab.json", "merges.txt", "vocab.txt"))
        merging, listing = vocab.is_file() and merges.is_file(), words.is_file()
        if not merging and not listing:
            return None
        if self.kind is PLAIN and self._named_class in (None, *PLAIN_NAMES):
            self.kind = GPT2 if merging else BERT
        if self.kind.vocabulary == "merges" and merging:
            model = _merging(vocab, merges)
        elif self.kind.vocabulary == "words" and listing:
            model = _wordpieces(words)
        else:
            raise self._error(
                TOKENIZER_CONFIG,
                f"tokenizer_class={self._named_class!r} is not implemented for {(vocab if merging else words).name} "
                "without tokenizer.json; make one with "
                "transformers.AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
            )
        return TokenizerJson(
            normalizer=copy.deepcopy(self.kind.normalizer),
            pre_tokenizer=copy.deepcopy(self.kind.pre_tokenizer),
            decoder=copy.deepcopy(self.kind.decoder),
            model=msgspec.Raw(msgspec.json.encode(model)),
        )

    # The parts of a tokenizer

    def apply_to_parts(self, parts: TokenizerJson) -> None:
        """Change what the fields change in `tokenizer.json`."""
        if self.kind.lowers:
            for part in _each(parts.normalizer, "BertNormalizer"):
                part["lowercase"] = self._flag("do_lower_case", default=True)
                part["strip_accents"] = self._flag("strip_accents", default=None)
                part["handle_chinese_chars"] = self._flag("tokenize_chinese_chars", default=True)
        if self.kind.spaces == "bytes":
            for part in _each(parts.pre_tokenizer, "ByteLevel"):
                part["add_prefix_space"] = self._flag("add_prefix_space", default=False)
        if self.kind.spaces == "blanks":
            self._write_blanks(parts)

    def _write_blanks(self, parts: TokenizerJson) -> None:
        """Begin texts with a blank or not, in either way that tokenizers of SentencePiece are written."""
        begins, legacy = self._flag("add_prefix_space", default=None), self._flag("legacy", default=None)
        if begins is None and legacy is None:
            return
        if begins is False:
            parts.normalizer = _without(parts.normalizer, "Prepend")
            parts.decoder = _without(parts.decoder, "Strip")
        first = "always" if legacy or self.kind.frame else "first"
        for part in (*_each(parts.pre_tokenizer, "Metaspace"), *_each(parts.decoder, "Metaspace")):
            part["prepend_scheme"] = "never" if begins is False else first
            part.pop("add_prefix_space", None)

    def _flag(self, name: str, *, default: bool | None) -> Any:
        value = self._fields.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._error(TOKENIZER_CONFIG, f"{name}={value!r} must be true or false; correct it")
        return value

    # Tokens

    def apply_to_tokens(self, tokenizer: tokenizers.Tokenizer, listed: list[dict[str, Any]]) -> None:
        """Add the tokens that the files name, and mark those that have a role as special.

        Args:
          listed: the added tokens of `tokenizer.json`.
        """
        by_id = dict(sorted(self._added(listed)))
        by_text = {token.content: token for token in by_id.values()}
        self._named = {role: by_text.get(token.content, token) for role, token in self._roles(tokenizer)}
        roles = {token.content for token in self._named.values()}
        extra = [by_text.get(token.content, token) for token in self._extra()]
        known = {token.content for token in tokenizer.get_added_tokens_decoder().values()} | by_text.keys()
        tokens = [*by_id.values(), *(token for token in (*self._named.values(), *extra) if token.content not in known)]
        for token in tokens:
            token.special = token.special or token.content in roles
        if self.kind.bare:
            bare = roles | {token.content for token in extra}
            tokens = [AddedToken(token.content, special=True) if token.content in bare else token for token in tokens]
        had = {token.content: tokenizer.token_to_id(token.content) for token in tokens}
        tokenizer.add_tokens(list(dict.fromkeys(tokens)))
        for id_, token in by_id.items():
            self._check_id(token.content, id_, tokenizer.token_to_id(token.content), had[token.content])

    def _check_id(self, text: str, stated: int, id_: int | None, before: int | None) -> None:
        if id_ in (stated, None):
            return
        file = TOKENIZER_CONFIG if self._from_decoder else ADDED_TOKENS
        if before is None:
            raise self._error(
                file, f"{text!r} is token {stated}, but the next free id of the vocabulary is {id_}; correct the id"
            )
        log.warning("%s: %r is token %d, but the vocabulary has it as %d.", self._path / file, text, stated, id_)

    def _added(self, listed: list[dict[str, Any]]) -> Iterator[tuple[int, AddedToken]]:
        """The added tokens and their ids; a later one takes the id of an earlier one."""
        if self._from_decoder:
            listing = self._fields["added_tokens_decoder"] or {}
            if not isinstance(listing, dict):
                raise self._error(TOKENIZER_CONFIG, f"added_tokens_decoder={listing!r} must be an object; correct it")
            for id_, token in listing.items():
                if not id_.isdecimal() or not isinstance(token, dict):
                    raise self._error(TOKENIZER_CONFIG, f"added_tokens_decoder: {id_!r} is not an id with its token")
                yield int(id_), self._token(TOKENIZER_CONFIG, id_, token)
            return
        special = {token.content for role in _ROLES if (token := self._field_token(role))}
        special |= {token.content for token in self._extra()}
        for text, id_ in read_json(self._path / ADDED_TOKENS).items():
            if type(id_) is not int:
                raise self._error(ADDED_TOKENS, f"{text}={id_!r} must be a token id; correct it")
            yield id_, AddedToken(text, normalized=text not in special, special=text in special)
        for token in listed:
            yield token["id"], self._token("tokenizer.json", "added_tokens", token)

    def _roles(self, tokenizer: tokenizers.Tokenizer) -> Iterator[tuple[str, AddedToken]]:
        """Each role, and its token: that of the files, or the class's if the vocabulary has it."""
        others = {name: value for name, value in self._fields.items() if name.endswith("_token") and name not in _ROLES}
        value = self._fields.get(_NAMED)
        others |= value if isinstance(value, dict) else {}
        for role in _ROLES:
            default = self.kind.tokens.get(role)
            if token := self._field_token(role):
                yield role, token
            elif role not in self._fields and default and tokenizer.token_to_id(default) is not None:
                yield role, AddedToken(default, special=True)
        for role, value in others.items():
            if isinstance(value, str | dict):
                yield role, self._token(TOKENIZER_CONFIG, role, value)

    def _field_token(self, role: str) -> AddedToken | None:
        value = self._fields.get(role)
        return None if value is None else self._token(TOKENIZER_CONFIG, role, value)

    def _extra(self) -> list[AddedToken]:
        """Special tokens without a role."""
        value = self._fields.get("extra_special_tokens") or []
        if not isinstance(value, list):
            raise self._error(TOKENIZER_CONFIG, f"extra_special_tokens={value!r} must be a list of tokens; correct it")
        return [self._token(TOKENIZER_CONFIG, "extra_special_tokens", token) for token in value]

    def _token(self, file: str, name: str, value: Any) -> AddedToken:
        """A token, given as its text or with its flags."""
        fields = {"content": value, "special": True} if isinstance(value, str) else value
        if isinstance(fields, dict):
            flags = {flag: on for flag, on in fields.items() if flag not in ("__type", "content", "id")}
            known = {"lstrip", "rstrip", "single_word", "normalized", "special"}
            if isinstance(text := fields.get("content"), str) and all(
                flag in known and isinstance(on, bool) for flag, on in flags.items()
            ):
                return AddedToken(text, **flags)
        raise self._error(file, f"{name}={value!r} is not a token; correct it")

    def text_of(self, role: str) -> str | None:
        """The token that has a role, once tokens are applied."""
        token = self._named.get(role)
        return None if token is None else token.content

    # How texts to embed are cut

    @property
    def max_length(self) -> int | None:
        """The most tokens of a text; None: any number."""
        name = "model_max_length" if "model_max_length" in self._fields else "max_len"
        value = self._fields.get(name)
        if value is not None and type(value) not in (int, float):
            raise self._error(TOKENIZER_CONFIG, f"{name}={value!r} must be a number; correct it")
        return None if value is None else int(value)

    def truncation_side(self, parts: TokenizerJson | None) -> Literal["left", "right"]:
        """The end of a text that is cut, by `tokenizer_config.json` or else by `tokenizer.json`."""
        stored = {} if parts is None or parts.truncation is None else parts.truncation
        side = self._fields.get("truncation_side", "left" if stored.get("direction") == "Left" else "right")
        if side not in ("left", "right"):
            raise self._error(TOKENIZER_CONFIG, f"truncation_side={side!r} must be 'left' or 'right'; correct it")
        return side

    # What needs the tokens' ids

    def apply_to_rest(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Set the unknown token, the tokens around a text, and how decoded texts are cleaned."""
        unknown = self.text_of("unk_token")
        if self.kind.lowers and unknown and isinstance(model := tokenizer.model, models.WordPiece):
            model.unk_token = unknown
        self._frame(tokenizer)
        if self._flag("clean_up_tokenization_spaces", default=False):
            self._clean(tokenizer)

    def _frame(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Put tokens around a text, as the class says; or without `tokenizer.json` as two fields say."""
        adds = (self._tokens_of(role) if self._flag(f"add_{role}", default=False) else [] for role in _ROLES[:2])
        begin, end = map(self._tokens_of, self.kind.frame) if self.kind.frame else adds
        tokens = [*begin, *end]
        ids = [tokenizer.token_to_id(token) for token in tokens]
        now = tokenizer.encode("").ids
        if self._has_json and not self.kind.frame:
            if missing := [token for token, id_ in zip(tokens, ids, strict=True) if id_ not in now]:
                log.warning(
                    "%s: add_bos_token and add_eos_token do not add %s: tokenizer.json decides, as in transformers 5.",
                    *(self._path / TOKENIZER_CONFIG, missing[0]),
                )
        elif tokens and now != ids:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[*begin, "$A", *end], special_tokens=list(dict(zip(tokens, ids, strict=True)).items())
            )

    def _tokens_of(self, role: str) -> list[str]:
        text = self.text_of(role)
        return [] if text is None else [text]

    def _clean(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Leave out blanks before marks in decoded texts; transformers does so for BPE only if a field insists."""
        insists = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
        if isinstance(tokenizer.model, models.BPE) and not self._flag(insists, default=False):
            return
        if tokenizer.decoder is None:
            raise self._error(
                TOKENIZER_CONFIG,
                "clean_up_tokenization_spaces=True is not implemented for a tokenizer.json without decoder; set it to "
                "false",
            )
        replacements = [decoders.Replace(blank, clean) for blank, clean in _CLEANED.items()]
        tokenizer.decoder = decoders.Sequence([tokenizer.decoder, decoders.Fuse(), *replacements])


def _with_extra(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with the older name of special tokens without a role replaced, unless both are given."""
    fields = dict(fields)
    if "additional_special_tokens" in fields and not fields.get("extra_special_tokens"):
        fields["extra_special_tokens"] = fields.pop("additional_special_tokens")
    return fields


def _with_named(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with special tokens that `extra_special_tokens` names in an object, and does not list, beside it."""
    named = fields.get("extra_special_tokens")
    if not isinstance(named, dict):
        return dict(fields)
    others = {name: value for name, value in fields.items() if name != "extra_special_tokens"}
    return others | {_NAMED: (others.get(_NAMED) or {}) | named}


def _is_token(file: str, value: dict[str, Any]) -> bool:
    """Tell whether transformers takes an object for a token where a field is none of the usual ones."""
    return file == SPECIAL_TOKENS or value.get("__type") == "AddedToken"


def _merging(vocab: pathlib.Path, merges: pathlib.Path) -> dict[str, Any]:
    """The model of byte-level BPE, as `tokenizer.json` has it."""
    ids = read_json(vocab)
    lines = [
        line for line in merges.read_text(encoding="utf-8").split("\n") if line and not line.startswith("#version")
    ]
    for line in lines:
        left, _, right = line.partition(" ")
        if any(token not in ids for token in (left, right, left + right)):
            raise CheckpointError(f"{merges}: {line!r} does not merge two tokens of {vocab.name}; fetch both again.")
    return {
        "type": "BPE",
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "vocab": ids,
        "merges": [line.split(" ") for line in lines],
    }


def _wordpieces(words: pathlib.Path) -> dict[str, Any]:
    """The model of WordPiece, as `tokenizer.json` has it."""
    lines = words.read_text(encoding="utf-8").split("\n")
    return {
        "type": "WordPiece",
        "unk_token": BERT.tokens["unk_token"],
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": {word.rstrip(): id_ for id_, word in enumerate(lines[:-1] if lines[-1] == "" else lines)},
    }


def _each(part: dict[str, Any] | None, kind: str) -> Iterator[dict[str, Any]]:
    """The parts of a kind in one that may be a sequence."""
    if part is not None and part.get("type") == kind:
        yield part
    for name in _CHILDREN:
        for child in (part or {}).get(name, []):
            yield from _each(child, kind)


def _without(part: dict[str, Any] | None, kind: str) -> dict[str, Any] | None:
    """A part without those of a kind."""
    if part is None or part.get("type") == kind:
        return None
    return {
        name: [left for child in value if (left := _without(child, kind)) is not None] if name in _CHILDREN else value
        for name, value in part.items()
    }
