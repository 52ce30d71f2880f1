"""GGUF files: llama.cpp's tokens and ids, the values of the gguf package, and every refusal in one line."""

import contextlib
import dataclasses
import json
import pathlib
import random
import re
import shutil
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
from jaxinfer.models.files.gguf_delta_rule import DeltaRuleTensors
from jaxinfer.models.files.gguf_model import GgufModel
from jaxinfer.models.files.gguf_tokenizer import token_ids, tokenizer_files
from jaxinfer.models.files.preview import Preview, preview
from jaxinfer.models.files.verification import compare_tensors
from jaxinfer.text.chat_template import ChatTemplates
from tests.gguf_files import GOLDENS, rewrite, split
from tests.models import goldens

EXPECTED = json.loads((GOLDENS / "expected.json").read_text())
MODELS = [name for name in EXPECTED if name.endswith(".gguf")]
TEXTS = [name for name in EXPECTED if name not in MODELS]
COMPUTE_AS_OTHERS = {
    *(f"{name}.F32.gguf" for name in ("gemma", "ernie4_5", "exaone4", "qwen2moe", "qwen35", "qwen35moe", "qwen3next")),
    *(f"{name}.{dtype}.gguf" for name in ("gemma3", "qwen2", "qwen3") for dtype in ("F16", "F32")),
}
"""Files whose layers other tests compute, and whose dtype other files have."""


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


def test_gates_and_ups_of_experts_may_be_in_one_tensor(files, tmp_path):
    """As newer versions of llama.cpp's converter write them; llama.cpp generates the same tokens from such a file."""
    apart = files / "qwen35moe.F32.gguf"
    stored, merged = {tensor.name: tensor.data for tensor in gguf.GGUFReader(apart).tensors}, {}
    for layer in range(2):
        gate, up = (f"blk.{layer}.ffn_{part}_exps.weight" for part in ("gate", "up"))
        merged |= {f"blk.{layer}.ffn_gate_up_exps.weight": np.concatenate((stored[gate], stored[up]), axis=1)}
        merged |= {gate: None, up: None}
    model, expected = HuggingFaceModel(rewrite(tmp_path / "merged.gguf", apart, merged)), HuggingFaceModel(apart)
    assert model.describe() == expected.describe()
    assert model.leaf_names == expected.leaf_names
    for name in model.leaf_names:
        np.testing.assert_array_equal(model.read(name), expected.read(name), strict=True)
    few = rewrite(tmp_path / "few.gguf", apart, {up: stored[up][:3]})
    with pytest.raises(CheckpointError, match=r"_gate_exps.weight \[4, 32, 16\] and blk.* \[3, 32, 16\] do not fit"):
        HuggingFaceModel(few)


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


def test_value_heads_come_back_to_their_key_heads():
    """Of 2 key heads and 6 value heads of 2 features, by their numbers as Hugging Face's checkpoints count them."""
    rules = DeltaRuleTensors(key_heads=2, value_heads=6, key_dim=3, value_dim=2, in_turn=True)
    in_turn = np.array([0, 3, 1, 4, 2, 5], "f4")
    rows = np.repeat(in_turn, 2)
    keys = np.arange(100, 112, dtype="f4")
    together = np.repeat(np.arange(6, dtype="f4"), 2)
    for name, stored, expected in (
        ("dt_bias", in_turn, np.arange(6)),
        ("in_proj_b.weight", in_turn[:, None], np.arange(6)[:, None]),
        ("A_log", -np.exp(in_turn), np.arange(6)),
        ("in_proj_z.weight", rows[:, None], together[:, None]),
        ("conv1d.weight", np.r_[keys, rows][:, None], np.r_[keys, together][:, None]),
        ("out_proj.weight", rows[None], together[None]),
        ("norm.weight", rows, rows),
    ):
        np.testing.assert_allclose(rules.restore(f"model.layers.0.linear_attn.{name}", stored), expected, rtol=1e-6)
    grouped = dataclasses.replace(rules, in_turn=False)
    np.testing.assert_array_equal(grouped.restore("model.layers.0.linear_attn.dt_bias", in_turn), in_turn)
    joined = grouped.by_key_head(np.r_[together][:, None] + 50, np.r_[keys, together][:, None])[:, 0].tolist()
    assert joined[:9] == [100, 101, 102, 106, 107, 108, 0, 0, 1]
    assert joined[9:18] == [1, 2, 2, 50, 50, 51, 51, 52, 52]
    assert joined[18:] == [103, 104, 105, 109, 110, 111, 3, 3, 4, 4, 5, 5, 53, 53, 54, 54, 55, 55]


def test_layers_that_predict_further_tokens_are_left_out(files, tmp_path):
    """Files of Qwen3.5 may have such layers behind the others."""
    original = files / "qwen35.F32.gguf"
    further = {f"blk.2.{name}.weight": np.zeros((4, 16), "f4") for name in ("nextn.eh_proj", "attn_q")}
    count = {"qwen35__block_count": 3, "qwen35__nextn_predict_layers": 1}
    file = rewrite(tmp_path / "model.gguf", original, further, **count)
    assert GgufModel(file).shapes == GgufModel(original).shapes
    assert GgufModel(file).fields == GgufModel(original).fields


# Split files


@pytest.fixture(scope="module")
def parts(files, tmp_path_factory):
    """The parts of a split file, in a folder of their own."""
    return split(tmp_path_factory.mktemp("parts") / "tiny-F32.gguf", files / "llama.F32.gguf", tensors=10)


def test_any_part_names_the_whole(files, parts, monkeypatch, tmp_path):
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path / "cache"))
    assert [part.name for part in parts] == [f"tiny-F32-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    whole = GgufFile(files / "llama.F32.gguf")
    for part in parts:
        file = GgufFile(part)
        assert {tensor.file for tensor in file.tensors.values()} == set(parts)
        assert {key: value for key, value in file.metadata.items() if not key.startswith("split.")} == whole.metadata
        for name in whole.tensors:
            np.testing.assert_array_equal(file.read(name), whole.read(name), strict=True)
    folder = resolve(parts[1])
    assert folder.name.startswith("tiny-F32@")
    assert resolve(parts[0]) == resolve(parts[2]) == resolve(parts[0].parent) == folder
    assert not compare_tensors(folder, files / "llama.F32.gguf").beyond
    assert preview(parts[2]).description == preview(files / "llama.F32.gguf").description


def others(parts, files):
    """Other files in place of the last part."""
    folder = parts[0].with_name("other")
    folder.mkdir(exist_ok=True)
    return split(folder / "tiny-F32.gguf", files / "qwen2.F32.gguf", tensors=9)


@pytest.mark.parametrize(
    ("number", "content", "message"),
    [
        (2, None, "tiny-F32-00001-of-00003.gguf: missing of its 3 parts: tiny-F32-00002-of-00003.gguf; fetch all"),
        (
            3,
            lambda parts, _: parts[1],
            "00003.gguf: part 3 of 3 by its name, and part 2 of 3 by its metadata; give each",
        ),
        (2, lambda _, files: files / "llama.F32.gguf", "part 2 of 3 by its name, and a whole file by its metadata"),
        (3, lambda parts, files: others(parts, files)[2], "split.tensors.count=.*, which tiny-F32-00001-of-00003.gguf"),
    ],
)
def test_parts_that_are_missing_or_of_other_files_are_refused(files, parts, tmp_path, number, content, message):
    here = [tmp_path / part.name for part in parts]
    for source, copy in zip(parts, here, strict=True):
        shutil.copy(source, copy)
    if content is None:
        here[number - 1].unlink()
    else:
        shutil.copy(content(parts, files), here[number - 1])
    with pytest.raises(CheckpointError, match=message) as error:
        convert(here[0], tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_tensor_in_two_parts_is_refused(files, tmp_path):
    first, second = (split(tmp_path / f"{n}.gguf", files / "llama.F32.gguf", tensors=15) for n in "ab")
    content = second[0].read_bytes()
    number = b"split.no" + struct.pack("<I", gguf.GGUFValueType.UINT16)
    assert content.count(number + b"\0\0") == 1
    first[1].write_bytes(content.replace(number + b"\0\0", number + b"\1\0"))
    with pytest.raises(CheckpointError, match=r"a-00002-of-00002.gguf: .* is in a-00001-of-00002.gguf, too; fetch all"):
        GgufFile(first[0])


# What is refused


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
        ({"split__count": 3, "split__no": 1}, "a whole file by its name, and part 2 of 3 by its metadata"),
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
