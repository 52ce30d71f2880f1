"""LoRA adapters on our linears: the same numbers as merging them into Hugging Face's tensors, and every refusal."""

import json
import math

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer.generation.lora.adapter_info import AdapterInfo
from jaxinfer.generation.lora.peft import adapter_shapes, read_adapter
from jaxinfer.models import WeightFormat
from jaxinfer.models.config import Activation
from jaxinfer.models.families import FAMILIES, Source, family_of, plan
from tests.models import goldens
from tests.peft import random_pair, save_adapter
from tests.tiny import CONFIG, HYBRID

RANK = 3
KINDS = (
    *("attention.qkv", "attention.out", "attention.gate", "mlp.gate_up", "mlp.down"),
    *(f"delta_rule.{linear}" for linear in ("qkv", "gate", "steps", "out")),
)


def sources_of(name: str):
    """A golden's family, config and tensors (float32), and the sources of the linears that can be adapted."""
    hf = goldens.read_config(name)
    tensors = load_file(goldens.DIRECTORY / name / "model.safetensors")
    tensors = {key: tensor.astype(np.float32) for key, tensor in tensors.items()}
    family = family_of(hf)
    config = family.config(hf)
    sources = plan(family, config, {key: tensor.shape for key, tensor in tensors.items()})
    linears = {f"layers.{i}.{kind}" for i in range(config.layers) for kind in KINDS}
    adapted = {name: sources[f"{name}.weight"] for name in linears if f"{name}.weight" in sources}  # experts are not
    return hf["model_type"], config, tensors, adapted


def pairs_for(tensors: dict, sources: dict[str, Source], *, conv1d: bool, fraction: float = 1.0, rank: int = RANK):
    """Random pairs for a fraction of the projections, by their modules' names."""
    rng = np.random.default_rng(0)
    pairs = {}
    for key in sorted({key for source in sources.values() for key in source.names}):
        outputs, inputs = tensors[key].shape[:: -1 if conv1d else 1]
        if rng.random() < fraction:
            pairs[key.removesuffix(".weight")] = random_pair(outputs, inputs, rank, rng)
    return pairs


def merged(tensors: dict, pairs: dict, scale_of, *, conv1d: bool) -> dict:
    """The tensors with every delta added, each in the layout it is stored in."""
    found = dict(tensors)
    for module, (a, b) in pairs.items():
        delta = scale_of(module) * (b @ a)
        found[f"{module}.weight"] = tensors[f"{module}.weight"] + (delta.T if conv1d else delta)
    return found


def assert_deltas(adapter, sources, before, after):
    """Each linear's weight and its delta are the weight converted from the merged tensors."""
    for name, source in sources.items():
        weight, wanted = (source.combine(*(tensors[key] for key in source.names)) for tensors in (before, after))
        if name in adapter.layers:
            a, b = adapter.layers[name]
            assert a.dtype == b.dtype == np.float32
            weight = weight + b @ a
        np.testing.assert_allclose(weight, wanted, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("fraction", [1.0, 0.4])
@pytest.mark.parametrize("name", goldens.FEATURES["LoRA"])
def test_weights_become_those_of_the_merged_model(name, fraction, tmp_path):
    family, config, tensors, sources = sources_of(name)
    conv1d = family == "gpt2"
    pairs = pairs_for(tensors, sources, conv1d=conv1d, fraction=fraction)
    folder = save_adapter(tmp_path, pairs, lora_alpha=6, fan_in_fan_out=conv1d)
    adapter = read_adapter(folder, family, config)
    assert_deltas(adapter, sources, tensors, merged(tensors, pairs, lambda _: 6 / RANK, conv1d=conv1d))
    adapted = {
        name for name, source in sources.items() if any(key.removesuffix(".weight") in pairs for key in source.names)
    }
    assert adapter.layers.keys() == adapted


def test_goldens_cover_every_decoder_family():
    covered = {sources_of(name)[0] for name in goldens.DECODERS}
    encoders = {"bert", "distilbert", "roberta"}
    vision = {"deit", "dinov2", "dinov2_with_registers", "resnet", "siglip", "siglip_vision_model", "vit"}
    alone = {kind for kind in FAMILIES if kind.endswith("_text") and kind.removesuffix("_text") in covered}  # the same
    assert covered == FAMILIES.keys() - encoders - vision - (alone - covered)


@pytest.mark.parametrize("name", ["llama_llama3", "gpt2_tied", "phi3_partial", "qwen3_5_plain", "qwen3_next_plain"])
def test_shapes_are_those_of_the_model_s_linears_and_of_padded_adapters(name, tmp_path):
    family, config, tensors, sources = sources_of(name)
    shapes = adapter_shapes(family, config, 5)
    leaves = goldens.leaf_shapes(goldens.abstract(config, WeightFormat()))
    assert shapes.keys() == sources.keys()
    conv1d = family == "gpt2"
    folder = save_adapter(tmp_path, pairs_for(tensors, sources, conv1d=conv1d), fan_in_fan_out=conv1d)
    exact, padded = read_adapter(folder, family, config), read_adapter(folder, family, config, max_rank=5)
    assert (exact.max_rank, padded.max_rank) == (RANK, 5)
    for linear, (a_shape, b_shape) in shapes.items():
        assert (b_shape[0], a_shape[1]) == leaves[f"{linear}.weight"]
        a, b = padded.layers[linear]
        assert (a.shape, b.shape) == (a_shape, b_shape)
        blocks = a.reshape(-1, 5, a.shape[1])
        assert len(blocks) == len(sources[linear].names)
        np.testing.assert_array_equal(blocks[:, :RANK].reshape(-1, a.shape[1]), exact.layers[linear].a)
        assert not blocks[:, RANK:].any()
        assert not b.reshape(len(b), -1, 5)[:, :, RANK:].any()
        np.testing.assert_allclose(b @ a, exact.layers[linear].b @ exact.layers[linear].a, atol=1e-5)
    assert padded.nbytes == 4 * sum(math.prod(shape) for both in shapes.values() for shape in both)


@pytest.mark.parametrize("rank_stabilized", [False, True])
def test_patterns_set_rank_and_alpha_of_the_modules_they_match(rank_stabilized, tmp_path):
    family, config, tensors, sources = sources_of("llama_llama3")
    pairs = pairs_for(tensors, sources, conv1d=False)
    first = "model.layers.0.self_attn.q_proj"
    rng = np.random.default_rng(1)
    for module in pairs:
        if module.endswith("v_proj") or module == first:
            pairs[module] = random_pair(len(pairs[module][1]), config.embed, 5 if module == first else 2, rng)
    folder = save_adapter(
        tmp_path,
        pairs,
        r=RANK,
        use_rslora=rank_stabilized,
        rank_pattern={f"^{first}": 5, "v_proj": 2, "_proj": 9},  # the last one matches no whole name
        alpha_pattern={r"layers\.1\.mlp\.(gate|up)_proj": 2.5},
    )

    def scale(module: str) -> float:
        rank = {5: 5, 2: 2}.get(len(pairs[module][0]), RANK)
        alpha = 2.5 if "layers.1.mlp" in module and "down" not in module else 8
        return alpha / (math.sqrt(rank) if rank_stabilized else rank)

    info = AdapterInfo.read(folder)
    assert info.rank == 9
    assert info.rank_of(first) == 5
    assert info.rank_of(f"model.{first}") == RANK  # not where ^ says
    adapter = read_adapter(folder, family, config)
    assert_deltas(adapter, sources, tensors, merged(tensors, pairs, scale, conv1d=False))


def test_a_config_alone_is_enough_to_say_what_an_adapter_is(tmp_path):
    save_adapter(
        tmp_path, {"model.layers.0.mlp.up_proj": random_pair(48, 32, 4, np.random.default_rng(0))}, lora_alpha=16
    )
    (tmp_path / "adapter_model.safetensors").unlink()
    info = AdapterInfo.read(tmp_path)
    assert (info.folder, info.rank, info.alpha) == (tmp_path, 4, 16.0)
    assert info.scale_of("model.layers.0.mlp.up_proj") == 4.0


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def edit_tensors(folder, change):
    """Rewrite the adapter's tensors: change(name, tensor) gives the new name and tensor, or None to drop it."""
    file = folder / "adapter_model.safetensors"
    kept = [found for name, tensor in load_file(file).items() if (found := change(name, tensor)) is not None]
    save_file(dict(kept), file)


Q, UP = "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.up_proj"


@pytest.fixture
def folder(tmp_path, rng):
    """An adapter of two projections for the model of `tests.tiny`, which a test may change."""
    return save_adapter(tmp_path / "adapter", {Q: random_pair(32, 32, 4, rng), UP: random_pair(48, 32, 4, rng)})


def test_spellings_and_dtypes_of_the_tensors(folder):
    plain = read_adapter(folder, "llama", CONFIG)
    edit_tensors(folder, lambda name, tensor: (name.replace(".weight", ".default.weight"), tensor))
    for_base = read_adapter(folder, "llama", CONFIG)
    edit_tensors(
        folder, lambda name, tensor: (name.replace("model.model.model.", "model.model."), tensor)
    )  # of AutoModel
    without_prefix = read_adapter(folder, "llama", CONFIG)
    edit_tensors(folder, lambda name, tensor: (name, tensor.astype(ml_dtypes.bfloat16)))
    halves = read_adapter(folder, "llama", CONFIG)
    assert plain.layers.keys() == {"layers.0.mlp.gate_up", "layers.1.attention.qkv"}
    for linear, pair in plain.layers.items():
        for other in (for_base, without_prefix):
            np.testing.assert_array_equal(pair.a, other.layers[linear].a)
            np.testing.assert_array_equal(pair.b, other.layers[linear].b)
        assert halves.layers[linear].b.dtype == np.float32
        np.testing.assert_allclose(pair.b, halves.layers[linear].b, rtol=2**-8)


def test_a_family_of_the_author_s_takes_llama_s_names_if_they_fit(folder):
    own, llama = read_adapter(folder, "tiny", CONFIG), read_adapter(folder, "llama", CONFIG)
    assert all((own.layers[linear].b == llama.layers[linear].b).all() for linear in llama.layers)
    config = CONFIG.with_mlp(activation=Activation.RELU, gated=False)
    assert read_adapter(folder, "tiny", config).layers["layers.0.mlp.gate_up"].b.shape == (48, 4)
    with pytest.raises(
        ValueError, match=r"family='gpt2': this model's mlp\.gate_up has 96 outputs, h\.0\.mlp\.c_fc.* have 48: .*gpt2"
    ):
        read_adapter(folder, "gpt2", CONFIG)
    with pytest.raises(
        ValueError, match=r"family='tiny': it names no tensors of delta_rule\.qkv, which layer 0 .*llama"
    ):
        read_adapter(folder, "tiny", HYBRID)


# What is refused.


def refuses(folder, message, *, family="llama", **options):
    with pytest.raises(ValueError, match=message) as error:
        read_adapter(folder, family, CONFIG, **options)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "LOHA"}, r"adapter_config\.json: peft_type='LOHA' is not implemented, only 'LORA'"),
        ({"peft_type": None}, r"adapter_config\.json: .*peft_type"),
        ({"bias": "lora_only"}, "bias='lora_only' is not implemented, only 'none'"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4' is not implemented, only True"),
        ({"use_dora": True}, "use_dora=True is not implemented; train"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] is not implemented"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"layer_replication": [[0, 2]]}, r"layer_replication=\[\[0, 2\]\]"),
        ({"trainable_token_indices": [3]}, r"trainable_token_indices=\[3\]"),
        ({"of_a_later_version": 0.5}, "of_a_later_version=0.5 is not implemented"),
        ({"fan_in_fan_out": True}, r"fan_in_fan_out=True, but this model's weights are stored \[outputs, inputs\]"),
        ({"r": 0}, r"adapter_config\.json: .*>= 1.*\$\.r"),
        ({"r": "4"}, r"adapter_config\.json: Expected `int`, got `str` - at `\$\.r`"),
        ({"rank_pattern": {"q_proj": 0}}, r"rank_pattern"),
        ({"rank_pattern": {"(": 4}}, r"adapter_config\.json: missing \)"),
        ({"rank_pattern": {"q_proj": 2}}, r"q_proj\.lora_A is \[4, 32\], but this model and rank 2 need \[2, 32\]"),
    ],
    ids=str,
)
def test_configs(folder, fields, message):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    refuses(folder, message)


def test_weights_of_gpt2_are_stored_the_other_way_around(tmp_path):
    family, config, tensors, sources = sources_of("gpt2_tied")
    folder = save_adapter(tmp_path, pairs_for(tensors, sources, conv1d=True), fan_in_fan_out=False)
    with pytest.raises(ValueError, match=r"fan_in_fan_out=False, but .* stored \[inputs, outputs\]"):
        read_adapter(folder, family, config)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        ("model.layers.0.self_attn.qkv_proj", (64, 32)),  # Phi-3's
        ("model.layers.2.self_attn.q_proj", (32, 32)),  # behind the last layer
        ("model.layers.0.input_layernorm", (32, 32)),
        ("model.embed_tokens", (257, 32)),
        ("lm_head", (257, 32)),
    ],
)
def test_modules_that_are_no_linear_of_a_layer(tmp_path, rng, module, shape):
    folder = save_adapter(tmp_path, {module: random_pair(*shape, 4, rng)})
    refuses(
        folder,
        rf"adapter_model\.safetensors: {module} is not a linear of this model's 2 layers; .*mlp\.down_proj, .*"
        r"self_attn\.q_proj.*: use .* without embeddings and output head",
    )


@pytest.mark.parametrize("module", ["conv1d", "norm", "in_proj_qkvz"])
def test_modules_that_are_no_linear_of_a_delta_rule(tmp_path, rng, module):
    folder = save_adapter(tmp_path, {f"model.layers.0.linear_attn.{module}": random_pair(56, 32, 4, rng)})
    names = ", ".join(rf"linear_attn\.{part}" for part in ("in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z"))
    with pytest.raises(ValueError, match=rf"linear_attn\.{module} is not a linear of .* may name {names}, .*out_proj"):
        read_adapter(folder, "qwen3_5", HYBRID)


@pytest.mark.parametrize(
    ("side", "shape", "wanted"),
    [
        ("A", (4, 31), [4, 32]),  # another model's inputs
        ("B", (33, 4), [32, 4]),  # another model's outputs
        ("B", (32, 3), [32, 4]),  # another rank than A
        ("A", (5, 32), [4, 32]),  # another rank than the config's
        ("A", (4, 32, 1), [4, 32]),  # a convolution's
    ],
)
def test_shapes_that_do_not_fit(folder, side, shape, wanted):
    name = f"base_model.model.{Q}.lora_{side}.weight"
    edit_tensors(folder, lambda key, old: (key, np.zeros(shape, np.float32) if key == name else old))
    message = f"{Q}.lora_{side} is {list(shape)}, but this model and rank 4 need {wanted}"
    refuses(folder, message.replace("[", r"\[").replace("]", r"\]"))


@pytest.mark.parametrize("side", ["A", "B"])
def test_half_a_pair(folder, side):
    edit_tensors(folder, lambda name, old: None if name == f"base_model.model.{Q}.lora_{side}.weight" else (name, old))
    refuses(folder, rf"{Q} has no lora_{side}; save the adapter again")


@pytest.mark.parametrize(
    "name", ["lora_embedding_A", "lora_magnitude_vector", "lora_A.other.weight", "lora_B.bias", "weight"]
)
def test_tensors_that_are_no_pair(folder, name):
    def change(key, tensor):
        return (f"base_model.model.{Q}.{name}", tensor) if key.endswith("q_proj.lora_A.weight") else (key, tensor)

    edit_tensors(folder, change)
    refuses(folder, rf"base_model\.model\.{Q}\.{name} is not implemented, only the matrices lora_A and lora_B")


def test_the_same_projection_twice(folder):
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {name.replace("weight", "default.weight"): old for name, old in tensors.items()}, file)
    refuses(folder, r"lora_[AB].*weight appears twice")
    save_file(tensors | {name.replace("model.layers", "layers"): old for name, old in tensors.items()}, file)
    refuses(folder, r"layers\.\d\.[a-z_.]+_proj appears twice")


def test_files_that_cannot_be_read(folder, tmp_path):
    file = folder / "adapter_model.safetensors"
    content = file.read_bytes()
    save_file({}, file)
    refuses(folder, r"adapter_model\.safetensors: contains no tensors")
    file.write_bytes(content[:-10])
    refuses(folder, r"adapter_model\.safetensors: truncated or corrupt")
    file.unlink()
    refuses(folder, r"adapter_model\.safetensors: no such file; .*safe_serialization=True")
    (folder / "adapter_config.json").write_text("[")
    refuses(folder, r"adapter_config\.json: not a JSON object")
    refuses(tmp_path / "none", r"adapter_config\.json: no such file; name a folder that PEFT")


def test_integers(folder):
    edit_tensors(folder, lambda name, old: (name, old.astype(np.int8)))
    refuses(folder, r"lora_A has dtype int8, which is not implemented; save it as a float")


def test_ranks_beyond_the_reserved(folder):
    refuses(folder, "rank 4 is more than the 3 that are reserved; raise max_lora_rank to 4", max_rank=3)
