"""Sentence encoders as sentence-transformers publishes them: its vectors, or a refusal by name."""

import dataclasses
import json
import pathlib
import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from jaxinfer import Embedder, PoolingParams, SamplingParams
from jaxinfer.checkpoints import CheckpointError, read_file
from jaxinfer.cli import app
from jaxinfer.models.files.conversion import convert
from jaxinfer.models.files.description import Description, SentenceConfig
from tests.models.sentences import (
    CASES_FILE,
    DENSE,
    HARMLESS,
    MODULES,
    POOLING,
    PROMPTS,
    TRANSFORMER,
    write_case,
)

GOLDENS = json.loads(CASES_FILE.read_text())
CASES = {case["name"]: case for case in GOLDENS["cases"]}
PLAIN = CASES["dense_Tanh"]


def converted(tmp_path: pathlib.Path, case: dict) -> Description:
    """Convert a case to the folder `model`."""
    hf = tmp_path / "hf"
    hf.mkdir()
    write_case(hf, GOLDENS, case)
    return convert(hf, tmp_path / "model", layout="single-file")


def with_fields(file: str, **fields: object) -> dict:
    """The plain case with these fields in one of its files."""
    return PLAIN | {"files": PLAIN["files"] | {file: PLAIN["files"].get(file, {}) | fields}}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The description of the plain case."""
    return converted(tmp_path_factory.mktemp("plain"), PLAIN)


DEFAULT = (
    *("modules_old", "folder", "cls_new", "max_old", "lasttoken_list", "not_normalised", "dense_twice"),
    *("max_seq_length_8", "cut_left", "lower_case", "prompt_by_name", "default_prompt"),
)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=[] if name in DEFAULT else pytest.mark.slow) for name, case in CASES.items()],
)
def test_vectors(case, tmp_path):
    converted(tmp_path, case)
    prompt = case.get("prompt_name", case.get("prompt"))
    chunks = {"chunk_size": 8, "page_size": 8} if case["model"].startswith("qwen3") else {}
    with Embedder(tmp_path / "model", dtype="float32", max_batch=4, **chunks) as embedder:
        vectors = embedder.embed(GOLDENS["texts"], prompt=prompt)
    np.testing.assert_allclose(vectors, case["vectors"], atol=2e-5)


@pytest.mark.slow
def test_a_decoder_without_a_head_embeds_and_cannot_generate(tmp_path):
    """As e5-mistral is published: `MistralModel`, an embedding that is not tied, and no lm_head."""
    hf, case = tmp_path / "hf", CASES["decoder_lasttoken"]
    hf.mkdir()
    write_case(hf, GOLDENS, case)
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(hf / "model.safetensors").items()}
    assert tensors.pop("lm_head.weight").any()
    save_file(tensors, hf / "model.safetensors")
    config = json.loads((hf / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):  # a model to generate that lacks it
        convert(hf, tmp_path / "refused")
    (hf / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3Model"]}))
    assert not convert(hf, tmp_path / "model", layout="single-file").generates
    with Embedder(tmp_path / "model", dtype="float32", max_batch=4, chunk_size=8, page_size=8) as embedder:
        np.testing.assert_allclose(embedder.embed(GOLDENS["texts"]), case["vectors"], atol=2e-5)
        with pytest.raises(ValueError, match="can only embed: it is an encoder, or a decoder without a head"):
            embedder.engine.inputs.process("w7", SamplingParams())
    done = CliRunner().invoke(app, ["chat", str(tmp_path / "model")])
    assert "is a decoder without a head, which writes no text" in done.stderr


def test_texts_become_tokens_as_the_model_says(tmp_path):
    """Each with and without a cut; token ids are taken as they are."""
    case = with_fields(TRANSFORMER, max_seq_length=8)
    converted(
        tmp_path,
        case | {"files": case["files"] | CASES["default_prompt"]["files"] | {TRANSFORMER: {"max_seq_length": 8}}},
    )
    text = GOLDENS["texts"][2]
    with Embedder(tmp_path / "model", dtype="float32", max_batch=4) as embedder:
        processor, tokenizer = embedder.engine.inputs, embedder.tokenizer

        def ids(given, **params):
            return list(processor.process(given, PoolingParams(**params)).prompt_token_ids)

        whole = tokenizer.encode(f"passage: {text}")
        assert ids(text) == [*whole[:7], whole[-1]]
        assert ids(text, prompt="") == [*tokenizer.encode(text)[:7], whole[-1]]
        assert ids("w7", prompt="query", truncate=False) == tokenizer.encode("query: w7")
        with pytest.raises(ValueError, match=r"prompt='querry' is none of the model's prompts \(query, passage\)"):
            ids("w7", prompt="querry")
        assert ids("w7", prompt="w8 ") == tokenizer.encode("w8 w7")
        assert ids(whole) == whole
        with pytest.raises(
            ValueError, match="Text 1: The text has 17 tokens and the model takes 8; shorten it, or let it be cut"
        ):
            embedder.embed(["w7", text], truncate=False)
        with pytest.raises(ValueError, match=r"Text 0: PoolingParams.prompt='query' needs a text; got token ids"):
            embedder.embed([[5, 6]], prompt="query")


@pytest.mark.parametrize(
    ("tokenizer", "stored", "expected"),
    [
        ({}, None, (None, "right")),
        ({"model_max_length": 1e30}, "Right", (None, "right")),
        ({"model_max_length": None, "max_len": 7}, "Left", (None, "left")),
        ({"max_len": 7}, "Left", (7, "left")),
        ({"max_len": 7, "model_max_length": 9, "truncation_side": "right"}, "Left", (9, "right")),
        ({"model_max_length": 24}, None, (None, "right")),
    ],
)
def test_where_texts_are_cut(tokenizer, stored, expected, tmp_path):
    """As `AutoTokenizer` of transformers 5 has it; the length that `tokenizer.json` stores is that of each call."""
    truncation = stored and {"direction": stored, "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    content = GOLDENS["tokenizers"][PLAIN["model"]] | {"truncation": truncation}
    files = {"tokenizer.json": content, "tokenizer_config.json": tokenizer}
    sentence = converted(tmp_path, PLAIN | {"files": PLAIN["files"] | files}).sentence
    assert (sentence.max_seq_length, sentence.truncation_side) == expected


@pytest.mark.parametrize(("file", "name"), [(file, name) for file, fields in HARMLESS.items() for name in fields])
def test_fields_that_change_nothing(file, name, plain, tmp_path):
    """The script of the goldens has checked that sentence-transformers' vectors stay the same."""
    description = converted(tmp_path, with_fields(file, **{name: HARMLESS[file][name]}))
    prompts = HARMLESS[file][name] if name == "prompts" else {}
    assert description == dataclasses.replace(plain, sentence=SentenceConfig(prompts=prompts))


REFUSED = {
    POOLING: {
        "pooling_mode": ["weightedmean", "mean_sqrt_len_tokens", ["mean", "max"], 3],
        "pooling_mode_max_tokens": [True],
        "include_prompt": [False],
        "embedding_dimension": [25],
        "another": [1],
    },
    DENSE: {
        "activation_function": ["torch.nn.modules.activation.Mish", "my.Tanh"],
        "module_input_name": ["token_embeddings"],
        "module_output_name": ["other"],
        "use_residual": [True],
        "in_features": [25],
        "out_features": [0],
        "another": [1],
    },
    TRANSFORMER: {
        "transformer_task": ["fill-mask"],
        "module_output_name": ["scores"],
        "modality_config": [{"text": {"method": "get_text_features", "method_output_name": "pooler_output"}}],
        "processing_kwargs": [{"text": {"padding": "max_length"}}],
        "query_length": [32],
        "query_expansion": [{"length": 32}],
        "tokenizer_name_or_path": ["other"],
        "model_args": [{"num_hidden_layers": 1}],
        "tokenizer_args": [{"do_lower_case": True}],
        "max_seq_length": [0],
        "another": [1],
    },
    PROMPTS: {
        "model_type": ["SparseEncoder"],
        "truncate_dim": [8],
        "default_prompt_name": ["nothing"],
        "prompts": [{"query": 3}],
        "another": [1],
    },
}


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [(file, name, value) for file, fields in REFUSED.items() for name, values in fields.items() for value in values],
)
def test_fields_that_are_refused(file, name, value, tmp_path):
    with pytest.raises(
        CheckpointError, match=f"{re.escape(file)}: .*{'pooling_mode' if file == POOLING and 'mode' in name else name}"
    ) as error:
        converted(tmp_path, with_fields(file, **{name: value}))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (["Transformer"], "modules Transformer are not implemented in this order"),
        (["Transformer", "Pooling", "Normalize", "Dense"], "modules Transformer, Pooling, Normalize, Dense are not"),
        (
            ["Transformer", "Pooling", "LayerNorm"],
            r"module 'sentence_transformers.models.LayerNorm' is not implemented",
        ),
        ([], "modules none are not implemented"),
    ],
)
def test_modules_that_are_refused(kinds, message, tmp_path):
    modules = [{"idx": i, "path": "", "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(kinds)]
    with pytest.raises(CheckpointError, match=message):
        converted(tmp_path, PLAIN | {"files": PLAIN["files"] | {MODULES: modules}})


def test_files_that_are_missing(tmp_path):
    hf = tmp_path / "hf"
    hf.mkdir()
    write_case(hf, GOLDENS, PLAIN)
    (hf / "2_Dense/model.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"2_Dense/model.safetensors: no such file; if there is a pytorch_model.bin"
    ):
        convert(hf, tmp_path / "model")
    (hf / POOLING).unlink()
    with pytest.raises(CheckpointError, match=r"1_Pooling/config.json: no such file, and modules.json lists it"):
        convert(hf, tmp_path / "model")
    modules = json.loads((hf / MODULES).read_text())
    modules[1]["path"] = "../elsewhere"
    (hf / MODULES).write_text(json.dumps(modules))
    with pytest.raises(CheckpointError, match=r"names a file '../elsewhere/config\.json' outside of it"):
        convert(hf, tmp_path / "model")
    (hf / MODULES).write_text("{}")
    with pytest.raises(CheckpointError, match=r"modules.json: not a JSON list of objects"):
        convert(hf, tmp_path / "model")


def test_a_dense_layer_behind_a_decoder_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"modules\.json: Dense is not implemented behind a decoder"):
        converted(tmp_path, PLAIN | {"model": "qwen3_awkward"})


def test_directories_of_older_versions_are_refused(tmp_path):
    """They do not say how texts become vectors."""
    converted(tmp_path, PLAIN)
    folder = tmp_path / "old"
    folder.mkdir()
    fields = json.loads(read_file(tmp_path / "model", "config.json"))
    del fields["sentence"]
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(
        CheckpointError, match="no field sentence, which says how texts become vectors; convert the model"
    ):
        Description.read(folder)
