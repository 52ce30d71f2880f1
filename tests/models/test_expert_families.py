"""Families with experts: both layouts of their tensors, what is refused before anything is read, and converting."""

import json
import pathlib
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer.checkpoints import CheckpointError
from jaxinfer.models.config import GroupScore, RouterKind, SharedMix
from jaxinfer.models.families import REFUSED, family_of, plan
from jaxinfer.models.files.conversion import HuggingFaceModel, convert
from jaxinfer.models.files.loading import load_model
from jaxinfer.models.files.preview import preview
from tests.models import goldens

MIXTRAL = ("w1", "w3", "w2")
QWEN = ("gate_proj", "up_proj", "down_proj")


def mlp_of(name: str, layer: int = -1):
    config = goldens.config_of(name)
    return config.layer(range(config.layers)[layer]).mlp


def windows_of(name: str) -> tuple[int | None, ...]:
    return tuple(kind.attention.window for kind in goldens.config_of(name).pattern)


def test_fields_of_every_family():
    mixtral = mlp_of("mixtral_awkward").moe.router
    assert (mixtral.experts, mixtral.experts_per_token, mixtral.kind) == (5, 3, RouterKind.SOFTMAX)
    assert (mixtral.normalize, mlp_of("olmoe_plain").moe.router.normalize) == (True, False)
    qwen2 = mlp_of("qwen2_moe_plain")
    assert (qwen2.hidden, qwen2.shared.hidden, qwen2.moe.shared_mix) == (8, 12, SharedMix.GATED)
    assert (qwen2.moe.router.normalize, mlp_of("qwen2_moe_awkward").moe.router.normalize) == (False, True)
    assert goldens.config_of("qwen2_moe_awkward").moe_layers == (0, 2, 3)
    assert windows_of("qwen2_moe_awkward") == (4, None, None, None)
    qwen3 = goldens.config_of("qwen3_moe_awkward")
    assert (qwen3.moe_layers, qwen3.layer(0).mlp.hidden, {*windows_of("qwen3_moe_awkward")}) == ((1, 5), 40, {4})
    glm = mlp_of("glm4_moe_awkward").moe
    assert (glm.router.kind, glm.router.group_score) == (RouterKind.SIGMOID, GroupScore.TOP_2_SUM)
    assert (glm.router.groups, glm.router.groups_per_token, glm.router.scale) == (4, 2, 0.5)
    assert (glm.router.selection_bias, glm.shared_hidden, glm.shared_mix) == (True, 16, SharedMix.ADD)
    assert goldens.config_of("glm4_moe_plain").moe_layers == (1,)
    dots = goldens.config_of("dots1_awkward")
    assert (dots.moe_layers, windows_of("dots1_awkward")) == ((2,), (None, 4, 4))
    assert mlp_of("granitemoeshared_awkward").shared is None
    exaone = goldens.config_of("exaone_moe_awkward")
    assert (exaone.moe_layers, mlp_of("exaone_moe_awkward").moe.router) == ((0, 2), glm.router)
    assert goldens.config_of("exaone_moe_plain").moe_layers == (1,)
    hunyuan = mlp_of("hy_v3_awkward")
    assert (hunyuan.bias, hunyuan.shared.bias, mlp_of("hy_v3_awkward", 1).bias) == (False, True, True)
    assert (hunyuan.shared.hidden, hunyuan.moe.router.scale) == (16, 0.5)
    ernie = mlp_of("ernie4_5_moe_awkward", 1).moe.router
    assert (ernie.kind, ernie.normalize, ernie.selection_bias) == (RouterKind.SOFTMAX, True, True)
    assert goldens.config_of("ernie4_5_moe_awkward").moe_layers == (1, 2)
    assert goldens.config_of("ernie4_5_moe_awkward").head_bias
    assert mlp_of("mellum_awkward", 1).moe is None


def other_layout(name: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same tensors with one for each expert in place of one for all, or the other way round."""
    gate, up, down = MIXTRAL if name.startswith(("mixtral", "minimax")) else QWEN
    changed = {}
    for key, tensor in tensors.items():
        module, experts, part = key.rpartition(".experts.")
        if not experts:
            changed[key] = tensor
        elif part == "gate_up_proj":
            for expert, matrix in enumerate(tensor):
                for half, rows in zip((gate, up), np.split(matrix, 2), strict=True):
                    changed[f"{module}.experts.{expert}.{half}.weight"] = rows
        elif part == "down_proj":
            changed |= {f"{module}.experts.{e}.{down}.weight": matrix for e, matrix in enumerate(tensor)}
        elif part.startswith("0."):
            count = sum(other.startswith(f"{module}.experts.") for other in tensors) // 3
            each = [[tensors[f"{module}.experts.{e}.{x}.weight"] for e in range(count)] for x in (gate, up, down)]
            changed[f"{module}.experts.gate_up_proj"] = np.concatenate([np.stack(each[0]), np.stack(each[1])], axis=1)
            changed[f"{module}.experts.down_proj"] = np.stack(each[2])
    return changed


@pytest.mark.parametrize("name", [name for name in goldens.EXPERTS if not name.startswith(("granite", "gemma4"))])
def test_both_layouts_give_the_same_leaves(name):
    """Goldens that are plain have a tensor for each expert, awkward ones one for all."""
    tensors = load_file(goldens.DIRECTORY / name / "model.safetensors")
    other = other_layout(name, tensors)
    assert any(key.endswith("experts.gate_up_proj") for key in tensors) != any(
        key.endswith("experts.gate_up_proj") for key in other
    )
    family, config = family_of(goldens.read_config(name)), goldens.config_of(name)
    leaves = goldens.combined(other, plan(family, config, {key: tensor.shape for key, tensor in other.items()}))
    golden = goldens.load(name).leaves
    assert leaves.keys() == golden.keys()
    for leaf, array in leaves.items():
        np.testing.assert_array_equal(array, golden[leaf], err_msg=leaf)


def copied(name: str, folder: pathlib.Path, **changes) -> pathlib.Path:
    """A golden with other fields and tensors (None: none), in a folder of its own."""
    shutil.copytree(goldens.DIRECTORY / name, folder)
    fields = {key: value for key, value in changes.items() if "." not in key}
    (folder / "config.json").write_text(json.dumps(goldens.read_config(name) | fields))
    tensors = load_file(folder / "model.safetensors") | {key: v for key, v in changes.items() if "." in key}
    save_file({key: v for key, v in tensors.items() if v is not None}, folder / "model.safetensors")
    return folder


EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3_moe_plain", {EXPERT: None}, r"1 missing: layers\.1\.mlp\.experts\.3\.down_proj\.weight\)"),
        ("qwen3_moe_plain", {EXPERT: np.zeros((24, 9), "f4")}, rf"1 mis-shaped: {EXPERT} is \[24, 9\], .* \[24, 8\]"),
        ("qwen3_moe_plain", {"num_local_experts": 200}, r"1164 missing: (\S+, ){11}\S+ and 1152 more; 2 mis-shaped"),
        (
            "qwen2_moe_awkward",
            {"model.layers.2.mlp.experts.down_proj": None},
            r"1 missing: layers\.2\.mlp\.experts\.down_proj\)",
        ),
        (
            "qwen2_moe_awkward",
            {"model.layers.2.mlp.experts.gate_up_proj": np.zeros((5, 16, 24), "f4")},
            r"1 mis-shaped: model\.layers\.2\.mlp\.experts\.gate_up_proj is \[5, 16, 24\], .* \[6, 16, 24\]",
        ),
        (
            "mixtral_awkward",
            {"model.layers.0.mlp.experts.gate_up_proj": None},
            r"1 missing: layers\.0\.block_sparse_moe\.experts\.gate_up_proj\)",
        ),
        (
            "granitemoe_plain",
            {"model.layers.0.block_sparse_moe.router.layer.weight": None},
            r"1 missing: layers\.0\.block_sparse_moe\.router\.layer\.weight\)",
        ),
        ("glm4_moe_plain", {"model.layers.1.mlp.gate.e_score_correction_bias": None}, "1 missing: .*correction_bias"),
        ("mixtral_plain", {"num_experts_per_tok": 5}, "experts_per_token=5 is more than experts=4"),
        ("mixtral_plain", {"num_local_experts": 0}, "RouterConfig.experts must be >= 1, got 0"),
        ("olmoe_plain", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not implemented, only None"),
        ("qwen3_moe_plain", {"decoder_sparse_step": 0}, "decoder_sparse_step=0 must be >= 1"),
        ("qwen3_moe_plain", {"mlp_only_layers": [1.5]}, r"mlp_only_layers=\[1.5\] must be a list of whole numbers"),
        ("qwen3_moe_plain", {"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ("glm4_moe_awkward", {"n_group": 3}, "groups=3 must divide experts=8"),
        ("glm4_moe_awkward", {"topk_group": 5}, "groups_per_token=5 be at most groups"),
        ("glm4_moe_awkward", {"topk_group": 1}, "have 2 experts, fewer than experts_per_token=3"),
        ("glm4_moe_awkward", {"n_group": 8, "topk_group": 4}, "top_2_sum needs groups of two experts or more"),
        ("dots1_plain", {"n_shared_experts": -1}, "n_shared_experts=-1 must be >= 0"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(name, changes, message, tmp_path):
    folder, out = copied(name, tmp_path / "hf", **changes), tmp_path / "out"
    with pytest.raises(CheckpointError, match=message) as error:
        convert(folder, out)
    assert "\n" not in str(error.value)
    assert not out.exists()


@pytest.mark.parametrize("model_type", REFUSED)
def test_families_that_are_not_implemented_say_what_is_missing(model_type, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (message,) = preview(tmp_path).refused
    assert message.startswith(f"config.json: model_type={model_type!r} is not implemented; missing: ")
    assert all(part in message for part in REFUSED[model_type])


def test_what_predicts_further_tokens_is_left_out(tmp_path):
    further = {"model.layers.46.eh_proj.weight": np.zeros((24, 48), "f4"), "model.layers.46.mlp.x": np.zeros(1, "f4")}
    HuggingFaceModel(copied("glm4_moe_plain", tmp_path / "hf", **further))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "qwen2_moe_awkward" else pytest.mark.slow) for name in goldens.EXPERTS],
)
def test_a_converted_checkpoint_gives_the_golden_s_logits(name, tmp_path):
    convert(goldens.DIRECTORY / name, tmp_path / name)
    golden, model = goldens.load(name), load_model(tmp_path / name)
    logits, _ = goldens.forward_by_layers(model.graphdef, model.state, golden.tokens, golden.positions)
    atol = 1e-3 if name in goldens.WITH_STATES else 1e-4  # as in test_parity.py
    np.testing.assert_allclose(np.asarray(logits)[golden.positions >= 0], golden.expected, atol=atol, rtol=0)
