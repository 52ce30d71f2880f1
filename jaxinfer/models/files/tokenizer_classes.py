"""The tokenizer classes of transformers: what each does to a text, and which of them a directory has.

Pure data. Parts of a tokenizer are written as in `tokenizer.json`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

Part = dict[str, Any]
"""A normalizer, pre-tokenizer or decoder: its `type`, and its settings."""


def pieces(numbers: str, *, marks: str = "") -> str:
    r"""The pattern of contractions, words, numbers, punctuation, line ends and spaces of Llama 3 and Qwen.

    marks: what a word may have beside letters, as in Qwen3.5 (`\p{M}`).
    """
    words = rf"[\p{{L}}{marks}]+" if marks else r"\p{L}+"
    return (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?{words}|{numbers}| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_BERT = {
    "type": "BertNormalizer",
    "clean_text": True,
    "handle_chinese_chars": True,
    "strip_accents": None,
    "lowercase": True,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerClass:
    """One class.

    Attributes:
      tokens: its special tokens by role, where the files of a model do not name others.
      frame: the roles of the tokens at the beginning and the end of a text; None: other settings decide.
      lowers: whether it reads `do_lower_case`, `strip_accents` and `tokenize_chinese_chars`.
      spaces: how it applies `add_prefix_space`: to parts that write bytes, to those that write blanks as ▁, or not.
      bare: whether its special tokens lose flags such as `lstrip`.
      vocabulary: what it is made from without `tokenizer.json`: `vocab.json` and `merges.txt`, or `vocab.txt`.
      normalizer, pre_tokenizer, decoder: its parts, without `tokenizer.json`.
    """

    tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    frame: tuple[str, str] | None = None
    lowers: bool = False
    spaces: Literal["bytes", "blanks"] | None = None
    bare: bool = False
    vocabulary: Literal["merges", "words"] | None = None
    normalizer: Part | None = None
    pre_tokenizer: Part | None = None
    decoder: Part | None = None


PLAIN = TokenizerClass()
"""`TokenizersBackend` (`PreTrainedTokenizerFast`), and all classes that are not listed: `tokenizer.json` as it is."""
PLAIN_NAMES = ("TokenizersBackend", "PreTrainedTokenizerFast", "PreTrainedTokenizer")
_ENDS = {"unk_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
GPT2 = TokenizerClass(tokens=_ENDS, spaces="bytes", vocabulary="merges", pre_tokenizer=_BYTES, decoder=_BYTES)
BERT = TokenizerClass(
    tokens={
        "unk_token": "[UNK]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "mask_token": "[MASK]",
    },
    frame=("cls_token", "sep_token"),
    lowers=True,
    vocabulary="words",
    normalizer=_BERT,
    pre_tokenizer={"type": "BertPreTokenizer"},
    decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
)
_ROBERTA_TOKENS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "sep_token": "</s>",
    "pad_token": "<pad>",
    "cls_token": "<s>",
    "mask_token": "<mask>",
}
_ROBERTA = dataclasses.replace(GPT2, tokens=_ROBERTA_TOKENS, frame=("cls_token", "sep_token"))
_QWEN2 = dataclasses.replace(
    GPT2,
    tokens={"unk_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
    bare=True,
    normalizer={"type": "NFC"},
    pre_tokenizer={
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pieces(r"\p{N}")}, "behavior": "Isolated", "invert": False},
            _BYTES | {"use_regex": False},
        ],
    },
)
_LLAMA = TokenizerClass(tokens={"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}, spaces="blanks")
_CLASSES = {
    "BertTokenizer": BERT,
    "DistilBertTokenizer": BERT,
    "ElectraTokenizer": BERT,
    "LayoutLMTokenizer": BERT,
    "MobileBertTokenizer": BERT,
    "SqueezeBertTokenizer": BERT,
    "MPNetTokenizer": dataclasses.replace(BERT, tokens=_ROBERTA_TOKENS | {"unk_token": "[UNK]"}),
    "GPT2Tokenizer": GPT2,
    "CodeGenTokenizer": GPT2,
    "GPTNeoXTokenizer": dataclasses.replace(
        GPT2, tokens=_ENDS | {"pad_token": "<|padding|>"}, normalizer={"type": "NFC"}
    ),
    "RobertaTokenizer": _ROBERTA,
    "BartTokenizer": _ROBERTA,
    "LongformerTokenizer": _ROBERTA,
    "Qwen2Tokenizer": _QWEN2,
    "CohereTokenizer": TokenizerClass(
        tokens={
            "unk_token": "<UNK>",
            "bos_token": "<BOS_TOKEN>",
            "eos_token": "<|END_OF_TURN_TOKEN|>",
            "pad_token": "<PAD>",
            "cls_token": "<CLS>",
            "sep_token": "<SEP>",
            "mask_token": "<MASK_TOKEN>",
        },
        spaces="bytes",
    ),
    "LlamaTokenizer": _LLAMA,
    "CodeLlamaTokenizer": _LLAMA,
    "GemmaTokenizer": TokenizerClass(
        tokens={
            "unk_token": "<unk>",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
        }
    ),
    "XLMRobertaTokenizer": TokenizerClass(tokens=_ROBERTA_TOKENS, frame=("bos_token", "eos_token"), spaces="blanks"),
}
_USUAL = {  # the class of a model type, as `AutoTokenizer` has it without mistral-common; others have none
    **dict.fromkeys(("bert", "distilbert"), "BertTokenizer"),
    **dict.fromkeys(("gpt2", "gpt_neo", "gptj", "opt", "phi", "starcoder2"), "GPT2Tokenizer"),
    **dict.fromkeys(("gpt_neox", "olmoe"), "GPTNeoXTokenizer"),
    "roberta": "RobertaTokenizer",
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("cohere", "cohere2"), "CohereTokenizer"),
    **dict.fromkeys(("gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared"), PLAIN_NAMES[0]),
    **dict.fromkeys(("glm", "glm4", "glm4_moe", "mistral", "mistral3", "mixtral"), PLAIN_NAMES[0]),
    **dict.fromkeys(("olmo2", "olmo3", "phi3", "stablelm"), PLAIN_NAMES[0]),
}
_OVERRULES = {"qwen2"}
"""Model types whose class is right where files name another."""


def class_of(model_type: str, named: str | None, *, bytewise: bool) -> TokenizerClass:
    """Return the class that transformers reads a directory with.

    Args:
      model_type: of `config.json`.
      named: the class that `tokenizer_config.json` names, or else `config.json`.
      bytewise: whether a part of `tokenizer.json` writes bytes as characters, which Llama's class does not.
    """
    usual = _USUAL.get(model_type)
    name = named.removesuffix("Fast") if named else usual
    if usual == PLAIN_NAMES[0] or model_type in _OVERRULES:
        name = usual
    if name == "LlamaTokenizer" and bytewise:
        return PLAIN
    return class_named(name or PLAIN_NAMES[0])


def class_named(name: str) -> TokenizerClass:
    """Return a class of transformers, without "Fast" in its name."""
    return _CLASSES.get(name, PLAIN)
