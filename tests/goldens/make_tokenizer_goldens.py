"""Writes `tokenizers.json`: what transformers makes of each field of the files beside a tokenizer, one at a time.

Run in the environment of the peers; it needs no PyTorch:

    .venv-peers/bin/python tests/goldens/make_tokenizer_goldens.py

For each folder: what `results` returns, and for each case what differs from that. For each model type: the class that
transformers takes.
"""

import copy
import json
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

EXPECTED = pathlib.Path(__file__).parent / "tokenizers.json"
TEXTS = [
    "Hello naïve 北京 12 h",
    " hell  h",
    "",
    "he <tool> she<tool>ll <mask> [MASK] h",
    "h <new> she<s> <|endoftext|>he</s> [SEP]",
    "it ' s h , h . don 't",
]
CONFIG, SPECIAL, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"

_ROLES = ["<|endoftext|>", "<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|padding|>", "<bos>", "<eos>"]
_COHERE = ["<UNK>", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "<PAD>", "<CLS>", "<SEP>", "<MASK_TOKEN>"]
_LETTERS = [*"abcdefghilmnostvHCPADUK[]<>|_'.,/012 "]


def _flags(text: str, **flags: bool) -> dict[str, Any]:
    return {
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    } | flags


def _json(model: dict, special: list[str], **parts: Any) -> dict[str, Any]:
    """A `tokenizer.json`."""
    ids = model["vocab"] if isinstance(model["vocab"], dict) else {t: i for i, (t, _) in enumerate(model["vocab"])}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": ids[text]} | _flags(text) for text in special],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": model,
    } | parts


def _bpe(tokens: list[str], merges: list[tuple[str, str]], **settings: Any) -> dict[str, Any]:
    vocab = {token: id_ for id_, token in enumerate([*tokens, *("".join(merge) for merge in merges)])}
    return {"type": "BPE", "vocab": vocab, "merges": [list(merge) for merge in merges]} | settings


def _template(before: list[tuple[str, int]], after: list[tuple[str, int]]) -> dict[str, Any]:
    begin, end = ([{"SpecialToken": {"id": token, "type_id": 0}} for token, _ in tokens] for tokens in (before, after))
    return {
        "type": "TemplateProcessing",
        "single": [*begin, {"Sequence": {"id": "A", "type_id": 0}}, *end],
        "pair": [*begin, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}, *end],
        "special_tokens": {token: {"id": token, "ids": [id_], "tokens": [token]} for token, id_ in (*before, *after)},
    }


_BYTEWISE = _bpe(
    [*_ROLES, *_COHERE, *sorted(ByteLevel.alphabet())],
    [("h", "e"), ("Ġ", "h"), ("Ġ", "he"), ("l", "l"), ("1", "2"), ("he", "ll")],
)
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_QWEN2 = {
    "type": "Split",
    "pattern": {
        "Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    },
    "behavior": "Isolated",
    "invert": False,
}
_WORDS = [
    *(
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "hello",
        "Hello",
        "hell",
        "naive",
        "naïve",
        "he",
        "she",
        "it",
        "don",
    ),
    *("##ll", "北京", "北", "京", "12", "##x", "tool", "new", "mask", "sep", "MASK", "SEP", "endoftext", "s", "t", "h"),
    *"<>[]|/'.,",
]
_WORDPIECE = {
    "type": "WordPiece",
    "unk_token": "[UNK]",
    "continuing_subword_prefix": "##",
    "max_input_chars_per_word": 100,
    "vocab": {word: id_ for id_, word in enumerate(_WORDS)},
}
_BLANKS = [("▁", "h"), ("h", "e"), ("▁h", "e"), ("l", "l"), ("▁", "▁")]
_SENTENCEPIECE = _bpe(
    [*("<unk>", "<s>", "</s>", "<pad>", "<mask>"), *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *_LETTERS[:-1]],
    _BLANKS,
    fuse_unk=True,
    byte_fallback=True,
)
_GEMMA = _bpe(
    [*("<pad>", "<eos>", "<bos>", "<unk>", "<mask>"), *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *_LETTERS[:-1]],
    _BLANKS,
    unk_token="<unk>",
    fuse_unk=True,
    byte_fallback=True,
)
_UNIGRAM = {
    "type": "Unigram",
    "unk_id": 3,
    "vocab": [
        *([token, 0.0] for token in ("<s>", "<pad>", "</s>", "<unk>")),
        *([token, -2.0] for token in ("▁", "▁he", "▁h", "he", "ll")),
        *([token, -4.0] for token in _LETTERS[:-1]),
        ["<mask>", 0.0],
    ],
    "byte_fallback": False,
}
_SPACES = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
_METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}


def _files(model: dict, model_type: str, **config: Any) -> dict[str, Any]:
    """A folder without `tokenizer.json`."""
    files: dict[str, Any] = {"config.json": {"model_type": model_type}, CONFIG: config}
    if model["type"] == "WordPiece":
        return files | {"vocab.txt": "".join(word + "\n" for word in model["vocab"])}
    merges = "#version: 0.2\n" + "".join(" ".join(merge) + "\n" for merge in model["merges"])
    return files | {"vocab.json": model["vocab"], "merges.txt": merges}


def _with_json(model_type: str, content: dict[str, Any], **config: Any) -> dict[str, Any]:
    return {"config.json": {"model_type": model_type}, CONFIG: config, "tokenizer.json": content}


_QWEN2_CONFIG = {"unk_token": None, "pad_token": "<pad>", "eos_token": "</s>"}
FOLDERS: dict[str, dict[str, Any]] = {
    "gpt2_files": _files(_BYTEWISE, "gpt2"),
    "gpt2": _with_json(
        "gpt2",
        _json(_BYTEWISE, ["<|endoftext|>"], pre_tokenizer=_BYTES, decoder=_BYTES),
        tokenizer_class="GPT2Tokenizer",
    ),
    "neox_files": _files(_BYTEWISE, "gpt_neox", tokenizer_class="GPTNeoXTokenizerFast"),
    "roberta_files": _files(_BYTEWISE, "roberta"),
    "roberta": _with_json(
        "roberta",
        _json(
            _BYTEWISE,
            ["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
            pre_tokenizer=_BYTES,
            decoder=_BYTES,
            post_processor={
                "type": "RobertaProcessing",
                "sep": ["</s>", 3],
                "cls": ["<s>", 1],
                "trim_offsets": True,
                "add_prefix_space": False,
            },
        ),
    ),
    "qwen2_files": _files(_BYTEWISE, "qwen3", **_QWEN2_CONFIG),
    "qwen2": _with_json(
        "qwen2",
        _json(
            _BYTEWISE,
            ["<pad>", "</s>"],
            normalizer={"type": "NFC"},
            pre_tokenizer={"type": "Sequence", "pretokenizers": [_QWEN2, _BYTES | {"use_regex": False}]},
            decoder=_BYTES,
        ),
        tokenizer_class="Qwen2Tokenizer",
        **_QWEN2_CONFIG,
    ),
    "cohere": _with_json(
        "cohere",
        _json(
            _BYTEWISE,
            _COHERE,
            normalizer={"type": "NFC"},
            pre_tokenizer={
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTES],
            },
            decoder=_BYTES,
            post_processor=_template([("<BOS_TOKEN>", _BYTEWISE["vocab"]["<BOS_TOKEN>"])], []),
        ),
    ),
    "plain": _with_json(
        "llama",
        _json(
            _BYTEWISE,
            ["<|endoftext|>", "<s>", "</s>"],
            pre_tokenizer=_BYTES,
            decoder=_BYTES,
            post_processor=_template([("<s>", 1)], []),
        ),
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<s>",
        eos_token="</s>",
    ),
    "llama": _with_json(
        "llama",
        _json(
            _SENTENCEPIECE,
            ["<unk>", "<s>", "</s>"],
            pre_tokenizer=_METASPACE | {"prepend_scheme": "first", "split": False},
            decoder={
                "type": "Sequence",
                "decoders": [*_SPACES, {"type": "Strip", "content": " ", "start": 1, "stop": 0}],
            },
            post_processor=_template([("<s>", 1)], []),
        ),
        tokenizer_class="LlamaTokenizerFast",
    ),
    "gemma": _with_json(
        "gemma2",
        _json(
            _GEMMA,
            ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"],
            normalizer={"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            pre_tokenizer={
                "type": "Split",
                "pattern": {"String": " "},
                "behavior": "MergedWithPrevious",
                "invert": False,
            },
            decoder={"type": "Sequence", "decoders": _SPACES},
            post_processor=_template([("<bos>", 2)], []),
        ),
        tokenizer_class="GemmaTokenizer",
    ),
    "bert_files": _files(_WORDPIECE, "bert"),
    "bert": _with_json(
        "distilbert",
        _json(
            _WORDPIECE,
            ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
            normalizer={
                "type": "BertNormalizer",
                "clean_text": True,
                "handle_chinese_chars": True,
                "strip_accents": None,
                "lowercase": True,
            },
            pre_tokenizer={"type": "BertPreTokenizer"},
            decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
            post_processor=_template([("[CLS]", 2)], [("[SEP]", 3)]),
        ),
        tokenizer_class="DistilBertTokenizer",
    ),
    "xlm_roberta": _with_json(
        "bert",
        _json(
            _UNIGRAM,
            ["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
            pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, _METASPACE]},
            decoder=_METASPACE,
            post_processor=_template([("<s>", 0)], [("</s>", 2)]),
        ),
        tokenizer_class="XLMRobertaTokenizer",
    ),
}

HARMLESS: dict[str, Any] = {
    "_commit_hash": "0123",
    "_name_or_path": "org/name",
    "auto_map": {"AutoTokenizer": ["tokenization.A", None]},
    "backend": "tokenizers",
    "bos_token_id": 5,
    "chat_control_tokens": ["<x>"],
    "chat_template": "{{ messages }}",
    "clean_text": True,
    "device_map": "auto",
    "do_basic_tokenize": True,
    "eos_token_id": 5,
    "errors": "replace",
    "files_loaded": ["vocab.json"],
    "from_slow": True,
    "full_tokenizer_file": "tokenizer.json",
    "grounded_generation_template": "{{ messages }}",
    "is_local": True,
    "keep_accents": True,
    "local_files_only": True,
    "max_len": 512,
    "max_length": 5,
    "merges_file": "merges.txt",
    "model_input_names": ["input_ids", "attention_mask"],
    "model_max_length": 5,
    "name_or_path": "org/name",
    "never_split": ["naïve"],
    "pad_to_multiple_of": 8,
    "pad_token_id": 5,
    "pad_token_type_id": 1,
    "padding": True,
    "padding_side": "left",
    "processor_class": "Gemma3Processor",
    "remove_space": True,
    "response_schema": {"type": "object"},
    "response_template": {"a": "b"},
    "return_attention_mask": True,
    "return_offsets_mapping": True,
    "return_special_tokens_mask": True,
    "return_tensors": "np",
    "return_token_type_ids": True,
    "revision": "main",
    "sp_model_kwargs": {"nbest_size": -1},
    "spaces_between_special_tokens": True,
    "special_tokens_map_file": "special_tokens_map.json",
    "stride": 2,
    "tokenizer_file": "tokenizer.json",
    "tokenizer_type": "gpt2",
    "tokenizer_version": "v3",
    "tool_use_template": "{{ messages }}",
    "transformers_version": "4.40.0",
    "trim_offsets": False,
    "truncation": True,
    "truncation_side": "left",
    "truncation_strategy": "longest_first",
    "trust_remote_code": True,
    "unk_token_id": 5,
    "use_default_system_prompt": True,
    "use_fast": True,
    "verbose": True,
    "vocab_file": "vocab.json",
    "vocab_size": 5,
    "wordpieces_prefix": "##",
}
"""Fields that change nothing, with a value that would."""


def _config(**fields: Any) -> dict[str, Any]:
    return {CONFIG: fields}


def _decoder(folder: dict[str, Any], tokens: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """The field as transformers writes it: with all added tokens."""
    listed = folder.get("tokenizer.json", {}).get("added_tokens", [])
    known = {token["id"]: {flag: on for flag, on in token.items() if flag != "id"} for token in listed}
    return {"added_tokens_decoder": {str(id_): token for id_, token in (known | tokens).items()}}


def _cases(name: str) -> dict[str, dict[str, Any]]:
    """Fields to add to the files of a folder, by the name of the case."""
    folder = FOLDERS[name]
    vocab, mask = vocabulary(folder), "[MASK]" if name.startswith("bert") else "<mask>"
    size = len(vocab)
    switches = {
        f"{field}={value}": _config(**{field: value})
        for field in (
            *("add_bos_token", "add_eos_token", "add_prefix_space", "do_lower_case", "strip_accents"),
            *("tokenize_chinese_chars", "legacy", "clean_up_tokenization_spaces", "split_special_tokens"),
        )
        for value in (True, False)
        if (field, value) != ("split_special_tokens", True)
    }
    insists = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    roles = {
        f"{role}={token}": _config(**{role: token})
        for role in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
        for token in ("<new>", "he")
        if not (role == "unk_token" and token == "<new>")  # WordPiece needs one of the vocabulary
    }
    new = {
        "special": _flags("<tool>"),
        "plain": _flags("<tool>", special=False),
        "normalized": _flags("<tool>", special=False, normalized=True),
        "left": _flags("<tool>", lstrip=True),
        "right": _flags("<tool>", rstrip=True),
        "word": _flags("<tool>", single_word=True),
    }
    typed = {"__type": "AddedToken"} | {
        flag: on for flag, on in _flags("<tool>", lstrip=True).items() if flag != "special"
    }
    return {
        "base": {},
        **switches,
        insists: _config(clean_up_tokenization_spaces=True, **{insists: True}),
        **roles,
        **{f"{role}=None": _config(**{role: None}) for role in ("pad_token", "mask_token")},
        "bos and eos": _config(add_bos_token=True, add_eos_token=True, bos_token="<s>", eos_token="<new>"),
        "lower, accents": _config(do_lower_case=True, strip_accents=False),
        "not lower, accents": _config(do_lower_case=False, strip_accents=True),
        "legacy, no prefix": _config(legacy=True, add_prefix_space=False),
        "legacy, prefix": _config(legacy=True, add_prefix_space=True),
        **{f"added {kind}": _config(**_decoder(folder, {size: token})) for kind, token in new.items()},
        "added two": _config(
            **_decoder(folder, {size: _flags("<tool>", special=False), size + 1: _flags("<new>", rstrip=True)})
        ),
        "added, with a role": _config(**_decoder(folder, {size: _flags("<tool>", special=False)}), eos_token="<tool>"),
        "known, with other flags": _config(**_decoder(folder, {vocab[mask]: _flags(mask, lstrip=True, rstrip=True)})),
        "mask as a token": _config(mask_token={"__type": "AddedToken"} | _flags(mask, lstrip=True)),
        "bos as a token": _config(bos_token=typed),
        "additional": _config(additional_special_tokens=["<tool>", "<new>"]),
        "additional as tokens": _config(additional_special_tokens=[typed | {"special": True}]),
        "extra": _config(extra_special_tokens=["<new>", "<tool>"]),
        "extra by name": _config(extra_special_tokens={"tool_token": "<tool>"}),
        "extra and additional": _config(extra_special_tokens=["<tool>"], additional_special_tokens=["<new>"]),
        "no extra but additional": _config(extra_special_tokens=[], additional_special_tokens=["<new>"]),
        "extra by name and additional": _config(
            extra_special_tokens={"tool_token": "<tool>"}, additional_special_tokens=["<new>"]
        ),
        "extra by name, map additional": {
            CONFIG: {"extra_special_tokens": {"tool_token": "<tool>"}},
            SPECIAL: {"additional_special_tokens": ["<new>"]},
        },
        "model specific": _config(model_specific_special_tokens={"tool_token": "<tool>"}),
        "named alone": _config(image_token="<tool>"),
        "named alone, as a token": _config(image_token=typed),
        "map": {SPECIAL: {"eos_token": "<tool>", "mask_token": _without_special(_flags("<new>", rstrip=True))}},
        "map over config": {CONFIG: {"eos_token": "<new>"}, SPECIAL: {"eos_token": "<tool>"}},
        "map and decoder": {CONFIG: _decoder(folder, {size: _flags("<tool>")}), SPECIAL: {"eos_token": "<new>"}},
        "map additional": {SPECIAL: {"additional_special_tokens": ["<tool>"]}},
        "map additional over config": {
            CONFIG: {"additional_special_tokens": ["<new>"]},
            SPECIAL: {"additional_special_tokens": ["<tool>"]},
        },
        "map extra": {CONFIG: {"extra_special_tokens": ["<new>"]}, SPECIAL: {"extra_special_tokens": ["<tool>"]}},
        "map named": {SPECIAL: {"image_token": "<tool>"}},
        "added file": {ADDED: {"<tool>": size}},
        "added file, special": {ADDED: {"<tool>": size}, SPECIAL: {"eos_token": "<tool>"}},
        "added file and decoder": {CONFIG: _decoder(folder, {size: _flags("<new>")}), ADDED: {"<tool>": size}},
        **{field: _config(**{field: value}) for field, value in HARMLESS.items()},
    }


def vocabulary(folder: dict[str, Any]) -> dict[str, int]:
    """The ids of a folder's tokens."""
    if "tokenizer.json" in folder:
        vocab = folder["tokenizer.json"]["model"]["vocab"]
        return vocab if isinstance(vocab, dict) else {token: id_ for id_, (token, _) in enumerate(vocab)}
    return folder.get("vocab.json") or {word: id_ for id_, word in enumerate(folder["vocab.txt"].split("\n")[:-1])}


def _without_special(token: dict[str, Any]) -> dict[str, Any]:
    return {flag: on for flag, on in token.items() if flag != "special"}


NAMED = (
    *("", "PreTrainedTokenizerFast", "TokenizersBackend", "PreTrainedTokenizer", "RemoteTokenizer", "BertTokenizer"),
    *(
        "LlamaTokenizer",
        "LlamaTokenizerFast",
        "GPT2TokenizerFast",
        "GPT2Tokenizer",
        "Qwen2Tokenizer",
        "BloomTokenizerFast",
    ),
    *("CodeGenTokenizer", "GPTNeoXTokenizerFast", "RobertaTokenizer", "XLMRobertaTokenizer", "CohereTokenizerFast"),
    *("DistilBertTokenizerFast", "ElectraTokenizer", "MPNetTokenizerFast", "GemmaTokenizerFast", "CodeLlamaTokenizer"),
    *("LayoutLMTokenizer", "MobileBertTokenizer", "SqueezeBertTokenizer", "BartTokenizerFast", "LongformerTokenizer"),
)
"""Classes that `tokenizer_config.json` may name; the first is none."""
PARTS = ('{"decoder": null}', '{"decoder": {"type": "ByteLevel"}}')
"""What `tokenizer.json` says of its parts."""
CASES = {name: _cases(name) for name in FOLDERS}


def write_folder(name: str, case: str, path: pathlib.Path) -> str:
    """Write the files of a folder with those of a case; returns the model type."""
    files = copy.deepcopy(FOLDERS[name])
    for file, fields in CASES[name][case].items():
        files[file] = files.get(file, {}) | fields
    path.mkdir()
    for file, content in files.items():
        (path / file).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return files["config.json"]["model_type"]


def results(encode: Callable[[str], list[int]], decode: Callable[..., str], eos: int | None) -> dict[str, Any]:
    """What a tokenizer makes of the texts: their ids, and the texts of these with and without special tokens."""
    found: dict[str, Any] = {"eos": eos}
    for number, text in enumerate(TEXTS):
        ids = found[f"ids {number}"] = encode(text)
        found[f"text {number}"] = decode(ids, skip_special_tokens=False)
        found[f"plain {number}"] = decode(ids, skip_special_tokens=True)
    return found


def _classes(base: pathlib.Path) -> dict[str, dict[str, str]]:
    """The class that transformers takes, by model type and the class that a file names."""
    from transformers import AutoTokenizer, TokenizersBackend

    class FoundError(Exception):
        pass

    def find(cls: type, *_: Any, **__: Any) -> None:
        raise FoundError(cls.__name__)

    read = TokenizersBackend.from_pretrained
    TokenizersBackend.from_pretrained = classmethod(find)
    classes: dict[str, dict[str, str]] = {}
    model_types = {json.loads(file.read_text())["model_type"] for file in EXPECTED.parent.glob("*/config.json")}
    for model_type in sorted(model_types):
        for named in NAMED:
            for parts in PARTS if "Llama" in named else PARTS[:1]:
                (base / "config.json").write_text(json.dumps({"model_type": model_type}))
                (base / CONFIG).write_text(json.dumps({"tokenizer_class": named or None}))
                (base / "tokenizer.json").write_text(parts)
                try:
                    AutoTokenizer.from_pretrained(base)
                except FoundError as found:
                    classes.setdefault(model_type, {})[f"{named} {parts}"] = str(found)
    TokenizersBackend.from_pretrained = read
    return classes


def main() -> None:
    """Write the file."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    expected: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as base:
        for name, cases in CASES.items():
            written: dict[str, dict[str, Any]] = {}
            expected[name] = written
            for number, case in enumerate(cases):
                path = pathlib.Path(base) / f"{name}-{number}"
                write_folder(name, case, path)
                try:
                    tokenizer = AutoTokenizer.from_pretrained(path)
                except Exception as error:
                    raise RuntimeError(f"{name}: {case}") from error
                found = results(tokenizer.encode, tokenizer.decode, tokenizer.eos_token_id)
                base_results = written.setdefault("base", found)
                if case != "base":
                    written[case] = {key: value for key, value in found.items() if value != base_results[key]}
            if changed := [field for field in HARMLESS if written[field]]:
                raise RuntimeError(f"{name}: not harmless: {changed}")
        (pathlib.Path(base) / "classes").mkdir()
        document = {"folders": expected, "classes": _classes(pathlib.Path(base) / "classes")}
    EXPECTED.write_text(json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
