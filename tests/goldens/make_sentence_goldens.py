"""Writes `sentences.json`: the vectors of sentence-transformers for small models with each of its files and fields.

Run where sentence-transformers is, beside PyTorch:

    python tests/goldens/make_sentence_goldens.py

A case is a golden of a text model, a tokenizer, files to put beside them, texts, and the vectors. `harmless` are fields
that are added to a file one at a time; the script checks that none changes a vector.
"""

import json
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import tokenizers
from sentence_transformers import SentenceTransformer

from tests.models.sentences import CASES_FILE, DENSE, HARMLESS, MODULES, POOLING, PROMPTS, TRANSFORMER, write_case

TEXTS = ["Hello world", "w7 w8 w9", " ".join(f"w{i}" for i in range(7, 21))]


def tokenizer(begin: str, end: str) -> str:
    """Make a tokenizer of 53 words that puts these tokens around a text."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "<end>", "hello", "world", "Hello", "World", "query:", "passage:"]
    vocab = {word: i for i, word in enumerate([*words, *(f"w{i}" for i in range(11, 53))])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "<end>"])
    around = [(token, made.token_to_id(token)) for token in dict.fromkeys((begin, end)) if token]
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single=" ".join(part for part in (begin, "$A", end) if part), special_tokens=around
    )
    return json.loads(made.to_str())


def modules(*kinds: str, style: str = "old", pooling: str = "1_Pooling") -> list[dict[str, Any]]:
    """Make the content of `modules.json`, as versions up to 5.3 wrote it ("old"), 5.4 to 5.7 ("5"), or 6 does."""
    place = {
        "old": dict.fromkeys(("Transformer", "Pooling", "Dense", "Normalize", "Dropout"), "models"),
        "5": {
            "Transformer": "base.modules.transformer",
            "Pooling": "sentence_transformer.modules.pooling",
            "Dense": "base.modules.dense",
            "Normalize": "sentence_transformer.modules.normalize",
        },
        "6": {
            "Transformer": "base.modules.transformer",
            "Pooling": "sentence_transformer.modules.pooling",
            "Dense": "base.modules.dense",
            "Normalize": "base.modules.normalize",
        },
    }[style]
    folders = {"Transformer": "", "Pooling": pooling}
    return [
        {
            "idx": i,
            "name": str(i),
            "path": folders.get(kind, f"{i}_{kind}"),
            "type": f"sentence_transformers.{place[kind]}.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]


PLAIN = ("Transformer", "Pooling", "Normalize")
MEAN = {"word_embedding_dimension": 24, "pooling_mode_mean_tokens": True}
TANH = {"in_features": 24, "out_features": 16, "bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}


def cases() -> Iterator[dict[str, Any]]:
    """All cases, still without vectors."""

    def case(name: str, files: dict[str, Any], *, model: str = "bert_pooled", **options: Any) -> dict[str, Any]:
        return {"name": name, "model": model, "files": {MODULES: modules(*PLAIN), POOLING: MEAN} | files, **options}

    for style in ("old", "5", "6"):
        yield case(f"modules_{style}", {MODULES: modules(*PLAIN, style=style)})
    yield case("not_normalised", {MODULES: modules("Transformer", "Pooling")})
    yield case("dropout", {MODULES: modules("Transformer", "Pooling", "Dropout", "Normalize")})
    yield case(
        "folder", {MODULES: modules(*PLAIN, pooling="pooling"), "pooling/config.json": {"pooling_mode": "cls"} | DIM}
    )
    for mode in ("mean", "cls", "max", "lasttoken"):
        old = {"mean": "mean_tokens", "cls": "cls_token", "max": "max_tokens", "lasttoken": "lasttoken"}[mode]
        old_fields = {f"pooling_mode_{name}": name == old for name in ("mean_tokens", "cls_token", "max_tokens", old)}
        for spelling, fields in (
            ("new", {"pooling_mode": mode}),
            ("old", old_fields),
            ("list", {"pooling_mode": [mode]}),
        ):
            yield case(f"{mode}_{spelling}", {POOLING: fields | DIM})
        yield case(f"decoder_{mode}", {POOLING: {"pooling_mode": mode} | DIM}, model="qwen3_awkward")
        # Both spellings: the new one counts.
        yield case(f"{mode}_both", {POOLING: {"pooling_mode": mode, "pooling_mode_mean_tokens": True} | DIM})
    yield case("no_mode", {POOLING: DIM})
    for activation in ("activation.Tanh", "linear.Identity", "activation.GELU", "activation.ReLU", "activation.SiLU"):
        yield case(
            f"dense_{activation.rpartition('.')[2]}",
            {
                MODULES: modules("Transformer", "Pooling", "Dense", "Normalize"),
                DENSE: TANH | {"activation_function": f"torch.nn.modules.{activation}"},
                TRANSFORMER: {"module_output_name": "token_embeddings"},
            },
        )
    yield case(
        "dense_twice",
        {
            MODULES: modules("Transformer", "Pooling", "Dense", "Dense"),
            "2_Dense/config.json": {"in_features": 24, "out_features": 40, "bias": False},
            "3_Dense/config.json": {"in_features": 40, "out_features": 8},
        },
    )
    for length in (2, 8, 24):
        yield case(f"max_seq_length_{length}", {TRANSFORMER: {"max_seq_length": length}})
        yield case(f"decoder_max_seq_length_{length}", {TRANSFORMER: {"max_seq_length": length}}, model="qwen3_awkward")
    yield case("model_max_length", {"tokenizer_config.json": {"model_max_length": 6}})
    yield case("cut_left", {"tokenizer_config.json": {"model_max_length": 6, "truncation_side": "left"}})
    yield case("lower_case", {TRANSFORMER: {"max_seq_length": 20, "do_lower_case": True}})
    prompts = {"prompts": {"query": "query: ", "passage": "passage: "}}
    yield case("prompt_by_name", {PROMPTS: prompts}, prompt_name="query")
    yield case("prompt_text", {PROMPTS: prompts}, prompt="w7 ")
    yield case("prompts_unused", {PROMPTS: prompts})
    yield case("default_prompt", {PROMPTS: prompts | {"default_prompt_name": "passage"}})
    yield case("no_default_prompt", {PROMPTS: prompts | {"default_prompt_name": "passage"}}, prompt="")


DIM = {"word_embedding_dimension": 24}


def encode(folder: pathlib.Path, case: dict[str, Any]) -> np.ndarray:
    """Compute the vectors of a case by sentence-transformers."""
    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": "float32"})
    options = {name: case[name] for name in ("prompt", "prompt_name") if name in case}
    return model.encode(TEXTS, **options)


def main() -> None:
    """Write the file."""
    made = []
    frames = {"bert_pooled": tokenizer("[CLS]", "[SEP]"), "qwen3_awkward": tokenizer("", "<end>")}
    goldens = {"texts": TEXTS, "tokenizers": frames, "cases": made}
    for case in cases():
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder)
            write_case(path, goldens, case)
            vectors = encode(path, case)
        made.append(case | {"vectors": [[round(float(x), 6) for x in row] for row in vectors]})
    plain = next(case for case in made if case["name"] == "dense_Tanh")
    for file, fields in HARMLESS.items():
        for name, value in fields.items():
            changed = plain | {"files": plain["files"] | {file: plain["files"].get(file, {}) | {name: value}}}
            with tempfile.TemporaryDirectory() as folder:
                write_case(pathlib.Path(folder), goldens, changed)
                np.testing.assert_allclose(encode(pathlib.Path(folder), changed), plain["vectors"], atol=1e-5)
    CASES_FILE.write_text(json.dumps(goldens, indent=None, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
