"""LoRA adapters in PEFT's layout, converted to our fused linears.

A LoRA adapter (arXiv:2106.09685) adds a product of two thin matrices to a linear: y = x W^T + (x A^T) B^T. PEFT
writes one pair for each projection of the original model; here several projections are one linear, with its outputs
in another order. The adapter of a linear made of P projections stacks their A, and gives the B of each its own block
of columns, with the rows in our order. One pair then computes the deltas of all P projections.

Start at `read_adapter`. Linears are named as on disk, without `.weight`: `layers.0.attention.qkv`.
"""

import dataclasses
import hashlib
import math
import os
import pathlib
import re
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from jaxinfer.checkpoints import CheckpointError
from jaxinfer.generation.lora.adapter_info import CONFIG, AdapterInfo
from jaxinfer.models.config import DecoderConfig, DeltaRuleConfig
from jaxinfer.models.families import FAMILIES, Family, llama

WEIGHTS = "adapter_model.safetensors"


class LowRank(NamedTuple):
    """The product that an adapter adds to one linear [N, K]: x -> (x a^T) b^T.

    Attributes:
      a: float32 [R, K].
      b: float32 [N, R], with the adapter's scale multiplied in.
    """

    a: np.ndarray
    b: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Adapter:
    """An adapter for one model, on the host.

    Attributes:
      info: its config.
      max_rank: the rank reserved for each projection of a linear: R = max_rank * projections, unused columns zero.
      layers: the product added to each linear, by its name; other linears stay as they are.
      digest: equal for adapters that compute the same.
    """

    info: AdapterInfo
    max_rank: int
    layers: Mapping[str, LowRank]
    digest: bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.nbytes + b.nbytes for a, b in self.layers.values())


def adapter_shapes(
    family: str, config: DecoderConfig, max_rank: int
) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
    """The shapes of `LowRank.a` and `LowRank.b` for every linear that an adapter can change.

    Embeddings, the output head and mixtures of experts are excluded. Arguments and errors are those of `read_adapter`.
    """
    shapes = {}
    for name, linear in _linears(family, config).items():
        rank = max_rank * len(linear.tensors)
        shapes[name] = (rank, linear.inputs), (len(linear.order), rank)
    return shapes


def read_adapter(
    folder: str | os.PathLike[str], family: str, config: DecoderConfig, *, max_rank: int | None = None
) -> Adapter:
    """Read `adapter_config.json` and `adapter_model.safetensors`, as PEFT's `save_pretrained` writes them.

    Args:
      folder: the adapter.
      family: Hugging Face's `model_type` of the model; it decides the names of the projections. Any other family has
        Llama's names (q_proj, k_proj, v_proj, o_proj, gate_proj if the MLP is gated, up_proj, down_proj).
      config: the model's config.
      max_rank: the rank reserved for each projection; None: the adapter's largest rank.

    Raises CheckpointError if the adapter asks for more than plain LoRA, does not fit the model or `max_rank`, or is
    damaged; ValueError if the family's names do not fit the model.
    """
    info = AdapterInfo.read(folder)
    max_rank = info.rank if max_rank is None else max_rank
    info.require_rank(max_rank)
    linears = _linears(family, config)
    _require_same_storage(info, any(linear.inputs_first for linear in linears.values()))
    pairs = _read_pairs(info, _family(family), config, linears)
    layers = {}
    for name, linear in linears.items():
        if not pairs.keys().isdisjoint(linear.tensors):
            layers[name] = _fuse(linear, pairs, max_rank)
    return Adapter(info=info, max_rank=max_rank, layers=layers, digest=_digest(pairs))


# The model's side: the projections of each linear.


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Linear:
    """One linear and the projections it is made of.

    Attributes:
      tensors: the weights of the projections, by the names in the family's sources. Several linears may be made of
        parts of one projection.
      outputs: the number of outputs of each projection.
      inputs: the number of inputs, the same for all.
      order: int [N], for each of our outputs its index in the outputs of all projections, one after another.
      inputs_first: whether the weights are stored [inputs, outputs].
    """

    tensors: tuple[str, ...]
    outputs: tuple[int, ...]
    inputs: int
    order: np.ndarray
    inputs_first: bool


def _family(family: str) -> Family:
    return FAMILIES.get(family, llama.FAMILY)


def _linears(family: str, config: DecoderConfig) -> dict[str, _Linear]:
    """Describe every linear that can be adapted."""
    sources, linears = _family(family).sources(config), {}
    for layer in range(config.layers):
        for kind, (rows, inputs) in _shapes(config, layer).items():
            if (source := sources.get(f"layers.{layer}.{kind}.weight")) is None:
                raise _misfit(family, f"it names no tensors of {kind}, which layer {layer} of this model has")
            outputs = tuple(math.prod(shape) // inputs for shape in source.shapes)
            numbers = np.split(np.arange(sum(outputs)), np.cumsum(outputs)[:-1])
            order = source.combine(*numbers)  # it reorders vectors as it reorders the rows of weights
            if len(order) != rows:
                names = ", ".join(source.names)
                raise _misfit(family, f"this model's {kind} has {rows} outputs, {names} have {len(order)}")
            linears[f"layers.{layer}.{kind}"] = _Linear(
                tensors=source.names,
                outputs=outputs,
                inputs=inputs,
                order=order,
                inputs_first=any(shape[1] != inputs for shape in source.shapes),
            )
    return linears


def _misfit(family: str, why: str) -> ValueError:
    """The error for a family whose names do not fit the model."""
    return ValueError(
        f"family={family!r}: {why}: the names of {_family(family).model_types[0]} do not fit it; adapters need a "
        f"family of {', '.join(sorted(FAMILIES))}."
    )


def _shapes(config: DecoderConfig, layer: int) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of the linears of one layer that can be adapted."""
    embed, kind = config.embed, config.layer(layer)
    mixer, mlp = kind.mixer, kind.mlp
    if isinstance(mixer, DeltaRuleConfig):
        shapes = {
            "delta_rule.qkv": (mixer.key_heads * mixer.features, embed),
            "delta_rule.gate": (mixer.outputs, embed),
            "delta_rule.steps": (2 * mixer.value_heads, embed),
            "delta_rule.out": (embed, mixer.outputs),
        }
    else:
        attention = kind.attention
        width = attention.q_heads * attention.head_dim
        shapes = {
            "attention.qkv": (attention.kv_heads * (attention.group + attention.kv_parts) * attention.head_dim, embed),
            "attention.out": (embed, width),
        }
        if attention.output_gate:
            shapes["attention.gate"] = width, embed
    if mlp.moe is None:
        shapes["mlp.gate_up"] = 2 * mlp.hidden if mlp.gated else mlp.hidden, embed
        shapes["mlp.down"] = embed, mlp.hidden
    return shapes


def _require_same_storage(info: AdapterInfo, inputs_first: bool) -> None:
    if info.fan_in_fan_out != inputs_first:
        raise CheckpointError(
            f"{info.folder / CONFIG}: fan_in_fan_out={info.fan_in_fan_out}, but this model's weights are stored "
            f"{'[inputs, outputs]' if inputs_first else '[outputs, inputs]'}; use an adapter made for this model."
        )


# The adapter's side: its tensors, checked against the model.


class _Pair(NamedTuple):
    """The matrices of one projection, float32: a [r, K] and b [N, r] as PEFT stores them, b scaled."""

    a: np.ndarray
    b: np.ndarray


_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")


def _read_pairs(
    info: AdapterInfo, family: Family, config: DecoderConfig, linears: Mapping[str, _Linear]
) -> dict[str, _Pair]:
    """Read the matrices of each adapted projection, by the name of its weight in the family's sources."""
    file = info.folder / WEIGHTS
    sizes = {
        tensor: (outputs, linear.inputs)
        for linear in linears.values()
        for tensor, outputs in zip(linear.tensors, linear.outputs, strict=True)
    }
    pairs = {}
    for module, sides in _read_modules(file).items():
        tensor = family.plain_name(f"{module}.weight")
        if tensor not in sizes:
            adaptable = sorted({re.sub(r"^.*?\.\d+\.|\.weight$", "", known) for known in sizes})
            without = (
                "experts, routers, embeddings and output head" if config.moe_layers else "embeddings and output head"
            )
            raise CheckpointError(
                f"{file}: {module} is not a linear of this model's {config.layers} layers; adapters may name "
                f"{', '.join(adaptable)}: use an adapter made for this model, without {without}."
            )
        if tensor in pairs:
            raise CheckpointError(f"{file}: {module} appears twice; save the adapter again.")
        pairs[tensor] = _checked_pair(file, info, module, sides, *sizes[tensor])
    return pairs


def _digest(pairs: Mapping[str, _Pair]) -> bytes:
    digest = hashlib.sha256()
    for name, pair in sorted(pairs.items()):
        digest.update(f"{name} {len(pair.a)} ".encode())
        for matrix in pair:
            digest.update(np.ascontiguousarray(matrix))
    return digest.digest()


def _read_modules(file: pathlib.Path) -> dict[str, dict[str, np.ndarray]]:
    """Read every tensor of the file, by module and then by "A" or "B"."""
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file; save the adapter with save_pretrained(safe_serialization=True).")
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise CheckpointError(f"{file}: truncated or corrupt ({error}); fetch it again.") from error
    modules: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in tensors.items():
        if (match := _TENSOR.fullmatch(name)) is None:
            raise CheckpointError(
                f"{file}: {name} is not implemented, only the matrices lora_A and lora_B of linear layers; "
                "train the adapter without it."
            )
        sides = modules.setdefault(match["module"], {})
        if match["side"] in sides:
            raise CheckpointError(f"{file}: {name} appears twice, with and without `.default`; save it again.")
        sides[match["side"]] = tensor
    if not modules:
        raise CheckpointError(f"{file}: contains no tensors; save the adapter again.")
    return modules


def _checked_pair(
    file: pathlib.Path, info: AdapterInfo, module: str, sides: Mapping[str, np.ndarray], outputs: int, inputs: int
) -> _Pair:
    rank = info.rank_of(module)
    for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
        if side not in sides:
            raise CheckpointError(f"{file}: {module} has no lora_{side}; save the adapter again.")
        if (tensor := sides[side]).shape != shape:
            raise CheckpointError(
                f"{file}: {module}.lora_{side} is {list(tensor.shape)}, but this model and rank {rank} need "
                f"{list(shape)}; use an adapter made for this model, with its own {CONFIG}."
            )
        if not jnp.issubdtype(tensor.dtype, jnp.floating):
            raise CheckpointError(
                f"{file}: {module}.lora_{side} has dtype {tensor.dtype}, which is not implemented; save it as a float."
            )
    return _Pair(sides["A"].astype(np.float32), sides["B"].astype(np.float32) * np.float32(info.scale_of(module)))


def _fuse(linear: _Linear, pairs: Mapping[str, _Pair], max_rank: int) -> LowRank:
    """Fuse the pairs of a linear's projections into one; zero for projections that are not adapted."""
    rank = max_rank * len(linear.tensors)
    a = np.zeros((rank, linear.inputs), np.float32)
    b = np.zeros((sum(linear.outputs), rank), np.float32)
    first_row = 0
    for part, (tensor, outputs) in enumerate(zip(linear.tensors, linear.outputs, strict=True)):
        if tensor in pairs:
            pair, column = pairs[tensor], part * max_rank
            columns = slice(column, column + len(pair.a))
            a[columns] = pair.a
            b[first_row : first_row + outputs, columns] = pair.b
        first_row += outputs
    return LowRank(a, b[linear.order])
