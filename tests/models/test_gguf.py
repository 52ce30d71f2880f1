"""GGUF files: llama.cpp's tokens and ids, the values of the gguf package, and every refusal in one line."""

import contextlib
import json
import pathlib
import random
import re
import struct
import zipfile

import gguf
import numpy as np
import pytest
import tokenizers

from jaxinfer import LLM, SamplingParams, checkpoints
from jaxinfer.checkpoints import CheckpointError
from jaxinfer.checkpoints.gguf_file import TYPES, GgufFile
from jaxinfer.hub import look_at, resolve
from jaxinfer.models.files.conversion import HuggingFaceModel, convert
from jaxinfer.models.files.gguf_config import config_fields
from jaxinfer.models.files.gguf_tokenizer import token_ids, tokenizer_files
from jaxinfer.models.files.preview import Preview, preview
from jaxinfer.models.files.verification import compare_tensors
from jaxinfer.text.chat_template import ChatTemplates
from tests.models import goldens

GOLDENS = goldens.DIRECTORY / "gguf"
EXPECTED = json.loads((GOLDENS / "expected.json").read_text())
MODELS = [name for name in EXPECTED if name.endswith(".gguf")]
TEXTS = [name for name in EXPECTED if name not in MODELS]
COMPUTE_AS_OTHERS = {f"{name}.F32.gguf" for name in ("gemma", "ernie4_5", "exaone4", "qwen2moe")}
"""Files whose tensors have names of their own, and whose layers other tests compute."""


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """The folder of the files."""
    folder = tmp_path_factory.mktemp("gguf")
    with zipfile.ZipFile(GOLDENS / "models.zip") as archive:
        archive.extractall(folder)
    return folder


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in COMPUTE_AS_OTHERS else ()) for name in MODELS]
)
def test_generates_the_tokens_of_llama_cpp(files, name, tmp_path):
    """With the stored weights: what is quantised in the file is rounded once more."""
    expected, description = EXPECTED[name], convert(files / name, tmp_path / "model")
    assert description.dtype == {"F32": "float32", "F16": "float16"}.get(name.split(".")[1], "bfloat16")
    leaves = {leaf: np.asarray(array, np.float32) for leaf, array in checkpoints.load(tmp_path / "model").items()}
    tokens = np.array([expected["prompt"] + expected["greedy"][:-1]], np.int32)
    golden = goldens.Golden(description.config, leaves, tokens, tokens, np.arange(tokens.size)[None], tokens)
    logits, _ = goldens.forward_by_layers(*goldens.build(golden), tokens, golden.positions)
    assert logits[0, len(expected["prompt"]) - 1 :].argmax(-1).tolist() == expected["greedy"]
    assert not compare_tensors(tmp_path / "model", files / name).beyond


@pytest.mark.parametrize("name", MODELS)
def test_metadata_and_values_are_those_of_the_gguf_package(files, name):
    file, reader = GgufFile(files / name), gguf.GGUFReader(files / name)
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert file.metadata == fields
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        expected = tensor.data
        if tensor.tensor_type not in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
            expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        values = file.read(tensor.name)
        assert values.shape == tuple(tensor.shape[::-1])
        np.testing.assert_array_equal(values.astype(np.float32), expected.astype(np.float32), strict=True)


def test_all_types_are_tested(files):
    types = {tensor.type for name in MODELS for tensor in GgufFile(files / name).tensors.values()}
    assert {type_.name for type_ in types} == {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"}
    assert types | OTHER_TYPES == set(TYPES)


OTHER_TYPES = {gguf.GGMLQuantizationType[name] for name in ("Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q5_K")}
"""Types of which no model is among the goldens."""


def written(file: pathlib.Path, tensors: dict[gguf.GGMLQuantizationType, np.ndarray]) -> pathlib.Path:
    """Write a file of tensors with the names of their types."""
    writer = gguf.GGUFWriter(file, "llama")
    for type_, values in tensors.items():
        writer.add_tensor(type_.name, values, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_values_of_other_types_are_those_of_the_gguf_package(tmp_path):
    rng = np.random.default_rng(0)
    sizes = {type_: gguf.GGML_QUANT_SIZES[type_] for type_ in sorted(OTHER_TYPES)}
    stored = {type_: rng.integers(0, 64, (3, 512 // values * size), "u1") for type_, (values, size) in sizes.items()}
    file = GgufFile(written(tmp_path / "model.gguf", stored))
    for type_, content in stored.items():
        expected = gguf.dequantize(content, type_)
        assert expected.shape == (3, 512)
        assert len(np.unique(expected)) > 100
        np.testing.assert_array_equal(file.read(type_.name), expected, strict=True)


def tokenizer(files: pathlib.Path, name: str) -> tokenizers.Tokenizer:
    file = next(files.glob(f"{name}.*.gguf"))
    return tokenizers.Tokenizer.from_str(tokenizer_files(GgufFile(file).metadata, 1000)["tokenizer.json"].decode())


@pytest.mark.parametrize("name", TEXTS)
def test_texts_have_the_ids_of_the_tokenizer_that_the_file_was_made_from(files, name):
    made = tokenizer(files, name)
    actual = {text: made.encode(text).ids for text in EXPECTED[name]["texts"]}
    assert actual == EXPECTED[name]["texts"]


@pytest.mark.parametrize("name", TEXTS)
def test_texts_come_back(files, name):
    made = tokenizer(files, name)
    for text, ids in EXPECTED[name]["texts"].items():
        if (name[:4] != "qwen" or text.isascii()) and "<" not in text and "\n\n" not in text:
            assert made.decode(ids) == text


def test_a_file_is_a_model_wherever_one_is_named(files, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path / "cache"))
    expected = EXPECTED["llama.BF16.gguf"]
    seen = look_at(files / "llama.BF16.gguf")
    assert isinstance(seen, Preview)
    assert seen.description
    assert not (tmp_path / "cache").exists()
    with LLM(str(files / "llama.BF16.gguf"), max_batch=1, context=32, dtype="float32") as llm:
        params = SamplingParams(temperature=0, max_tokens=len(expected["greedy"]))
        assert llm.generate([expected["prompt"]], params)[0].outputs[0].token_ids == expected["greedy"]
        assert llm.tokenizer.encode("a") == EXPECTED["llama"]["texts"]["a"]
        folder, description = llm.model.folder, llm.model.description
    ids = {token: tokenizer(files, "llama").token_to_id(f"<|{token}|>") for token in ("begin", "end", "im_end")}
    assert (description.bos_id, description.eos_ids) == (ids["begin"], (ids["end"], ids["im_end"]))
    assert (description.config, description.dtype) == (seen.description.config, seen.description.dtype)
    assert resolve(files / "llama.BF16.gguf") == folder
    templates = ChatTemplates(folder)
    assert templates.names == ["default", "rag"]
    assert templates.render([{"role": "user", "content": "Hi"}]) == "<|im_start|>user\nHi<|im_end|>\n"
    alone = rewrite(tmp_path / "model.gguf", files / "qwen2.F16.gguf")
    assert not compare_tensors(resolve(alone.parent), alone).beyond


def test_scores_of_the_largest_gemma_3_are_divided_by_the_width_of_all_heads(files):
    metadata = GgufFile(files / "gemma3.F32.gguf").metadata
    shapes = {"token_embd.weight": (420, 8)}
    small, large = (config_fields(metadata | {"gemma3.block_count": layers}, shapes, None) for layers in (7, 62))
    assert small["query_pre_attn_scalar"] == metadata["gemma3.attention.key_length"] == 8
    assert large["query_pre_attn_scalar"] == 4


# What is refused


def rewrite(out: pathlib.Path, file: pathlib.Path, tensors: dict | None = None, **changes) -> pathlib.Path:
    """A copy of a file with other metadata and tensors by name; None: left out. Keys have __ for a dot."""
    reader = gguf.GGUFReader(file)
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    writer = gguf.GGUFWriter(out, changes.pop("general.architecture", fields["general.architecture"].contents()))
    for key, field in fields.items():
        if key != "general.architecture" and key not in changes:
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1])
    for key, value in changes.items():
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    data = {tensor.name: tensor.data for tensor in reader.tensors} | (tensors or {})
    types = {tensor.name: tensor.tensor_type for tensor in reader.tensors}
    for tensor, values in data.items():
        if values is not None:
            writer.add_tensor(tensor, values, raw_dtype=None if tensor in (tensors or {}) else types[tensor])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def refuses(file: pathlib.Path, message: str) -> None:
    """Converting fails with one line that begins with the file, and leaves nothing."""
    out = file.parent / "out" / "model"
    with pytest.raises(CheckpointError, match=message) as error:
        convert(file, out)
    assert re.match(rf"{re.escape(str(file))}: [^\n]+$", str(error.value))
    assert not out.parent.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"general__architecture": "phi3"},
            "general.architecture='phi3' is not implemented; known: llama, qwen2, qwen3",
        ),
        ({"general__type": "adapter"}, "general.type='adapter' is not implemented, only 'model'"),
        ({"llama__expert_count": 8}, "llama.expert_count=8 is not implemented"),
        ({"llama__attention__sliding_window": 16}, "llama.attention.sliding_window=16 is not implemented"),
        ({"llama__rope__scaling__type": "linear"}, "llama.rope.scaling.type='linear' is not implemented, only 'none'"),
        ({"llama__rope__dimension_count": 4}, "llama.rope.dimension_count=4 is not implemented, only 8"),
        ({"llama__rope__freq_base": 1e6}, "rope_freqs.weight: only Llama 3.1's scaling of rotary"),
        ({"llama__block_count": None}, "llama.block_count is missing"),
        ({"llama__block_count": "two"}, "llama.block_count='two' is not implemented, only one int"),
        ({"llama__block_count": 3}, r"missing: layers.2.input_layernorm.weight, "),
        ({"llama__feed_forward_length": 25}, r"with this metadata .*gate_proj.weight is \[24, 8\]"),
        ({"tokenizer__ggml__model": "bert"}, "tokenizer.ggml.model='bert' is not implemented; known: gpt2, llama"),
        ({"tokenizer__ggml__pre": "tekken"}, "tokenizer.ggml.pre='tekken' is not implemented; known: gpt-2, llama-bpe"),
        ({"tokenizer__ggml__pre": None}, "tokenizer.ggml.pre=None is not implemented"),
        ({"tokenizer__ggml__pre": 1}, r"tokenizer.ggml.\*: .* at `\$.pre`"),
        ({"tokenizer__ggml__model": "llama"}, "tokenizer.ggml.pre='llama-bpe' is not implemented for SentencePiece"),
        ({"tokenizer__ggml__bos_token_id": 999}, "tokenizer.ggml.bos_token_id=999 is none of 326 tokens"),
        ({"tokenizer__ggml__merges": ["a zz"]}, r"tokenizer.ggml.\* is not a tokenizer"),
        ({"tokenizer__ggml__merges": None}, "tokenizer.ggml.merges is missing, so words would become bytes"),
        ({"tokenizer__ggml__token_type": [1]}, "tokens has 328 entries, token_type 1"),
        ({"tokenizer__ggml__remove_extra_whitespaces": True}, "remove_extra_whitespaces is not implemented"),
        ({"tokenizer__ggml__normalizer": "lower"}, "tokenizer.ggml.normalizer=lower is not implemented"),
        ({"tokenizer__rwkv__world": "words"}, "tokenizer.rwkv.world=words is not implemented"),
        ({"tokenizer__chat_templates": ["../x"]}, "must be names of templates"),
        ({"split__count": 3, "split__no": 1}, "part 2 of 3, and split files are not implemented; join them"),
        ({"tensors": {"blk.1.ffn_up.weight": None}}, "1 missing: layers.1.mlp.up_proj.weight"),
        ({"tensors": {"token_embd.weight": None}}, "token_embd.weight, the matrix of embeddings, is missing"),
        ({"tensors": {"blk.0.ssm_a.weight": np.zeros(8)}}, "blk.0.ssm_a.weight is stored as F64"),
        ({"tensors": {"blk.0.ssm_a.weight": np.zeros(8, "f4")}}, "the tensor 'blk.0.ssm_a.weight' is not implemented"),
        ({"tensors": {"output.weight": np.zeros((4, 8), "f4")}}, r"lm_head.weight is \[4, 8\]"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(files, tmp_path, changes, message):
    refuses(rewrite(tmp_path / "model.gguf", files / "llama.F32.gguf", **changes), message)


def test_what_llama_cpp_takes_too(files, tmp_path):
    """An array of arrays in a key that nobody reads, 2^32 - 1 for no token, and two unused tokens without names."""
    original = files / "llama.F32.gguf"
    metadata = GgufFile(original).metadata
    count, nested = len(metadata["tokenizer.ggml.tokens"]), np.arange(6, dtype="<i4").reshape(2, 3).tolist()
    changes = {
        "tokenizer__ggml__padding_token_id": np.uint32(2**32 - 1).item(),
        "tokenizer__ggml__tokens": [*metadata["tokenizer.ggml.tokens"][:-2], "", "", "last"],
        "tokenizer__ggml__token_type": [*metadata["tokenizer.ggml.token_type"][:-2], 5, 5, 1],
    }
    fields = {**metadata, **{key.replace("__", "."): value for key, value in changes.items()}}
    made = tokenizers.Tokenizer.from_str(tokenizer_files(fields, count + 1)["tokenizer.json"].decode())
    assert made.token_to_id("last") == count
    assert "pad_token" not in json.loads(tokenizer_files(fields, count + 1)["tokenizer_config.json"])
    file = rewrite(tmp_path / "model.gguf", original, an__array=[0])
    one, header = struct.pack("<IQ", gguf.GGUFValueType.INT32, 1), struct.pack("<I", gguf.GGUFValueType.ARRAY)
    content, key = file.read_bytes(), b"an.array"
    flat = key + header + one + struct.pack("<i", 0)
    arrays = b"".join(struct.pack("<IQ3i", gguf.GGUFValueType.INT32, 3, *row) for row in nested)
    assert content.count(flat) == 1
    file.write_bytes(content.replace(flat, key + header + struct.pack("<IQ", gguf.GGUFValueType.ARRAY, 2) + arrays))
    assert GgufFile(file).metadata["an.array"] == nested
    one_inside = struct.pack("<IQ", gguf.GGUFValueType.ARRAY, 1)
    file.write_bytes(content.replace(flat, key + header + 5000 * one_inside + one + struct.pack("<i", 0)))
    refuses(file, "truncated or corrupt .arrays are nested too deeply.; fetch it again")


TOKENIZER_KEYS = {key for key in vars(gguf.Keys.Tokenizer).values() if str(key).startswith("tokenizer.ggml.")}
NO_EFFECT = {"cls", "mask", "seperator", "fim_pre", "fim_suf", "fim_mid", "prefix", "suffix", "middle"}
ENDS = {"eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"}


@pytest.mark.parametrize("key", sorted(TOKENIZER_KEYS))
def test_each_key_of_a_tokenizer_has_an_effect_or_is_known_to_have_none(files, key):
    """As llama.cpp's vocabulary takes them; other keys are refused."""
    metadata = GgufFile(files / "llama.F32.gguf").metadata
    name = key.removeprefix("tokenizer.ggml.").removesuffix("_token_id")
    if name in ENDS:
        assert 7 in token_ids(metadata | {key: 7})["eos_token_id"]
    elif name in NO_EFFECT | {"token_type_count"}:
        assert token_ids(metadata | {key: 7}) == token_ids(metadata)
        assert tokenizer_files(metadata | {key: 7}, 500) == tokenizer_files(metadata, 500)
    else:  # the parts of the tokenizer itself, which other tests compare with llama.cpp's
        with pytest.raises(ValueError, match=r"tokenizer\.ggml\.\*"):
            tokenizer_files(metadata | {key: {"not": "this"}}, 500)


def test_sampling_defaults_and_ends_of_texts(files, tmp_path, caplog):
    changes = {"general__sampling__temp": 0.6, "general__sampling__top_k": 20, "general__sampling__mirostat": 2}
    file = rewrite(tmp_path / "model.gguf", files / "qwen2.F16.gguf", **changes)
    seen = preview(file)
    assert seen.description.sampling.named == {"temperature": 0.6, "top_k": 20}
    assert [*seen.ends] == list(seen.description.eos_ids)
    assert "<|im_end|>" in seen.ends.values()
    assert [record.getMessage() for record in caplog.records] == [
        f"{file}: not supported, so texts are generated without: mirostat=2."
    ]


def test_other_types_are_refused_by_name(tmp_path):
    file = written(tmp_path / "model.gguf", {gguf.GGMLQuantizationType.IQ4_NL: np.ones((24, 18), "u1")})
    refuses(
        file,
        "IQ4_NL is stored as IQ4_NL, which is not implemented; use a file in F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, "
        "Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K",
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a GGUF file"),
        (b"PK\3\4 and more", "not a GGUF file"),
        (b"GGUF\0\0\0\3" + bytes(16), "big-endian, which is not implemented"),
        (b"GGUF\1\0\0\0" + bytes(16), "version 1 of GGUF is not implemented"),
        (b"GGUF\3\0\0\0" + b"\xff" * 16, "truncated or corrupt"),
    ],
)
def test_files_of_other_kinds_are_refused(tmp_path, content, message):
    (tmp_path / "model.gguf").write_bytes(content)
    refuses(tmp_path / "model.gguf", message)


def test_a_damaged_file_is_refused_or_read(files, tmp_path):
    """Cut anywhere, it is refused; with other bytes it may be another model, but no other error is raised."""
    rng, file, out = random.Random(0), tmp_path / "model.gguf", tmp_path / "out" / "model"
    for name in ("llama.F16.gguf", "llama_spm.BF16.gguf"):
        content = (files / name).read_bytes()
        for length in rng.sample(range(8, len(content)), 30):
            file.write_bytes(content[:length])
            refuses(file, "truncated")
        for _ in range(100):
            changed = bytearray(content)
            changed[rng.randrange(9000)] = rng.randrange(256)
            file.write_bytes(changed)
            with contextlib.suppress(CheckpointError):
                HuggingFaceModel(file)
    assert not out.exists()


def test_of_several_files_one_must_be_given(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    message = r"2 GGUF files \(a.gguf, ...\); name one of them"
    for read in (resolve, look_at, HuggingFaceModel):
        with pytest.raises(CheckpointError, match=message):
            read(tmp_path)
    with pytest.raises(CheckpointError, match=r"c.gguf: no such file\.$"):
        resolve("a/c.gguf")
