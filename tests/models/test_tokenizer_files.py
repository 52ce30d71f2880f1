"""Tokenizers of Hugging Face directories: each field does what it does in transformers, or is refused."""

import json
import pathlib

import pytest
import tokenizers

from jaxinfer.checkpoints import CheckpointError
from jaxinfer.models.files import tokenizer_config
from jaxinfer.models.files.conversion import beside_weights
from jaxinfer.models.files.tokenizer_classes import class_named, class_of
from jaxinfer.models.files.tokenizer_files import FolderTokenizer, tokenizer_files
from tests.goldens.make_tokenizer_goldens import CASES, EXPECTED, FOLDERS, HARMLESS, results, vocabulary, write_folder

VOCAB = 1_000_000
GOLDENS = json.loads(EXPECTED.read_text(encoding="utf-8"))


def _read(path: pathlib.Path, model_type: str, **options) -> tokenizers.Tokenizer:
    return _loaded(tokenizer_files(path, model_type, VOCAB, **options))


def _loaded(files: dict) -> tokenizers.Tokenizer:
    content = files["tokenizer.json"]
    return tokenizers.Tokenizer.from_buffer(content if isinstance(content, bytes) else content.read_bytes())


def _edit(path: pathlib.Path, file: str, **changes) -> None:
    fields = json.loads((path / file).read_text(encoding="utf-8")) if (path / file).exists() else {}
    (path / file).write_text(json.dumps(fields | changes))


@pytest.fixture
def folder(tmp_path):
    """Write the files of a folder; returns its path and the model type."""

    def write(name: str, case: str = "base") -> tuple[pathlib.Path, str]:
        path = tmp_path / name
        return path, write_folder(name, case, path)

    return write


@pytest.mark.parametrize("name", FOLDERS)
def test_each_field_does_what_it_does_in_transformers(name, tmp_path):
    expected, wrong = GOLDENS["folders"][name], {}
    assert expected.keys() == CASES[name].keys()
    for number, case in enumerate(CASES[name]):
        path = tmp_path / str(number)
        model_type = write_folder(name, case, path)
        read = FolderTokenizer(path, model_type)
        tokenizer = _loaded(read.files(VOCAB))
        eos = next(iter(read.end_of_text), None)
        actual = results(lambda text: tokenizer.encode(text).ids, tokenizer.decode, eos)  # noqa: B023
        right = expected["base"] | expected[case]
        if actual != right:
            wrong[case] = {key: (value, right[key]) for key, value in actual.items() if value != right[key]}
    assert not wrong


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("gpt2_files", "add_bos_token=True"),
        ("gpt2", "add_prefix_space=True"),
        ("llama", "add_prefix_space=False"),
        ("bert_files", "lower, accents"),
        ("bert", "lower, accents"),
        ("bert", "tokenize_chinese_chars=False"),
        ("bert", "clean_up_tokenization_spaces=True"),
        ("plain", "added special"),
        ("plain", "added left"),
        ("plain", "eos_token=<new>"),
        ("gpt2_files", "map"),
        ("gpt2_files", "added file"),
    ],
)
def test_the_texts_tell_the_fields_apart(name, case):
    assert GOLDENS["folders"][name][case]


def test_every_known_field_is_compared():
    fields = {
        field for cases in CASES.values() for case in cases.values() for file in case.values() for field in file
    } | {field for files in FOLDERS.values() for field in files["tokenizer_config.json"]}
    assert fields >= tokenizer_config.READ
    assert set().union(*tokenizer_config.HARMLESS.values()) == HARMLESS.keys()
    assert not any(GOLDENS["folders"][name][field] for name in FOLDERS for field in HARMLESS)


@pytest.mark.parametrize("model_type", GOLDENS["classes"])
def test_the_class_is_the_one_that_transformers_takes(model_type):
    for case, name in GOLDENS["classes"][model_type].items():
        named, parts = case.split(" ", 1)
        actual = class_of(model_type, named or None, bytewise="ByteLevel" in parts)
        assert actual is class_named(name), case


@pytest.mark.parametrize(
    ("field", "value"), [("lowercase", True), ("split_special_tokens", True), ("fast_tokenizer_files", ["a.json"])]
)
def test_unknown_fields_are_refused_by_name(folder, field, value):
    path, model_type = folder("gpt2")
    _edit(path, "tokenizer_config.json", **{field: value})
    with pytest.raises(CheckpointError, match=rf"tokenizer_config\.json: {field}=.* is not implemented"):
        tokenizer_files(path, model_type, VOCAB)
    for nothing in (None, False, [], {}, ""):
        _edit(path, "tokenizer_config.json", **{field: nothing})
        assert tokenizer_files(path, model_type, VOCAB)


def test_unknown_fields_of_the_map_are_refused_unless_it_is_not_read(folder):
    path, model_type = folder("gpt2")
    _edit(path, "special_tokens_map.json", odd=1)
    with pytest.raises(CheckpointError, match=r"special_tokens_map\.json: odd=1 is not implemented"):
        tokenizer_files(path, model_type, VOCAB)
    _edit(path, "tokenizer_config.json", added_tokens_decoder={})
    assert tokenizer_files(path, model_type, VOCAB)


def test_the_corrected_pattern_of_mistral_must_be_there(folder):
    path, model_type = folder("plain")
    _edit(path, "tokenizer_config.json", fix_mistral_regex=True)
    with pytest.raises(CheckpointError, match="fix_mistral_regex=True is not implemented"):
        tokenizer_files(path, model_type, VOCAB)
    regex = (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    parts = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    _edit(path, "tokenizer.json", pre_tokenizer={"type": "Sequence", "pretokenizers": [split, parts["pre_tokenizer"]]})
    assert tokenizer_files(path, model_type, VOCAB)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"do_lower_case": "yes"}, "do_lower_case='yes' must be true or false"),
        # transformers ignores it: there is no `__type`.
        ({"image_token": {"content": "<tool>"}}, "image_token={'content': '<tool>'} is not implemented"),
        ({"eos_token": 5}, "eos_token=5 is not a token"),
        ({"eos_token": {"content": "a", "strip": True}}, "eos_token=.* is not a token"),
        ({"additional_special_tokens": "<a>"}, "extra_special_tokens='<a>' must be a list"),
        ({"model_max_length": "512"}, "model_max_length='512' must be a number"),
        ({"max_len": True}, "max_len=True must be a number"),
        ({"truncation_side": "Left"}, "truncation_side='Left' must be 'left' or 'right'"),
        ({"tokenizer_class": ["A"]}, r"tokenizer_class=\['A'\] must be a name"),
        ({"added_tokens_decoder": [1]}, r"added_tokens_decoder=\[1\] must be an object"),
        ({"added_tokens_decoder": {"x": {}}}, "added_tokens_decoder: 'x' is not an id with its token"),
        ({"added_tokens_decoder": {"7": {"special": True}}}, "7={'special': True} is not a token"),
        (
            {"added_tokens_decoder": {"7000": {"content": "<tool>"}}},
            "'<tool>' is token 7000, but the next free id of the vocabulary is 39",
        ),
    ],
)
def test_wrong_values_are_refused(folder, fields, message):
    path, model_type = folder("bert")
    _edit(path, "tokenizer_config.json", **fields)
    with pytest.raises(CheckpointError, match=rf"tokenizer_config\.json: {message}"):
        tokenizer_files(path, model_type, VOCAB)


def test_a_known_token_keeps_its_id_with_a_warning(folder, caplog):
    path, model_type = folder("bert")
    _edit(path, "tokenizer_config.json", added_tokens_decoder={"7": {"content": "[MASK]", "special": True}})
    assert _read(path, model_type).token_to_id("[MASK]") == 4
    assert "'[MASK]' is token 7, but the vocabulary has it as 4" in caplog.text


def test_the_frame_of_tokenizer_json_decides_with_a_warning(folder, caplog):
    path, model_type = folder("plain", "add_bos_token=True")
    tokenizer_files(path, model_type, VOCAB)
    assert not caplog.text
    _edit(path, "tokenizer_config.json", add_eos_token=True)
    tokenizer_files(path, model_type, VOCAB)
    assert "add_bos_token and add_eos_token do not add </s>: tokenizer.json decides" in caplog.text


@pytest.mark.parametrize("name", [name for name in FOLDERS if not name.endswith("_files")])
def test_a_tokenizer_that_nothing_changes_is_copied(folder, name):
    path, model_type = folder(name)
    assert tokenizer_files(path, model_type, VOCAB)["tokenizer.json"] == path / "tokenizer.json"


def test_tokenizer_json_decides_how_texts_are_split(folder):
    """SmolLM names GPT-2's class, and splits digits, which that class does not."""
    path, model_type = folder("gpt2")
    parts = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))["pre_tokenizer"]
    digits = {"type": "Digits", "individual_digits": True}
    _edit(path, "tokenizer.json", pre_tokenizer={"type": "Sequence", "pretokenizers": [digits, parts]})
    assert _read(path, model_type).encode("12").tokens == ["1", "2"]
    _edit(path, "tokenizer_config.json", add_prefix_space=True)
    assert _read(path, model_type).encode("he").tokens == ["Ġhe"]


def test_added_tokens_of_tokenizer_json_stay(folder):
    """A class of transformers forgets those that `added_tokens_decoder` lacks."""
    path, model_type = folder("llama")
    size = len(vocabulary(FOLDERS["llama"]))
    _edit(path, "tokenizer_config.json", added_tokens_decoder={str(size): {"content": "<tool>"}})
    assert _read(path, model_type).encode("<tool></s>", add_special_tokens=False).tokens == ["<tool>", "</s>"]


def test_special_tokens_that_only_the_class_names_are_not_added(folder):
    path, model_type = folder("llama")
    content = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    content["model"]["vocab"]["<end>"] = content["model"]["vocab"].pop("</s>")
    _edit(path, "tokenizer.json", model=content["model"], added_tokens=content["added_tokens"][:2])
    assert _read(path, model_type).token_to_id("</s>") is None


def test_older_files_of_llama_lose_their_blank(folder):
    """Llama 2's file prepends ▁ by a normalizer."""
    path, model_type = folder("llama")
    blanks = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, blanks]}
    _edit(path, "tokenizer.json", pre_tokenizer=None, normalizer=normalizer)
    assert _read(path, model_type).encode("he", add_special_tokens=False).tokens == ["▁he"]
    _edit(path, "tokenizer_config.json", add_prefix_space=False)
    tokenizer = _read(path, model_type)
    ids = tokenizer.encode(" he", add_special_tokens=False).ids
    assert (ids, tokenizer.decode(ids)) == ([tokenizer.token_to_id("▁he")], " he")
    assert tokenizer.encode("he", add_special_tokens=False).tokens == ["he"]


@pytest.mark.parametrize("name", ["bert", "plain", "gpt2_files", "qwen2"])
def test_texts_become_lower_case_first(folder, name):
    path, model_type = folder(name, "do_lower_case=False")
    tokenizer = _read(path, model_type, lowercase=True)
    assert tokenizer.encode("HE 北").ids == tokenizer.encode("he 北").ids
    assert _read(path, model_type).encode("HE").ids != tokenizer.encode("HE").ids


def test_lower_case_is_not_made_twice(folder):
    path, model_type = folder("plain")
    steps = [{"type": "NFC"}, {"type": "Lowercase"}]
    for normalizer in (steps[1], {"type": "Sequence", "normalizers": steps}):
        _edit(path, "tokenizer.json", normalizer=normalizer)
        assert tokenizer_files(path, model_type, VOCAB, lowercase=True)["tokenizer.json"] == path / "tokenizer.json"


@pytest.mark.parametrize("name", ["LlamaTokenizer", "PhobertTokenizer", "BertTokenizer"])
def test_the_class_must_be_made_from_the_vocabulary(folder, name):
    path, model_type = folder("gpt2_files")
    _edit(path, "tokenizer_config.json", tokenizer_class=name)
    with pytest.raises(CheckpointError, match=rf"tokenizer_class='{name}' is not implemented for vocab\.json without"):
        tokenizer_files(path, model_type, VOCAB)


@pytest.mark.parametrize("name", ["gpt2_files", "bert_files"])
def test_a_class_that_says_nothing_is_that_of_the_vocabulary(folder, name):
    path, model_type = folder(name)
    expected = tokenizer_files(path, model_type, VOCAB)
    _edit(path, "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    assert tokenizer_files(path, model_type, VOCAB) == expected


@pytest.mark.parametrize("merges", ["a b c\n", "a b\n"])
def test_merges_that_do_not_fit_are_refused(folder, merges):
    path, model_type = folder("gpt2_files")
    (path / "merges.txt").write_text(merges)
    (path / "vocab.json").write_text('{"a": 0, "b": 1}')
    with pytest.raises(CheckpointError, match=r"merges\.txt: 'a b( c)?' does not merge two tokens of vocab\.json"):
        tokenizer_files(path, model_type, VOCAB)


def test_all_files_that_are_read_are_fetched():
    names = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"}
    assert set(beside_weights([*names, "vocab.json", "tokenizer.model"])) == names
    older = {"vocab.json", "merges.txt", "vocab.txt", "added_tokens.json"}
    assert set(beside_weights(older)) == older
