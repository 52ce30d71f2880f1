"""Directories of sentence-transformers: the goldens of `sentences.json`, and how a case becomes a directory."""

import json
import pathlib
import shutil
from typing import Any

import numpy as np
from safetensors.numpy import save_file

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
CASES_FILE = GOLDENS / "sentences.json"
MODULES, PROMPTS, TRANSFORMER = "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"
POOLING, DENSE = "1_Pooling/config.json", "2_Dense/config.json"
MESSAGE = {"method": "forward", "method_output_name": "last_hidden_state"}

HARMLESS: dict[str, dict[str, Any]] = {
    POOLING: {"include_prompt": True, "embedding_dimension": 24, "pooling_mode_weightedmean_tokens": False},
    DENSE: {
        "module_input_name": "sentence_embedding",
        "module_output_name": "sentence_embedding",
        "use_residual": False,
    },
    TRANSFORMER: {
        "do_lower_case": False,
        "transformer_task": "feature-extraction",
        "module_output_name": "token_embeddings",
        "modality_config": {"text": MESSAGE},
        "unpad_inputs": False,
        "processing_kwargs": {},
        "query_length": None,
        "document_length": None,
        "query_expansion": None,
        "tokenizer_name_or_path": None,
        "model_args": {"attn_implementation": "eager", "add_pooling_layer": False},
        "model_kwargs": {"dtype": "float32"},
        "tokenizer_args": {},
        "processor_kwargs": {"use_fast": True},
        "config_args": {},
        "config_kwargs": {"use_cache": False},
    },
    PROMPTS: {
        "model_type": "SentenceTransformer",
        "__version__": {"sentence_transformers": "6.2.0"},
        "similarity_fn_name": "dot",
        "truncate_dim": None,
        "default_prompt_name": None,
        "prompts": {"query": "query: ", "document": ""},
    },
}
"""Fields of the published files with values that change no vector: `make_sentence_goldens.py` has checked that."""


def write_case(folder: pathlib.Path, goldens: dict[str, Any], case: dict[str, Any]) -> None:
    """Write the directory of a case."""
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDENS / case["model"] / name, folder / name)
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "pad_token": "[PAD]"}
    files = {"tokenizer.json": goldens["tokenizers"][case["model"]]} | case["files"]
    files["tokenizer_config.json"] = special | files.get("tokenizer_config.json", {})
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
        if "_Dense" in name:
            save_file(dense_tensors(content), folder / name.replace("config.json", "model.safetensors"))


def dense_tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """The weights of a dense layer: the same everywhere."""
    inputs, outputs = config["in_features"], config["out_features"]
    weight = np.sin(np.arange(inputs * outputs, dtype=np.float32)).reshape(outputs, inputs)
    bias = {"linear.bias": np.cos(np.arange(outputs, dtype=np.float32))} if config.get("bias", True) else {}
    return {"linear.weight": weight, **bias}
