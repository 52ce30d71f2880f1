"""Tensors of mixtures of experts, in the two layouts that checkpoints have: one for each expert, or one for all."""

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxinfer.models.config import MlpConfig
from jaxinfer.models.families.mapping import Source, alternate, alternate_from_fused, linear, only


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """A family's names of the tensors of a layer's experts, after the name of their module.

    Attributes:
      gate, up, down: of one expert.
      router: the matrix that scores the experts.
      selection_bias: what is added to the scores for the choice.
      shared: the MLP of all tokens, with the linears of `gate`, `up` and `down`.
      shared_gate: what that is gated by.
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate"
    selection_bias: str = "gate.e_score_correction_bias"
    shared: str = "shared_expert"
    shared_gate: str = "shared_expert_gate"


def expert_sources(leaf: str, module: str, mlp: MlpConfig, embed: int, names: ExpertNames) -> dict[str, Source]:
    """Return the leaves of a gated mixture of experts without biases.

    Either each expert has tensors of its own, MODULE.experts.3.down_proj.weight, or all are in two,
    MODULE.experts.gate_up_proj [E, 2F, D] with all gates of an expert before its ups, and down_proj [E, D, F].

    Args:
      leaf: our module, "layers.0.mlp".
      module: theirs.
      mlp: of the layer.
      embed: width of the model.
      names: of the tensors.
    """
    assert mlp.moe is not None
    router, count, hidden = mlp.moe.router, mlp.moe.router.experts, mlp.hidden
    sources = linear(f"{leaf}.router", (f"{module}.{names.router}",), (count,), embed, bias=False)
    if router.selection_bias:
        sources[f"{leaf}.router.selection_bias"] = Source((f"{module}.{names.selection_bias}",), ((count,),), only)
    for expert in range(count):
        theirs = f"{module}.experts.{expert}"
        gate, up, down = (f"{theirs}.{part}.weight" for part in (names.gate, names.up, names.down))
        sources[f"{leaf}.experts.gate_up.weight.{expert}"] = Source(
            (gate, up),
            ((hidden, embed),) * 2,
            alternate,
            instead=_of_all(f"{module}.experts.gate_up_proj", (count, 2 * hidden, embed), expert, alternate_from_fused),
        )
        sources[f"{leaf}.experts.down.weight.{expert}"] = Source(
            (down,),
            ((embed, hidden),),
            only,
            instead=_of_all(f"{module}.experts.down_proj", (count, embed, hidden), expert, only),
        )
    if mlp.shared is not None:
        width, shared = mlp.shared.hidden, f"{module}.{names.shared}"
        gate, up, down = (f"{shared}.{part}" for part in (names.gate, names.up, names.down))
        sources |= linear(f"{leaf}.shared.gate_up", (gate, up), (width, width), embed, bias=False, combine=alternate)
        sources |= linear(f"{leaf}.shared.down", (down,), (embed,), width, bias=False)
        if gates := mlp.moe.shared_mix.gates:
            sources |= linear(f"{leaf}.shared_gate", (f"{module}.{names.shared_gate}",), (gates,), embed, bias=False)
    return sources


def _of_all(name: str, shape: tuple[int, ...], expert: int, combine: Callable[..., np.ndarray]) -> Source:
    """Return the matrix of one expert in a tensor of all."""
    return Source((name,), (shape,), combine, index=expert)
