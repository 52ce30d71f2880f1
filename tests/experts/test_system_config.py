"""What a config file may say; what it may not is one error that names the file and the field."""

import pytest

from jaxinfer.experts.config import ExecutorOptions, ExpertConfig, SystemConfig
from jaxinfer.experts.errors import ConfigError
from jaxinfer.experts.scheduling.experts import InputKind, Rule
from jaxinfer.sharding import MeshConfig

FILE = """
mode = "paper"
host_memory = "1MiB"
max_batch = 4
policy = {prefetch = 1}

[experts.resistor]
checkpoint = "models/resistor"
[experts.joint]
checkpoint = "/elsewhere/joint"
pinned = true
image_size = [32, 48]

[[inputs]]
kind = "R"
expert = "resistor"
share = 0.5

[[rules]]
expert = "resistor"
verdict = "ok"
next = "joint"
probability = 0.9

[[executors]]
name = "gpu"
expert_memory = "2GB"
activation_memory = 1000
count = 2
[[executors]]
device = "cpu:0"
expert_memory = 5
"""


def read(tmp_path, text, **options):
    (tmp_path / "board.toml").write_text(text)
    return SystemConfig.read(tmp_path / "board.toml", **options)


def test_a_file(tmp_path):
    config = read(tmp_path, FILE)
    resistor, joint = config.experts
    assert (resistor.checkpoint, resistor.pinned) == (tmp_path / "models/resistor", False)
    assert (str(joint.checkpoint), joint.pinned, joint.image_size) == ("/elsewhere/joint", True, (32, 48))
    assert config.inputs == (InputKind(name="R", expert="resistor", share=0.5),)
    assert config.rules == (Rule(expert="resistor", verdict="ok", next="joint", probability=0.9),)
    assert config.executors == (
        ExecutorOptions(name="gpu-0", expert_memory=2 * 10**9, activation_memory=1000),
        ExecutorOptions(name="gpu-1", expert_memory=2 * 10**9, activation_memory=1000),
        ExecutorOptions(name="executor-1", device="cpu:0", expert_memory=5),
    )
    assert (config.host_memory, config.max_batch, config.max_waiting) == (1 << 20, 4, None)
    assert (config.policy.evict, config.policy.prefetch) == ("two_stage", 1)
    assert read(tmp_path, FILE, mode="samba").policy.evict == "lru"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('mode = "paper"', 'mode = "papier"', "mode='papier' is not known; known: samba"),
        ('mode = "paper"', 'mod = "paper"', "the file: unknown field 'mod'; known: experts, inputs, executors"),
        ("pinned = true", "pined = true", "experts.joint: unknown field 'pined'; known: checkpoint, pinned, usage"),
        ('kind = "R"', 'kinds = "R"', "inputs.0: unknown field 'kinds'; known: kind, expert, share"),
        ("[[rules]]", "[[rule]]", "the file: unknown field 'rule'"),
        ('next = "joint"', 'next = "join"', "leads to 'join', which is no expert; known: joint, resistor"),
        ("prefetch = 1", "prefetches = 1", "a policy has no prefetches"),
        ("prefetch = 1", 'prefetch = "all"', r"Policy.prefetch must be an integer in \[0, 64\], got 'all'"),
        ("prefetch = 1", "prefetch = 99", r"Policy.prefetch must be an integer in \[0, 64\], got 99"),
        ("prefetch = 1", 'evict = "newest"', "Policy.evict must be 'two_stage' or .*, got 'newest'"),
        ('host_memory = "1MiB"', 'host_memory = "much"', "host_memory must be bytes or a size"),
        ('host_memory = "1MiB"', "host_memory = -1", "host_memory must be bytes or a size .*, got -1"),
        ("max_batch = 4", "max_batch = 0", "max_batch must be an integer >= 1, .*, got 0"),
        ("max_batch = 4", "max_waiting = 0", "max_waiting must be an integer >= 1, .*, got 0"),
        ("pinned = true", "usage = -1", "experts.joint.usage must be a finite number >= 0 or None, got -1"),
        ("pinned = true", "usage = nan", "experts.joint.usage must be a finite number >= 0 or None, got nan"),
        ("pinned = true", "tokens = 0", "experts.joint.tokens must be an integer >= 1, .*, got 0"),
        (
            "[32, 48]",
            "[0, 48]",
            r"experts.joint.image_size must be height and width, .*, got \(0, 48\)",
        ),
        ("[32, 48]", "[32]", "length 2"),
        ('checkpoint = "models/resistor"', "", "missing required field `checkpoint`"),
        (
            "policy = {",
            "mesh = {data = 2, tensr = 2}\npolicy = {",
            r"\[mesh\]: unknown field 'tensr'; known: data, pipeline",
        ),
        (
            "policy = {",
            "mesh = {data = 0}\npolicy = {",
            r"\[mesh\]: MeshConfig.data must be an integer >= 1, .*, got 0",
        ),
        ("policy = {", "mesh = 4\npolicy = {", r"Expected `object \| null`, got `int` - at `\$.mesh`"),
        (
            "policy = {",
            "mesh = {data = 2}\npolicy = {",
            "executors.executor-1.device='cpu:0': with a mesh every executor uses all of its devices; remove device",
        ),
        ("count = 2", "count = 0", "executors: count must be at least 1, got 0"),
        ('expert_memory = "2GB"', 'expert_memory = "2 apples"', "expert_memory must be bytes or a size"),
        ("activation_memory = 1000", 'activation_memory = "x"', "activation_memory must be bytes or a size"),
    ],
)
def test_errors_name_file_and_field(tmp_path, old, new, message):
    assert old in FILE
    with pytest.raises(ConfigError, match=f"board.toml: .*{message}"):
        read(tmp_path, FILE.replace(old, new, 1))


def test_a_mesh(tmp_path):
    assert read(tmp_path, FILE).mesh is None
    text = FILE.replace('device = "cpu:0"', "") + "[mesh]\ndata = 2\ntensor = 4\n"
    assert read(tmp_path, text).mesh == MeshConfig(data=2, tensor=4)


def test_no_such_file(tmp_path):
    with pytest.raises(ConfigError, match=r"none.toml: No such file or directory; name a TOML file"):
        SystemConfig.read(tmp_path / "none.toml")
    (tmp_path / "board.toml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"board\.toml: "):
        SystemConfig.read(tmp_path / "board.toml")


def test_a_system_needs_some_of_each():
    given = {
        "experts": (ExpertConfig(name="a", checkpoint="a"),),
        "inputs": (InputKind(name="a", expert="a"),),
        "executors": (ExecutorOptions(name="x", expert_memory=1),),
    }
    for name in given:
        with pytest.raises(ConfigError, match=f"{name}: there are none"):
            SystemConfig(**{**given, name: ()})
    with pytest.raises(ConfigError, match="two have the name 'a'"):
        SystemConfig(**{**given, "experts": given["experts"] * 2})
    with pytest.raises(ConfigError, match="host_memory must be an integer >= 0"):
        SystemConfig(**given, host_memory=-1)


def test_what_is_no_toml_is_named_with_its_line(tmp_path):
    for text, line in (("max_batch = 2\nx = [\n", 2), ("x = [\nmode = 3", 2), ("mode =\n", 1), ("a = 1\na = 2\n", 2)):
        with pytest.raises(ConfigError, match=rf"board.toml:{line}: not TOML: "):
            read(tmp_path, text)
