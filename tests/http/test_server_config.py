"""The TOML file of a server: the options of `AsyncLLM` by their names, and anything else refused."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

pytest.importorskip("starlette")

from jaxinfer import AsyncLLM, MeshConfig
from jaxinfer.cli.serve import serve
from jaxinfer.elastic.options import ServiceOptions
from jaxinfer.generation.api.build import LoadOptions
from jaxinfer.http.config import ElasticConfig, ExpertsConfig, KVEventsConfig, ModelConfig, ServerConfig
from jaxinfer.http.config_file import ElasticTable, ModelTable, ServerFile, read_config
from jaxinfer.http.limits import Limits
from jaxinfer.hub import HubName

FILE = """
host = "::1"
port = 80
access_log = "access.jsonl"
drain_timeout = 7
otlp_endpoint = "http://localhost:4318"
keep_billing_header = true
cors_origins = ["https://chat.example"]
timeout = 5
max_body_bytes = 100

[models.demo]
path = "models/demo"
adapters = { capitals = "adapters/capitals" }
adapter_folders = ["adapters"]
mesh = { tensor = 2 }
layer_files = "layers"
disk_kv = "kv"
disk_kv_limit = "1GiB"
weights = "disk"
host_memory = "1GiB"
max_batch = 4
kv_dtype = "int8"

[models."org/name"]
path = "hf://org/name@main"
"""


def read(folder, text):
    (folder / "serve.toml").write_text(text)
    return read_config(folder / "serve.toml", api_keys=("key",))


def test_a_file(tmp_path):
    (tmp_path / "adapters").mkdir()
    config = read(tmp_path, FILE)
    assert config == ServerConfig(
        host="::1",
        port=80,
        access_log=str(tmp_path / "access.jsonl"),
        drain_timeout=7,
        otlp_endpoint="http://localhost:4318",
        keep_billing_header=True,
        limits=Limits(timeout=5, max_body_bytes=100, api_keys=("key",), cors_origins=("https://chat.example",)),
        source=str(tmp_path / "serve.toml"),
        models={
            "demo": ModelConfig(
                path=tmp_path / "models/demo",
                options={
                    "adapters": {"capitals": tmp_path / "adapters/capitals"},
                    "mesh": MeshConfig(tensor=2),
                    "layer_files": tmp_path / "layers",
                    "disk_kv": tmp_path / "kv",
                    "disk_kv_limit": "1GiB",
                    "weights": "disk",
                    "host_memory": "1GiB",
                    "max_batch": 4,
                    "kv_dtype": "int8",
                },
                adapter_folders=(tmp_path / "adapters",),
            ),
            "org/name": ModelConfig(path=HubName("org/name", "main")),
        },
    )
    demo, other = (model.load_options for model in config.models.values())
    assert (demo["path"], demo["max_waiting"], demo["max_adapters"]) == (str(tmp_path / "models/demo"), 0, 8)
    assert other == {"path": "org/name", "max_waiting": 0, "max_queue_time": 30.0}


def test_defaults_are_those_of_the_command_line():
    config, options = ServerConfig(models={"a": ModelConfig(path=Path("a"))}), inspect.signature(serve).parameters
    for name in ("host", "port", "access_log", "drain_timeout", "otlp_endpoint"):
        assert options[name].default == getattr(config, name)
    for name in ("timeout", "max_body_bytes"):
        assert options[name].default == getattr(config.limits, name)
    for name in ("max_waiting", "max_queue_time"):
        assert options[name].default == config.models["a"].load_options[name]


def test_a_table_has_every_option_that_can_be_written():
    own = {p.name for p in inspect.signature(AsyncLLM).parameters.values() if p.kind is p.KEYWORD_ONLY}
    functions = {"asleep", "logits_processors", "progress", "rules"}
    of_server = {field.name for field in dataclasses.fields(ModelConfig)} - {"options"}
    assert ModelTable.__annotations__.keys() == (LoadOptions.__annotations__.keys() | own | of_server) - functions


def test_experts_and_elastic_services(tmp_path):
    (tmp_path / "images").mkdir()
    text = """
    max_inputs = 3
    max_image_pixels = 100
    [experts.board]
    config = "board.toml"
    mode = "samba"
    image_folders = ["images"]
    [elastic.vit]
    path = "vit"
    repository = "tasks"
    dataset_folders = ["images"]
    merge_levels = [-4]
    max_batch = 2
    """
    config = read(tmp_path, text)
    assert (config.limits.max_inputs, config.limits.max_image_pixels, config.models) == (3, 100, {})
    assert config.experts == {
        "board": ExpertsConfig(config=tmp_path / "board.toml", mode="samba", image_folders=(tmp_path / "images",))
    }
    assert config.elastic == {
        "vit": ElasticConfig(
            path=tmp_path / "vit",
            repository=tmp_path / "tasks",
            dataset_folders=(tmp_path / "images",),
            options={"merge_levels": [-4], "max_batch": 2},
        )
    }


def test_a_file_has_every_field_of_a_server_but_keys():
    own = {field.name for kind in (ServerConfig, Limits) for field in dataclasses.fields(kind)}
    of_code = {"limits", "source", "api_keys", "admin_keys", "max_prompts"}
    assert ServerFile.__annotations__.keys() == own - of_code | {"model_folder"}


def test_an_elastic_table_has_every_option_that_can_be_written():
    own = {field.name for field in dataclasses.fields(ElasticConfig)} - {"options"}
    assert ElasticTable.__annotations__.keys() == (ServiceOptions.__annotations__.keys() | own) - {"policy"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port =", ":1: not TOML: "),
        ("", ": models: there are none; a server needs at least one, or a table in experts or elastic."),
        ("[models]", ": models: there are none; a server needs at least one, or a table in experts or elastic."),
        (
            "prt = 1\n[models.a]\npath = 'a'",
            ": the file: unknown field 'prt'; known: models, model_folder, ",
        ),
        ("[experts.a]\npath = 'a'", ": experts.a: unknown field 'path'; known: config, mode, image_folders"),
        ("[experts.a]\nmode = 'best'", ": experts.a: config is missing."),
        ("[experts.a]\nconfig = 'a'\nimage_folders = ['no']", ": image folder "),
        ("[elastic.a]\npath = 'a'\npolicy = 'slack'", ": elastic.a: unknown field 'policy'; known: path, repository"),
        ("[elastic.a]\npath = 'a'\ndataset_folders = ['no']", ": data set folder "),
        ("[elastic.a]\npath = 'a'\nmax_batch = 'b'", ": elastic.a.max_batch must be an integer, got 'b'."),
        ("[models.a]\npath = 'a'\n[elastic.a]\npath = 'a'", ": two models or adapters have the name 'a'"),
        ("max_inputs = 0\n[models.a]\npath = 'a'", ": max_inputs must be an integer >= 1"),
        ("[models.a]\npath = 'a'\nmax_bach = 1", ": models.a: unknown field 'max_bach'; known: "),
        ("[models.a]\nmax_batch = 1", ": models.a: path is missing."),
        ("[models.a]\npath = 'a'\nmax_batch = '1'", ": models.a.max_batch must be an integer, got '1'."),
        ("port = 0\n[models.a]\npath = 'a'", ": port must be an integer in [1, 65535], got 0."),
        ("timeout = 0\n[models.a]\npath = 'a'", ": timeout must be a finite number > 0"),
        ("[models.a]\npath = 'a'\nttl = 0", ": models.a: ttl must be a number of seconds > 0, at most 1e9"),
        ("[models.a]\npath = 'a'\nttl = 1e30", ": models.a: ttl must be a number of seconds > 0, at most 1e9"),
        ("[models.a]\npath = 'a'\non_demand = 1", ": models.a.on_demand must be True or False, got 1."),
        ("[models.a]\npath = 'a'\nadapters = { b = 1 }", ": models.a.adapters must be a table of folders by"),
        ("[models.a]\npath = 'a'\nchat_template = 'no'", ": models.a.chat_template "),
        ("[models.a]\npath = 'hf://a'", ": models.a.path must be hf://ORG/NAME"),
        ("[models.a]\npath = 'a'\nadapter_folders = ['no']", ": models.a: adapter folder "),
        ("[models.a]\npath = 'a'\nmesh = { tenor = 2 }", ": models.a.mesh: "),
        ("[models.a]\npath = 'a'\nadapters = { a = 'b' }", ": two models or adapters have the name 'a'"),
        ("[models.'']\npath = 'a'", ": the name of a model must be printable characters"),
        ("models = 3", ": models must be a table, got 3."),
        ("kv_events = 3\n[models.a]\npath = 'a'", ": kv_events must be a table, got 3."),
        (
            "[models.a]\npath = 'a'\n[kv_events]\nport = 1",
            ": kv_events: unknown field 'port'; known: endpoint, replay_",
        ),
        (
            "[models.a]\npath = 'a'\n[kv_events]\nbuffer_steps = 0",
            ": kv_events.buffer_steps must be an integer >= 1, below 2**30, got 0.",
        ),
        (
            "[models.a]\npath = 'a'\n[kv_events]\nreplay_endpoint = '*:1'",
            ": kv_events.replay_endpoint must begin with tcp:// or ipc://, got '*:1'.",
        ),
        (
            "[models.a]\npath = 'a'\n[kv_events]\nformat = 'list'",
            ': kv_events.format must be "array" or "map", got \'list\'.',
        ),
        (
            "[models.a]\npath = 'a'\n[models.b]\npath = 'b'\n[kv_events]",
            ": kv_events is for a server of one model, and there are 2: leave it out.",
        ),
        ("[models]\na = 3", ": models.a must be a table, got 3."),
    ],
)
def test_what_a_file_may_not_have(tmp_path, text, message):
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'serve.toml'}{message}")):
        read(tmp_path, text)


def test_an_empty_table_publishes_kv_events_by_default(tmp_path):
    assert read(tmp_path, "[models.a]\npath = 'a'").kv_events is None
    config = read(tmp_path, "[kv_events]\n[models.a]\npath = 'a'").kv_events
    assert config == KVEventsConfig(endpoint="tcp://*:5556", buffer_steps=10_000, format="array")


def test_the_parts_of_a_gguf_file_in_the_folder_are_one_model(tmp_path):
    folder = tmp_path / "models"
    folder.mkdir()
    for name in ("tiny-Q8_0-00002-of-00002", "tiny-Q8_0-00001-of-00002", "small"):
        (folder / f"{name}.gguf").touch()
    (tmp_path / "serve.toml").write_text(f"model_folder = '{folder}'")
    models = read_config(tmp_path / "serve.toml").models
    assert {name: model.path.name for name, model in models.items()} == {
        "small": "small.gguf",
        "tiny-Q8_0": "tiny-Q8_0-00001-of-00002.gguf",
    }


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "serve.toml").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="codec"):
        read_config(tmp_path / "serve.toml")
