"""Mixtures of experts: their fields, and their tensors in the two layouts that checkpoints have."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxinfer.checkpoints.manifest import part_name
from jaxinfer.models.config import DecoderConfig, GroupScore, MlpConfig, MoeConfig, RouterConfig, RouterKind
from jaxinfer.models.families import llama
from jaxinfer.models.families.fields import Fields, refuse
from jaxinfer.models.families.mapping import Source, alternate, alternate_from_fused, linear, only

_DENSE, _SPARSE = "dense", "sparse"
"""The kinds of MLPs that `mlp_layer_types` names."""


def with_experts(
    config: DecoderConfig, moe: MoeConfig, *, hidden: int | None = None, sparse: Sequence[bool] = ()
) -> DecoderConfig:
    """Return the config with a mixture of experts in place of its MLP, whose biases only the shared MLP has.

    Args:
      hidden: width of an expert; None: that of the MLP.
      sparse: which layers have experts, and not the MLP; empty: all.
    """
    dense = config.layer(0).mlp
    moe = dataclasses.replace(moe, shared_bias=dense.bias and moe.shared_hidden > 0)
    experts = dataclasses.replace(dense, hidden=dense.hidden if hidden is None else hidden, bias=False, moe=moe)
    return config.with_mlps([experts if has else dense for has in sparse or [True]])


def sparse_layers(fields: Fields, default: Sequence[bool]) -> list[bool]:
    """List which layers have experts, and not an MLP: by `mlp_layer_types` or, without it, the family's default."""
    kinds = fields.per_layer("mlp_layer_types", len(default)) or [_SPARSE if has else _DENSE for has in default]
    if unknown := sorted({str(kind) for kind in kinds} - {_DENSE, _SPARSE}):
        refuse(f"config.json: mlp_layer_types contains {unknown}, not implemented; known: {_DENSE}, {_SPARSE}.")
    return [kind == _SPARSE for kind in kinds]


def with_deepseek_experts(config: DecoderConfig, fields: Fields, *, first_dense: int, normalize: bool) -> DecoderConfig:
    """Return the config with experts as in DeepSeek V3 (arXiv:2412.19437, section 2.1.2), all but the first layers.

    Args:
      first_dense: the default of how many layers come first that have an MLP.
      normalize: the default of whether the weights of a token's experts are divided by their sum.
    """
    router = RouterConfig(
        experts=fields.integer("n_routed_experts", "num_local_experts", "num_experts"),
        experts_per_token=fields.integer("num_experts_per_tok"),
        kind=RouterKind.SIGMOID,
        normalize=fields.flag("norm_topk_prob", default=normalize),
        scale=fields.number("routed_scaling_factor", "router_scaling_factor", default=1.0),
        selection_bias=True,
        groups=fields.integer("n_group", default=1),
        groups_per_token=fields.integer("topk_group", default=1),
        group_score=GroupScore.TOP_2_SUM,
    )
    hidden, first = (
        fields.integer("moe_intermediate_size"),
        fields.integer("first_k_dense_replace", default=first_dense),
    )
    shared = fields.integer("n_shared_experts", "num_shared_experts", default=1, least=0)
    sparse = sparse_layers(fields, [layer >= first for layer in range(config.layers)])
    return with_experts(config, MoeConfig(router=router, shared_hidden=hidden * shared), hidden=hidden, sparse=sparse)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """A family's names of the tensors of a layer's experts.

    Attributes:
      router: the matrix that scores the experts.
      selection_bias: what is added to the scores for the choice.
      parts: gate, up and down of one expert, with its number as {}; None: no checkpoint has experts one by one.
      fused: gate and up of all experts, [E, 2F, D] with all gates of an expert before its ups; down, [E, D, F].
      shared: the MLP of all tokens.
      shared_fused: its gate and up in one, and its down; None: it has three tensors.
      shared_gate: what that is gated by.
    """

    router: str = "mlp.gate"
    selection_bias: str = "mlp.gate.e_score_correction_bias"
    parts: tuple[str, str, str] | None = (
        "mlp.experts.{}.gate_proj.weight",
        "mlp.experts.{}.up_proj.weight",
        "mlp.experts.{}.down_proj.weight",
    )
    fused: tuple[str, str] = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    shared: str = "mlp.shared_expert"
    shared_fused: tuple[str, str] | None = None
    shared_gate: str = "mlp.shared_expert_gate"


def sources(
    config: DecoderConfig, names: ExpertNames = ExpertNames(), *, rotates_pairs: bool = False
) -> dict[str, Source]:
    """The tensors of a Llama-like model with gated experts without biases in some or all layers.

    rotates_pairs: as for `llama.sources`.
    """
    sources = llama.sources(config, rotates_pairs=rotates_pairs)
    for layer in config.moe_layers:
        sources |= _layer_sources(f"layers.{layer}", config.layer(layer).mlp, config.embed, names)
    return sources


def _layer_sources(layer: str, mlp: MlpConfig, embed: int, names: ExpertNames) -> dict[str, Source]:
    assert mlp.moe is not None
    router, leaf = mlp.moe.router, f"{layer}.mlp"
    sources = linear(f"{leaf}.router", (f"{layer}.{names.router}",), (router.experts,), embed, bias=False)
    if router.selection_bias:
        bias = Source((f"{layer}.{names.selection_bias}",), ((router.experts,),), only)
        sources[f"{leaf}.router.selection_bias"] = bias
    for expert in range(router.experts):
        gate_up, down = _expert_sources(layer, expert, mlp, embed, names)
        sources[part_name(f"{leaf}.experts.gate_up.weight", expert)] = gate_up
        sources[part_name(f"{leaf}.experts.down.weight", expert)] = down
    if mlp.shared is not None:
        sources |= _shared_sources(layer, mlp.shared, embed, names)
    if gates := mlp.moe.shared_mix.gates:
        sources |= linear(f"{leaf}.shared_gate", (f"{layer}.{names.shared_gate}",), (gates,), embed, bias=False)
    return sources


def _shared_sources(layer: str, mlp: MlpConfig, embed: int, names: ExpertNames) -> dict[str, Source]:
    leaf, module, width = f"{layer}.mlp.shared", f"{layer}.{names.shared}", mlp.hidden
    if names.shared_fused is None:
        inner, rows, combine = (f"{module}.gate_proj", f"{module}.up_proj"), (width, width), alternate
        down = f"{module}.down_proj"
    else:
        inner, rows, combine = (f"{module}.{names.shared_fused[0]}",), (2 * width,), alternate_from_fused
        down = f"{module}.{names.shared_fused[1]}"
    sources = linear(f"{leaf}.gate_up", inner, rows, embed, bias=mlp.bias, combine=combine)
    return sources | linear(f"{leaf}.down", (down,), (embed,), width, bias=mlp.bias)


def _expert_sources(layer: str, expert: int, mlp: MlpConfig, embed: int, names: ExpertNames) -> tuple[Source, Source]:
    """One expert's gate and up, and its down: of tensors of its own, or of those of all experts."""
    assert mlp.moe is not None
    count, hidden = mlp.moe.router.experts, mlp.hidden

    def of_all(name: str, shape: tuple[int, ...], combine: Callable[..., np.ndarray]) -> Source:
        return Source((f"{layer}.{name}",), ((count, *shape),), combine, index=expert)

    gate_up = of_all(names.fused[0], (2 * hidden, embed), alternate_from_fused)
    down = of_all(names.fused[1], (embed, hidden), only)
    if names.parts is None:
        return gate_up, down
    each = [f"{layer}.{part.format(expert)}" for part in names.parts]
    return (
        Source((each[0], each[1]), ((hidden, embed),) * 2, alternate, instead=gate_up),
        Source((each[2],), ((embed, hidden),), only, instead=down),
    )
