"""GGUF files of a hub by their tags: which one is chosen, what is fetched, and what is refused, with a list."""

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from jaxinfer.cli import app
from jaxinfer.hub import HubError, HubName, look_at, repository, resolve
from jaxinfer.hub.gguf import choose
from jaxinfer.models.files.preview import preview
from jaxinfer.models.files.verification import compare_tensors
from tests.gguf_files import extract, split
from tests.hub.server import COMMIT, files_of

FILES = [
    *("README.md", "mmproj-F16.gguf", "tiny-imatrix.gguf", "mtp-tiny-Q8_0.gguf"),
    *("tiny-Q4_K_M.gguf", "tiny-UD-Q4_K_XL.gguf", "tiny.IQ2_XXS.gguf", "tiny-f16.gguf"),
    *(f"Q8_0/tiny-Q8_0-{number:05}-of-00002.gguf" for number in (2, 1)),
    *("BF16/tiny-BF16-00001-of-00002.gguf", "a/other-Q6_K.gguf", "b/tiny-Q6_K.gguf", "special.gguf"),
]


def chosen(tag, files=FILES):
    return choose(HubName("org/tiny", tag=tag), files)


@pytest.mark.parametrize(
    ("tag", "files"),
    [
        ("Q4_K_M", ["tiny-Q4_K_M.gguf"]),
        ("q4_k_m", ["tiny-Q4_K_M.gguf"]),
        ("UD-Q4_K_XL", ["tiny-UD-Q4_K_XL.gguf"]),
        ("IQ2_XXS", ["tiny.IQ2_XXS.gguf"]),
        ("F16", ["tiny-f16.gguf"]),
        ("Q8_0", ["Q8_0/tiny-Q8_0-00001-of-00002.gguf", "Q8_0/tiny-Q8_0-00002-of-00002.gguf"]),
    ],
)
def test_a_tag_means_the_file_whose_name_ends_with_it(tag, files):
    assert chosen(tag) == files


THERE = (
    "there are :BF16, :IQ2_XXS, :Q4_K_M, :Q8_0, :UD-Q4_K_XL, :f16, a/other-Q6_K.gguf, b/tiny-Q6_K.gguf, special.gguf"
)


@pytest.mark.parametrize(
    ("tag", "files", "message"),
    [
        ("Q4_K", FILES, f"org/tiny:Q4_K: no GGUF file has the tag Q4_K; {THERE}. Name one by its tag; or download a"),
        ("Q6_K", FILES, f"org/tiny:Q6_K: 2 GGUF files have the tag Q6_K; {THERE}. Name one"),
        ("", FILES, f"org/tiny: it has 9 models as GGUF files; {THERE}. Name one"),
        (
            "BF16",
            FILES,
            "org/tiny:BF16: the repository lacks BF16/tiny-BF16-00002-of-00002.gguf, of 2 parts; choose another",
        ),
        ("Q8_0", ["model.safetensors"], "org/tiny:Q8_0: no GGUF file has the tag Q8_0; there are none."),
    ],
)
def test_other_tags_are_refused_with_a_list(tag, files, message):
    with pytest.raises(HubError) as error:
        chosen(tag, files)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_without_a_tag_the_only_one_is_meant():
    assert chosen("", ["README.md", "model.gguf", "mmproj-model-f16.gguf"]) == ["model.gguf"]


@pytest.fixture
def tagged(hub, tmp_path):
    """A hub with one model in two formats, of which one is split; and the file of the other."""
    folder = tmp_path / "files"
    whole = extract("llama.BF16.gguf", folder)
    (folder / "Q8_0").mkdir()
    split(folder / "Q8_0" / "tiny-Q8_0.gguf", extract("llama.F16.gguf", folder), tensors=15)
    (folder / "llama.F16.gguf").unlink()
    hub.repositories["org/tiny"] = {**files_of(folder), "README.md": b"x", "config.json": b"{}"}
    return whole


def test_a_tagged_file_is_fetched_and_converted_once(hub, tagged, tmp_path):
    folder = resolve("org/tiny:bf16")
    assert folder == tmp_path / "cache" / "models" / "org--tiny--BF16@0123456789ab.3"
    assert hub.fetched == ["llama.BF16.gguf"]
    assert not compare_tensors(folder, tagged).beyond
    assert json.loads((folder / "source.json").read_text()) == {
        "repository": "org/tiny",
        "commit": COMMIT,
        "tag": "BF16",
    }
    hub.requests.clear()
    assert resolve("org/tiny:bf16") == resolve(f"org/tiny@{COMMIT}:bf16") == look_at("org/tiny:bf16") == folder
    assert hub.requests == ["org/tiny"] * 2


def test_all_parts_of_a_split_file_are_fetched(hub, tagged):
    with pytest.raises(HubError, match=r"org/tiny: it has 2 models as GGUF files; there are :BF16, :Q8_0\. Name one"):
        resolve("org/tiny")
    assert hub.fetched == []
    done = CliRunner().invoke(app, ["convert", "org/tiny:Q8_0", "out"])
    assert done.stdout == f"out: llama decoder, float16, from org/tiny@{COMMIT}:Q8_0\n"
    assert hub.fetched == [f"Q8_0/tiny-Q8_0-{number:05}-of-00002.gguf" for number in (1, 2)]
    assert look_at("org/tiny:Q8_0").source == f"org/tiny@{COMMIT}:Q8_0"
    hub.down = True
    assert look_at(f"org/tiny@{COMMIT}:Q8_0").description  # as it was fetched


def test_a_look_fetches_the_header_alone(hub, tagged, monkeypatch):
    monkeypatch.setattr(repository, "HEADER_BYTES", 1024)
    hub.cut = [8192]  # the header goes on
    with pytest.raises(HubError, match=r"org/tiny:BF16: llama\.BF16\.gguf: http://.* does not answer"):
        look_at("org/tiny:BF16")
    hub.cut = [16384]  # no more of the file is sent
    seen = look_at("org/tiny:BF16")
    assert hub.cut == []
    assert seen == dataclasses.replace(preview(tagged), source=f"org/tiny@{COMMIT}:BF16")


def test_a_look_at_a_split_file_fetches_all_headers(hub, tagged):
    seen = look_at("org/tiny:Q8_0")
    assert hub.fetched == [f"Q8_0/tiny-Q8_0-{number:05}-of-00002.gguf" for number in (1, 2)]
    assert (seen.description.dtype, seen.refused) == ("float16", ())


def test_a_look_at_a_file_that_is_not_supported_says_why(hub, tagged):
    hub.repositories["org/tiny"] = {"other-F16.gguf": b"GGUF" + b"x" * 100}
    (reason,) = look_at("org/tiny:F16").refused
    assert reason.startswith("org/tiny@0123456789ab:F16/other-F16.gguf: version 2021161080 of GGUF")
