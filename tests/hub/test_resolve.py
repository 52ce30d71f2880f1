"""Models of a hub: what is fetched, converted once, and asked for again; and what is refused before it is fetched."""

import json
import os
import resource
import socket
import stat
import time

import huggingface_hub.constants as constants
import pytest
from safetensors.numpy import load_file, save
from typer.testing import CliRunner

from jaxinfer import LLM
from jaxinfer.checkpoints import CheckpointError
from jaxinfer.cli import app
from jaxinfer.elastic import ElasticError, Service
from jaxinfer.experts.config import SystemConfig
from jaxinfer.experts.errors import ConfigError
from jaxinfer.experts.opened import OpenedSystem
from jaxinfer.hub import HubError, look_at, repository, resolve
from jaxinfer.models.files.conversion import convert
from jaxinfer.models.files.verification import compare_tensors
from tests.hub.server import COMMIT, files_of
from tests.models.sentences import CASES_FILE, write_case

NAME = "org--tiny@0123456789ab.3"


def _run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def _folders(tmp_path):
    return [path.name for path in (tmp_path / "cache" / "models").glob("[!.]*")]


def test_fetches_what_is_needed_and_converts_once(hub, tiny, tmp_path):
    others = ("pytorch_model.bin", "modeling_tiny.py", "onnx/model.onnx", "original/model.safetensors", "README.md")
    hub.repositories["org/tiny"] |= dict.fromkeys(others, b"x") | {"generation_config.json": b'{"eos_token_id": 3}'}
    folder = resolve("org/tiny")
    assert folder == tmp_path / "cache" / "models" / NAME
    assert hub.fetched == ["config.json", "generation_config.json", "model.safetensors"]
    assert compare_tensors(folder, tiny).max_abs_diff == 0
    assert json.loads((folder / "source.json").read_text()) == {"repository": "org/tiny", "commit": COMMIT}

    hub.requests.clear()
    assert resolve("org/tiny") == folder
    assert hub.requests == ["org/tiny"]  # which commit `main` means
    assert resolve(f"org/tiny@{COMMIT}") == folder
    assert hub.requests == ["org/tiny"]


def test_a_new_commit_is_fetched_and_the_old_one_stays(hub, tmp_path):
    first = resolve("org/tiny")
    hub.commit = "f" * 40
    assert resolve("org/tiny") == first.with_name("org--tiny@ffffffffffff.3")
    assert resolve(f"org/tiny@{COMMIT}") == first
    assert len(_folders(tmp_path)) == 2


def test_a_sentence_encoder_is_fetched_with_its_modules(hub, tmp_path):
    goldens = json.loads(CASES_FILE.read_text())
    case = next(case for case in goldens["cases"] if case["name"] == "dense_Tanh")
    local = tmp_path / "sentences"
    local.mkdir()
    write_case(local, goldens, case)
    files = {file.relative_to(local).as_posix(): file.read_bytes() for file in local.rglob("*") if file.is_file()}
    hub.repositories["org/sentences"] = files | {"onnx/model.safetensors": b"x"}
    assert look_at("org/sentences").description.config == convert(local, tmp_path / "local").config
    folder = resolve("org/sentences")
    assert sorted(hub.fetched) == sorted(files)
    assert compare_tensors(folder, local).max_abs_diff == 0
    assert resolve(local) != folder

    del hub.repositories["org/sentences"]["2_Dense/model.safetensors"]
    hub.commit = "f" * 40
    with pytest.raises(HubError, match=r"has no 2_Dense/model\.safetensors: pickles can run code"):
        resolve("org/sentences")


def test_fetches_the_shards_that_the_index_lists(hub, tiny):
    tensors = load_file(tiny / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-1-of-2.safetensors": names[:3], "model-2-of-2.safetensors": names[3:]}
    files = {file: save({name: tensors[name] for name in part}) for file, part in parts.items()}
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    del hub.repositories["org/tiny"]["model.safetensors"]
    hub.repositories["org/tiny"] |= {
        **files,
        "model.safetensors.index.json": json.dumps(index).encode(),
        "consolidated.safetensors": b"x",
    }
    assert compare_tensors(resolve("org/tiny"), tiny).max_abs_diff == 0
    assert hub.fetched == ["config.json", "model.safetensors.index.json", *files]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.json": b"{}", "pytorch_model.bin": b"x"}, "only pytorch_model.bin; pickles can run code"),
        ({"tiny.Q4_K.gguf": b"x", "tiny.Q8_0.gguf": b"x"}, "2 models as GGUF files; there are :Q4_K, :Q8_0. Name one"),
        ({"unet/model.safetensors": b"x"}, "it is a pipeline of several models"),
        ({"README.md": b"x"}, "no safetensors in its top folder, and no other weights; name a repository of a model"),
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}, "a LoRA adapter"),
        ({"config.json": b'{"model_type": "t5"}', "model.safetensors": b"x"}, "model_type='t5' is not implemented"),
        ({"config.json": b'{"model_type": "bert"}', "model.safetensors": b"x"}, "config.json: "),
        ({"a.safetensors": b"x", "b.safetensors": b"x"}, "2 safetensors files, but neither"),
    ],
)
def test_what_holds_no_model_is_refused_before_its_weights_are_fetched(hub, tmp_path, files, message):
    hub.repositories["org/other"] = files
    with pytest.raises(HubError, match=r"^org/other") as error:
        resolve("org/other")
    assert message in str(error.value)
    assert set(hub.fetched) <= {"config.json"}
    assert _folders(tmp_path) == []


def test_a_tokenizer_that_is_none_is_refused_before_the_weights_are_fetched(hub):
    hub.repositories["org/tiny"]["tokenizer.json"] = b"{}"
    hub.repositories["org/tiny"]["vocab.json"] = b"{}"
    with pytest.raises(HubError, match=r"^org/tiny@0123456789ab/tokenizer.json: not a tokenizer"):
        resolve("org/tiny")
    assert hub.fetched == ["config.json", "tokenizer.json"]


def test_an_index_cannot_name_other_files(hub, tiny):
    del hub.repositories["org/tiny"]["model.safetensors"]
    index = {"weight_map": {"a": "../../x.safetensors", "b": "pytorch_model.bin"}}
    hub.repositories["org/tiny"] |= {
        "model.safetensors.index.json": json.dumps(index).encode(),
        "pytorch_model.bin": b"x",
        "x.safetensors": b"x",
    }
    with pytest.raises(HubError, match=r"lists \.\./\.\./x\.safetensors, pytorch_model\.bin, which"):
        resolve("org/tiny")
    assert set(hub.fetched) == {"config.json", "model.safetensors.index.json"}


def test_too_little_room_is_said_before_the_weights_are_fetched(hub):
    hub.sizes["model.safetensors"] = 10**16
    needs = r"org/tiny@0123456789ab: downloading and converting its weights needs 20000000\.00 GB in .* are free"
    with pytest.raises(HubError, match=needs):
        resolve("org/tiny")
    assert hub.fetched == ["config.json"]


def test_a_connection_that_ends_is_taken_up_where_it_ended(hub, tiny, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    hub.cut = [10_000, 5_000]
    assert compare_tensors(resolve("org/tiny"), tiny).max_abs_diff == 0
    ranges = [request.partition("safetensors")[2].strip() for request in hub.requests if "GET" in request]
    assert ranges[1:] == ["", "10000-", "15000-"]


def test_files_that_were_fetched_are_not_fetched_again(hub, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    assert _run("convert", "org/tiny", "out").exit_code == 2
    assert hub.requests == []  # an occupied directory is refused first
    for out in ("first", "second"):
        done = _run("convert", "org/tiny", out, "--quantize", "int8")
        assert (done.exit_code, done.stdout) == (0, f"{out}: llama decoder, int8, from org/tiny@{COMMIT}\n")
    assert hub.fetched == ["config.json", "model.safetensors"]


def test_info_fetches_no_weights(hub, tmp_path):
    hub.repositories["org/tiny"] |= {"generation_config.json": b"{}", "tokenizer.json": b"x", "README.md": b"x"}
    done = _run("info", "org/tiny")
    assert done.exit_code == 0, done.output
    assert "llama (decoder)" in done.stdout
    assert f"org/tiny@{COMMIT}" in done.stdout
    assert hub.fetched == ["config.json", "generation_config.json"]
    assert _folders(tmp_path) == []
    hub.down = True
    assert "llama (decoder)" in _run("info", f"org/tiny@{COMMIT}").stdout  # as it was fetched


def test_info_says_all_that_a_repository_lacks(hub, tiny):
    config = json.loads((tiny / "config.json").read_text()) | {"hidden_act": "mish"}
    hub.repositories["org/old"] = {"config.json": json.dumps(config).encode(), "pytorch_model.bin": b"x"}
    done = _run("info", "org/old")
    assert done.exit_code == 1
    assert "- config.json: hidden_act='mish' is not implemented" in done.stdout
    assert "- org/old has no safetensors in its top folder, only pytorch_model.bin" in done.stdout
    hub.repositories["org/none"] = {"README.md": b"x"}
    assert "org/none has no safetensors in its top folder" in _run("info", "org/none").stderr


def test_the_command_line_takes_names(hub, tmp_path):
    done = _run("convert", "org/tiny")
    folder = tmp_path / "cache" / "models" / NAME
    assert done.stdout == f"{folder}: llama decoder, float32, from org/tiny@{COMMIT}\n"
    assert f"org/tiny@{COMMIT}" in _run("info", "org/tiny").stdout
    verified = _run("verify", "org/tiny", "--reference", "org/tiny")
    assert "15 tensors, max abs diff 0" in verified.stdout
    refused = _run("convert", "org/tiny", "--quantize", "int8")
    assert refused.stderr == (
        "error: --dtype, --quantize and --layout need an OUT_DIR: the cache keeps models as they are stored.\n"
    )


def test_python_takes_names(hub, tiny):
    with LLM("org/tiny", max_batch=1) as llm:
        assert llm.model.name == NAME
    with LLM(tiny, max_batch=1) as llm:  # a Hugging Face directory is converted likewise
        assert llm.model.name.startswith("llama_llama3@")


def test_tasks_are_not_kept_in_the_cache(hub):
    with pytest.raises(ElasticError, match="give `repository`, a folder to keep tasks in"):
        Service.from_checkpoint("org/tiny")
    assert hub.requests == []


SYSTEM = """
[experts.fetched]
checkpoint = "hf://org/resnet"
[experts.missing]
checkpoint = "org/resnet"
[[inputs]]
kind = "board"
expert = "fetched"
[[executors]]
expert_memory = "1MB"
"""


def test_experts_are_fetched_where_the_file_says_so(hub, tiny, tmp_path):
    hub.repositories["org/resnet"] = files_of(tiny.parent / "vision" / "resnet_basic")
    (tmp_path / "system.toml").write_text(SYSTEM)
    system = OpenedSystem(SystemConfig.read("system.toml"))
    assert system.experts["fetched"].opened.name == "org--resnet@0123456789ab.3"
    assert list(system.broken) == ["missing"]  # a path that is not there is not asked for
    assert hub.requests.count("org/resnet") == 1
    (tmp_path / "system.toml").write_text(SYSTEM.replace("hf://org/resnet", "hf://resnet"))
    with pytest.raises(ConfigError, match=r"experts\.fetched\.checkpoint must be hf://ORG/NAME, .* got 'hf://resnet'"):
        SystemConfig.read("system.toml")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/none", "org/none: no such folder here, and no such repository at {url}; correct the name, or, if it is"),
        ("org/tiny@v9", "org/tiny has no revision 'v9'; see {url}/org/tiny/commits"),
        ("org/gated", "org/gated is gated: accept its licence at {url}/org/gated, and log in with `hf auth login`"),
        ("org/a--b", "org/a--b: no such folder here, and not a valid repository name: "),
    ],
)
def test_what_the_hub_refuses_is_one_line(hub, tiny, name, message):
    hub.repositories["org/gated"] = files_of(tiny)
    hub.gated = {"org/gated"}
    done = _run("info", name)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: " + message.format(url=hub.url))
    assert len(done.stderr.splitlines()) == 1


def _refused_quickly(name: str) -> str:
    start = time.monotonic()
    with pytest.raises(HubError) as error:
        resolve(name)
    assert time.monotonic() - start < 15
    assert "(`hf download org/tiny --local-dir DIR`) and name DIR here" in str(error.value)
    return str(error.value)


def test_no_network_is_one_line_that_says_how_to_fetch_by_hand(hub, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    assert f"org/tiny: {url} does not answer; check the network" in _refused_quickly("org/tiny")


def test_a_network_that_is_silent_is_given_up(hub, monkeypatch):
    monkeypatch.setattr(repository, "ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert "does not answer" in _refused_quickly("org/tiny")


def test_a_hub_that_is_down_is_one_line(hub):
    hub.down = True
    assert "org/tiny: the hub answered 503; try again later" in _refused_quickly("org/tiny")


def test_a_converted_model_needs_no_network(hub, monkeypatch, caplog):
    folder = resolve("org/tiny")
    hub.down = True
    assert resolve("org/tiny") == folder
    assert caplog.messages == [
        "The hub does not answer: org/tiny is taken as it was when it last did, at 0123456789ab."
    ]
    caplog.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "nowhere")
    assert resolve("org/tiny") == folder
    assert caplog.messages == []


def _as_in_the_hubs_cache(tmp_path, files):
    """Write the cache that other libraries have written."""
    folder = tmp_path / "hf" / "hub" / "models--org--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "blobs").mkdir()
    (folder / "snapshots" / COMMIT).mkdir(parents=True)
    for number, (name, content) in enumerate(files.items()):
        (folder / "blobs" / str(number)).write_bytes(content)
        (folder / "snapshots" / COMMIT / name).symlink_to(f"../../blobs/{number}")


def test_offline_the_hubs_cache_is_converted(hub, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE forbids downloads" in _refused_quickly("org/tiny")
    _as_in_the_hubs_cache(tmp_path, files_of(tiny))
    assert compare_tensors(resolve("org/tiny"), tiny).max_abs_diff == 0
    assert resolve(f"org/tiny@{COMMIT}") == resolve("org/tiny")
    assert hub.requests == []


def test_offline_a_cache_in_part_is_refused(hub, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    _as_in_the_hubs_cache(tmp_path, {"config.json": (tiny / "config.json").read_bytes()})
    assert "no model.safetensors and no model.safetensors.index.json" in _refused_quickly("org/tiny")


def test_a_folder_goes_before_a_repository(hub, tmp_path, tiny):
    _run("convert", tiny, tmp_path / "org" / "tiny")
    assert str(resolve("org/tiny")) == "org/tiny"
    assert hub.requests == []


def test_a_folder_is_converted_again_when_its_files_change(hub, tiny, tmp_path):
    for name, content in files_of(tiny).items():
        (tmp_path / name).write_bytes(content)
    folder = resolve(tmp_path)
    assert resolve(tmp_path) == folder
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    assert resolve(tmp_path) != folder


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothere", "nothere: no such directory; name a model directory, a Hugging Face directory, a GGUF file"),
        ("org/na me", "org/na me: no such directory"),
        ("org/file", "org/file: a file, not a model directory"),
        ("org/model.gguf", "org/model.gguf: not a GGUF file"),
        ("org", "org/model.gguf: not a GGUF file"),
        ("org/nothere.gguf", "org/nothere.gguf: no such file"),
    ],
)
def test_paths_without_a_model_are_refused(hub, tmp_path, path, message):
    (tmp_path / "org").mkdir()
    for name in ("file", "model.gguf"):
        (tmp_path / "org" / name).touch()
    with pytest.raises(CheckpointError, match=f"^{message}"):
        resolve(path)
    assert hub.requests == []


def test_a_full_disk_is_one_line_and_leaves_nothing(hub, tmp_path):
    hub.repositories["org/tiny"]["model.safetensors"] += bytes(1 << 20)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        done = _run("convert", "org/tiny", "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "org/tiny: model.safetensors: [Errno 27] File too large" in done.stderr
    assert not list((tmp_path / "hf").rglob("*.incomplete"))
    assert not (tmp_path / "out").exists()


def test_models_are_the_users_alone(hub, tmp_path):
    folder = resolve("org/tiny")
    models = folder.parent
    assert stat.S_IMODE(models.stat().st_mode) == 0o700
    models.chmod(0o777)  # another user could have put a model there
    with pytest.raises(
        CheckpointError, match=r"models was open to other users, who may have changed what is in it. It"
    ):
        resolve("org/tiny")
    assert resolve("org/tiny") == folder  # closed, and the user has decided
    elsewhere = models.rename(tmp_path / "disk")
    models.symlink_to(elsewhere)
    assert resolve("org/tiny") == folder
