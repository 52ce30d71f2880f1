import jax
import pytest
from jax.sharding import AxisType

from jaxinfer.sharding import MeshConfig, MeshFile, ShardingRules, read_mesh


def test_builds_over_the_first_devices():
    mesh = MeshConfig(tensor=6).build()
    assert dict(mesh.shape) == {"data": 1, "pipeline": 1, "expert": 1, "tensor": 6}
    assert list(mesh.devices.flat) == jax.devices()[:6]
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_builds_over_given_devices():
    assert list(MeshConfig(tensor=2).build(jax.devices()[4:6]).devices.flat) == jax.devices()[4:6]
    with pytest.raises(ValueError, match=r"^mesh tensor=2 needs 2 devices, and there are 3: lower tensor\.$"):
        MeshConfig(tensor=2).build(jax.devices()[:3])


def test_too_few_devices():
    with pytest.raises(ValueError, match=r"needs 64 devices, and there are 8: .*set JAX_NUM_CPU_DEVICES=64"):
        MeshConfig(tensor=64).build()


def test_parse():
    assert MeshConfig.parse("tensor=2, data=1") == MeshConfig(tensor=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensor=two", "MeshConfig.tensor must be an integer >= 1, below .*, got 'two'"),
        ("tensor=0", "got 0"),
        ("tensor", "got ''"),
        ("tensro=2", "unknown field 'tensro'; known: data, pipeline"),
        ("tensor=2,tensor=4", "tensor is given twice"),
        ("pipeline=two", "MeshConfig.pipeline must be an integer >= 1, below .*, got 'two'"),
    ],
)
def test_parse_refuses(text, message):
    with pytest.raises(ValueError, match=message) as error:
        MeshConfig.parse(text)
    assert f"mesh {text!r}" in str(error.value)


def test_read(tmp_path):
    (tmp_path / "mesh.toml").write_text("[mesh]\ndata = 1\ntensor = 4\n")
    assert read_mesh(tmp_path / "mesh.toml") == MeshFile(mesh=MeshConfig(tensor=4))


def test_read_with_rules(tmp_path):
    text = '[mesh]\ntensor = 4\n[rules]\nmlp = ["tensor"]\nvocab = []\nheads = "tensor"\n'
    (tmp_path / "mesh.toml").write_text(text)
    rules = ShardingRules(mlp=("tensor",), vocab=None, heads="tensor", kv_heads="tensor")
    assert read_mesh(tmp_path / "mesh.toml") == MeshFile(mesh=MeshConfig(tensor=4), rules=rules)


def test_read_with_memory(tmp_path):
    (tmp_path / "mesh.toml").write_text('[memory]\nweights = "disk"\n')
    assert read_mesh(tmp_path / "mesh.toml") == MeshFile(memory={"weights": "disk"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[mesh]\ntensro = 2", "unknown field 'tensro'"),
        ("[mesh]\npipeline = 0", "MeshConfig.pipeline must be an integer >= 1, below .*, got 0"),
        ("[mesh]\ntensor = true", "tensor must be an integer >= 1, below .*, got True"),
        ("[mesh]\ntensor = 2.0", "got 2.0"),
        ("[mesh]\ntensor =", "not valid TOML"),
        ("[mesh]\nténsor = 2", "not valid TOML"),  # in Latin-1
        (
            "[mesh]\n[other]\n",
            r"and optionally \[rules\] and \[memory\]; found \['mesh', 'other'\]",
        ),
        ("[rules]\n", r"expected a table \[mesh\]"),
        ("mesh = 2", r"expected a table \[mesh\]"),
        ("[mesh]\n[rules]\nhedas = 'tensor'", r"\[rules\]: unknown axis 'hedas'; known: vocab, heads, kv_heads, mlp"),
        ("[mesh]\n[rules]\nbatch = 'tensor'", r"\[rules\]: unknown axis 'batch'"),
        (
            "[mesh]\ntensor = 2\n[rules]\nmlp = ['pipeline', 'tensor']",
            r"ShardingRules.mlp=\('pipeline', 'tensor'\): devices along 'pipeline' hold different layers",
        ),
        ("[mesh]\n[rules]\nvocab = 'tensro'", r"ShardingRules.vocab='tensro': 'tensro' is not a mesh axis"),
        (
            "[mesh]\n[rules]\nheads = 'data'",
            r"\[rules\]: ShardingRules.heads='data': devices along 'data' serve different requ",
        ),
        ("[mesh]\n[rules]\nexchange = 'ragged'", r"\[rules\]: ShardingRules.exchange must be one of .*; got 'ragged'"),
        ("[mesh]\n[rules]\nexchange = 2", "exchange must be one of .*; got 2"),
        ("[mesh]\n[rules]\nexchange = ['pcc']", r"exchange must be one of .*; got \('pcc',\)"),
        ("[mesh]\n[rules]\nexperts = ['expert', 'data']", "must list 'data' first"),
        ("[mesh]\ndata = 0", "MeshConfig.data must be an integer >= 1, below .*, got 0"),
        ("[mesh]\ndata = 1.5", "MeshConfig.data must be an integer >= 1, below .*, got 1.5"),
        ("[mesh]\n[rules]\nembed = 'tensor'", r"\[rules\]: unknown axis 'embed'"),
        (
            "[mesh]\n[rules]\nmlp = 2",
            r"\[rules\]: ShardingRules.mlp must be a mesh axis, a tuple of them, or None; got 2",
        ),
        (
            "[mesh]\n[rules]\nheads = []\nkv_heads = ['expert', 'tensor']",
            r"\[rules\]: ShardingRules.heads=None and kv_heads=\('expert', 'tensor'\) must be equal",
        ),
    ],
)
def test_read_refuses_and_names_the_file(tmp_path, text, message):
    file = tmp_path / "mesh.toml"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=message) as error:
        read_mesh(file)
    assert str(file) in str(error.value)
