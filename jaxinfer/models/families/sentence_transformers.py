"""The files of sentence-transformers beside a model: how a text becomes one vector.

`modules.json` lists the modules, `1_Pooling/config.json` and `2_Dense/config.json` have their options,
`sentence_bert_config.json` says how texts become tokens, `config_sentence_transformers.json` has the prompts. Every
field is read, harmless for a reason given here, or refused by name. No file is opened here.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jaxinfer.models.config import DenseActivation, DenseConfig, Pooling
from jaxinfer.models.families.fields import Fields

MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
TRANSFORMER = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Where the options of the transformer are: the first of these that exists."""
SENTENCE_FILES = (MODULES, PROMPTS, *TRANSFORMER)
"""The files in the model's folder; `MODULE_CONFIG` matches those in folders of modules."""
MODULE_CONFIG = r"[^/]+/config\.json"
"""A pattern for the files with a module's options."""
POOLING = "1_Pooling"
"""The folder of the pooling's options, unless `MODULES` names another."""

_TYPE = re.compile(r"sentence_transformers\.(?:\w+\.)*(?P<name>Transformer|Pooling|Dense|Normalize|Dropout)")
_MODES = {"mean": Pooling.MEAN, "cls": Pooling.CLS, "max": Pooling.MAX, "lasttoken": Pooling.LAST}
_OLD_MODES = {  # fields of older files, each true or false -> the mode
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS = {
    "Identity": None,
    "Tanh": DenseActivation.TANH,
    "GELU": DenseActivation.GELU,
    "ReLU": DenseActivation.RELU,
    "SiLU": DenseActivation.SILU,
}
_TEXT = {"method": "forward", "method_output_name": "last_hidden_state"}
_LOADING = {  # how PyTorch loads weights, which are then the same numbers
    *("torch_dtype", "dtype", "attn_implementation", "device_map", "low_cpu_mem_usage", "use_safetensors"),
    *("trust_remote_code", "add_pooling_layer", "use_cache", "local_files_only", "use_fast"),
}

ReadJson = Callable[[str], Mapping[str, Any]]
"""Reads a file of the model's folder by its name; empty if there is none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentenceModules:
    """The modules behind the transformer, and what its texts are.

    Attributes:
      pooling: the way from the tokens' vectors to one; None: no file says.
      dense: the folder and the shape of each dense layer.
      normalize: whether vectors get length 1.
      lowercase: whether texts become lower case first.
      max_seq_length: the number of tokens that texts are cut to; None: the tokenizer's.
      prompts: texts that are put before a text, by name.
      default_prompt: the name of the prompt for texts that come without one.
    """

    pooling: Pooling | None = None
    dense: tuple[tuple[str, DenseConfig], ...] = ()
    normalize: bool = True
    lowercase: bool = False
    max_seq_length: int | None = None
    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    default_prompt: str | None = None


def sentence_modules(modules: Sequence[Mapping[str, Any]] | None, read: ReadJson, embed: int) -> SentenceModules:
    """Read the modules of a sentence encoder.

    Args:
      modules: the content of `MODULES`; None: there is none: the pooling is in `POOLING`, and vectors are normalised.
      read: reads the other files.
      embed: the width of the transformer.

    Raises ValueError for what is not implemented.
    """
    listed = [("Pooling", POOLING), ("Normalize", "")] if modules is None else _listed(modules)
    folders = {kind: folder for kind, folder in listed if kind != "Dense"}
    pooling = _pooling(f"{folders['Pooling']}/config.json", read, embed)
    if pooling is None and modules is not None:
        raise ValueError(f"{folders['Pooling']}/config.json: no such file, and {MODULES} lists it; fetch it.")
    dense: list[tuple[str, DenseConfig]] = []
    for folder in (folder for kind, folder in listed if kind == "Dense"):
        inputs = dense[-1][1].outputs if dense else embed
        dense.append((folder, _dense(f"{folder}/config.json", read, inputs)))
    return SentenceModules(
        pooling=pooling,
        dense=tuple(dense),
        normalize="Normalize" in folders,
        **_transformer(read),
        **_prompts(read),
    )


def _listed(modules: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The name and the folder of each module, checked to be in an order that is implemented."""
    listed = []
    for module in modules:
        fields = Fields(module, MODULES)
        _refuse_others(fields, {"idx", "name", "path", "type"})
        type_ = fields.optional(str, "type") or ""
        if (match := _TYPE.fullmatch(type_)) is None:
            raise ValueError(f"{MODULES}: the module {type_!r} is not implemented; choose another checkpoint.")
        if match["name"] != "Dropout":  # which only training has
            listed.append((match["name"], fields.optional(str, "path") or ""))
    kinds = [kind for kind, _ in listed]
    if not re.fullmatch("Transformer Pooling( Dense)*( Normalize)?", " ".join(kinds)):
        raise ValueError(
            f"{MODULES}: the modules {', '.join(kinds) or 'none'} are not implemented in this order, only Transformer, "
            "Pooling, any Dense, and perhaps Normalize."
        )
    if folder := listed[0][1]:
        raise ValueError(f"{MODULES}: the transformer in the folder {folder!r} is not implemented; move it to the top.")
    return listed


def _pooling(file: str, read: ReadJson, embed: int) -> Pooling | None:
    fields = Fields(read(file), file)
    if not fields.values:
        return None
    _refuse_others(
        fields, {"pooling_mode", "embedding_dimension", "word_embedding_dimension", "include_prompt", *_OLD_MODES}
    )
    for name in ("embedding_dimension", "word_embedding_dimension"):
        fields.expect(name, embed, "use the files of the same checkpoint")
    fields.expect("include_prompt", True)
    given = fields.values.get("pooling_mode")
    if given is None:
        given = [mode for name, mode in _OLD_MODES.items() if fields.flag(name, default=False)] or "mean"
    modes = [given] if isinstance(given, str) else given
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in _MODES:
        raise ValueError(f"{file}: pooling_mode={given!r} is not implemented; known: one of {', '.join(_MODES)}.")
    return _MODES[modes[0]]


def _dense(file: str, read: ReadJson, inputs: int) -> DenseConfig:
    fields = Fields(read(file), file)
    fields.expect("in_features", inputs, "use the files of the same checkpoint")
    known = {"in_features", "out_features", "bias", "activation_function"}
    for name, only in (
        ("module_input_name", "sentence_embedding"),
        ("module_output_name", "sentence_embedding"),
        ("use_residual", False),
    ):
        fields.expect(name, only)
        known.add(name)
    _refuse_others(fields, known)
    given = fields.optional(str, "activation_function") or "torch.nn.modules.activation.Tanh"
    package, _, name = given.rpartition(".")
    if package.partition(".")[0] != "torch" or name not in _ACTIVATIONS:
        raise ValueError(
            f"{file}: activation_function={given!r} is not implemented; known: {', '.join(_ACTIVATIONS)} of torch."
        )
    return DenseConfig(
        outputs=fields.integer("out_features", least=1),
        activation=_ACTIVATIONS[name],
        bias=fields.flag("bias", default=True),
    )


def _transformer(read: ReadJson) -> dict[str, Any]:
    """Read how texts become tokens, as fields of `SentenceModules`."""
    file, values = next(((file, values) for file in TRANSFORMER if (values := read(file))), (TRANSFORMER[0], {}))
    fields = Fields(values, file)
    fields.expect("transformer_task", "feature-extraction")
    fields.expect("module_output_name", "token_embeddings")
    fields.expect("tokenizer_name_or_path", None)
    nothing = ("processing_kwargs", "query_length", "document_length", "query_expansion")
    for name in nothing:
        if fields.values.get(name):
            fields.expect(name, None)
    options = [
        f"{kind}_{word}" for kind in ("model", "tokenizer", "processor", "config") for word in ("args", "kwargs")
    ]
    for name in options:
        if changing := sorted((fields.optional(dict, name) or {}).keys() - _LOADING):
            raise ValueError(f"{file}: {name} with {changing[0]!r} is not implemented; remove it.")
    if (text := (fields.optional(dict, "modality_config") or {"text": _TEXT}).get("text")) != _TEXT:
        raise ValueError(f"{file}: modality_config with text={text!r} is not implemented, only {_TEXT}.")
    _refuse_others(
        fields,
        {"max_seq_length", "do_lower_case", "transformer_task", "module_output_name", "tokenizer_name_or_path"}
        | {"modality_config", *nothing, *options}
        | {"unpad_inputs"},  # how PyTorch packs a batch
    )
    length = fields.optional(int, "max_seq_length")
    if length is not None and length < 1:
        raise ValueError(f"{file}: max_seq_length={length} must be >= 1; correct it.")
    return {"max_seq_length": length, "lowercase": fields.flag("do_lower_case", default=False)}


def _prompts(read: ReadJson) -> dict[str, Any]:
    fields = Fields(read(PROMPTS), PROMPTS)
    fields.expect("model_type", "SentenceTransformer")
    fields.expect("truncate_dim", None)
    # `__version__` is who wrote the file, `similarity_fn_name` what users of the vectors do with them.
    known = {"model_type", "truncate_dim", "prompts", "default_prompt_name", "__version__", "similarity_fn_name"}
    _refuse_others(fields, known)
    prompts, default = fields.optional(dict, "prompts") or {}, fields.optional(str, "default_prompt_name")
    if any(not isinstance(text, str | None) for text in prompts.values()):
        raise ValueError(f"{PROMPTS}: prompts={prompts!r} must be texts; correct it.")
    if default is not None and default not in prompts:
        raise ValueError(f"{PROMPTS}: default_prompt_name={default!r} is none of {', '.join(prompts) or 'no prompts'}.")
    return {"prompts": {name: text or "" for name, text in prompts.items()}, "default_prompt": default}


def _refuse_others(fields: Fields, known: Collection[str]) -> None:
    """Raise ValueError for a field that is not known, unless its value says that there is nothing."""
    for name, value in fields.values.items():
        if name not in known and value not in (None, False):
            raise ValueError(f"{fields.file}: {name}={value!r} is not implemented; choose another checkpoint.")
