"""One table from logical axis names to mesh axes. Change a layout here, never inside a layer."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "pipeline", "expert", "tensor")
"""The axes of a mesh, that of the slowest link first."""

EXCHANGES = ("cheapest", "all_to_all", "pcc", "pcc_all_gather", "all_gather")
"""Ways of tokens to the experts of a mixture, and back."""

MeshAxes = str | tuple[str, ...] | None
"""The mesh axes that a dimension is split over; None: every device has all of it."""

WITHIN_LAYERS = ("expert", "tensor")
"""The axes along which devices have the same requests, and parts of every layer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingRules:
    """Logical axis -> the mesh axes that split it: one, several (a tuple, the slowest first), or None.

    Parameters and caches of the models name their dimensions by these logical axes.

    Attributes:
      vocab: token ids, in the embedding and the head.
      heads: heads of attention.
      kv_heads: heads of the KV cache, which goes where the heads go.
      mlp: hidden width of an MLP that all tokens go through.
      experts: experts of a mixture.
      expert_mlp: hidden width of each of them (expert slicing).
      batch: requests.
      pages: pages of the KV cache, which go where the requests go.
      stages: consecutive groups of layers, between which activations go round.
      embed: width of the activations. Every device has it whole, as it has the five below.
      word_embed: width of the embedding, where it differs from that of the activations.
      norm: width of a norm's scale.
      positions: rows of learned positions.
      page: tokens of a page.
      head_dim: width of a head.
      exchange: how tokens come to experts on other devices, and what these give comes back (`models/layers/moe.py`):
        one of `EXCHANGES`.
    """

    vocab: MeshAxes = WITHIN_LAYERS
    heads: MeshAxes = WITHIN_LAYERS
    kv_heads: MeshAxes = WITHIN_LAYERS
    mlp: MeshAxes = WITHIN_LAYERS
    experts: MeshAxes = ("data", "expert")
    expert_mlp: MeshAxes = "tensor"
    batch: MeshAxes = "data"
    pages: MeshAxes = "data"
    stages: MeshAxes = "pipeline"
    embed: MeshAxes = None
    word_embed: MeshAxes = None
    norm: MeshAxes = None
    positions: MeshAxes = None
    page: MeshAxes = None
    head_dim: MeshAxes = None
    exchange: str = "cheapest"

    SPLIT: ClassVar = ("vocab", "heads", "kv_heads", "mlp", "experts", "expert_mlp")
    """The axes that a user may split: sums over them are what the models exchange."""
    FIXED: ClassVar = {"batch": "data", "pages": "data", "stages": "pipeline"}
    """The axes that are always split over the same axis of a mesh: its lanes are along "data", its stages along
    "pipeline"."""

    def __post_init__(self) -> None:
        if self.exchange not in EXCHANGES:
            raise ValueError(f"ShardingRules.exchange must be one of {', '.join(EXCHANGES)}; got {self.exchange!r}.")
        for name in self._axes():
            self._check(name, getattr(self, name))
        if self.mesh_axes("heads") != self.mesh_axes("kv_heads"):
            raise ValueError(
                f"ShardingRules.heads={self.heads!r} and kv_heads={self.kv_heads!r} must be equal: a query head reads "
                "the keys and values on its own device."
            )
        if "data" in (experts := self.mesh_axes("experts"))[1:]:
            raise ValueError(f"ShardingRules.experts={self.experts!r} must list 'data' first: it has the slowest link.")
        if both := set(experts) & set(self.mesh_axes("expert_mlp")):
            raise ValueError(
                f"ShardingRules.experts={self.experts!r} and expert_mlp={self.expert_mlp!r} both use "
                f"{min(both)!r}: split experts, and the width of each expert, over different mesh axes."
            )

    def _axes(self) -> list[str]:
        return [field.name for field in dataclasses.fields(self) if field.name != "exchange"]

    def _check(self, name: str, value: object) -> None:
        """Raise ValueError unless an axis may be split like that."""
        axes = (value,) if isinstance(value, str) or value is None else value
        if not isinstance(axes, tuple) or not axes or any(type(axis) not in (str, type(None)) for axis in axes):
            raise ValueError(f"ShardingRules.{name} must be a mesh axis, a tuple of them, or None; got {value!r}.")
        if len(set(axes)) != len(axes):
            raise ValueError(f"ShardingRules.{name}={value!r} names a mesh axis twice.")
        if fixed := self.FIXED.get(name):
            if value != fixed:
                raise ValueError(f"ShardingRules.{name}={value!r} must be {fixed!r}: {name} has no other split.")
        elif value is not None and name not in self.SPLIT:
            raise ValueError(
                f"ShardingRules.{name}={value!r} is not implemented: every device needs all of {name}; "
                f"only these can be split: {', '.join(self.SPLIT)}."
            )
        elif "data" in axes and name != "experts":
            raise ValueError(
                f"ShardingRules.{name}={value!r}: devices along 'data' serve different requests, and cannot share a "
                "layer; only experts can be split over 'data'."
            )
        elif "pipeline" in axes:
            raise ValueError(
                f"ShardingRules.{name}={value!r}: devices along 'pipeline' hold different layers, and cannot share "
                "one; split it over expert or tensor."
            )

    def mesh_axes(self, axis: str) -> tuple[str, ...]:
        """The mesh axes that a logical axis is split over. Raises ValueError for an unknown one."""
        if axis not in (known := self._axes()):
            raise ValueError(f"Unknown axes {[axis]}; known: {sorted(known)}.")
        value = getattr(self, axis)
        return (value,) if isinstance(value, str) else value or ()

    def ways(self, mesh: Mesh | AbstractMesh, axis: str) -> int:
        """Return how many parts a logical axis has on a mesh. Raises ValueError if the rules name an axis unknown."""
        return math.prod(mesh.shape[name] for name in self._on(mesh, axis))

    def lanes(self, mesh: Mesh | AbstractMesh | None) -> int:
        """Return how many groups of devices have different requests; None: one device has all."""
        return 1 if mesh is None else self.ways(mesh, "batch")

    def num_stages(self, mesh: Mesh | AbstractMesh | None) -> int:
        """Return how many groups of devices have different layers; None: one device has all."""
        return 1 if mesh is None else self.ways(mesh, "stages")

    def _on(self, mesh: Mesh | AbstractMesh, axis: str) -> tuple[str, ...]:
        """The axes of several devices of a mesh that a logical axis is split over."""
        names = self.mesh_axes(axis)
        if unknown := [name for name in names if name not in mesh.shape and name not in MESH_AXES]:
            raise ValueError(
                f"ShardingRules.{axis}={getattr(self, axis)!r}: the mesh has no axis {unknown[0]!r}; it has "
                f"{', '.join(map(str, mesh.shape))}."
            )
        return tuple(name for name in names if mesh.shape.get(name, 1) > 1)

    def spec(self, *axes: str | None, mesh: Mesh | AbstractMesh | None = None) -> PartitionSpec:
        """The PartitionSpec of an array with these logical axes (None: a dimension that is not split).

        mesh: leaves out the axes that have one device there; None: names all.
        """
        by_axis = self.mesh_axes if mesh is None else functools.partial(self._on, mesh)
        mapped = [() if axis is None else by_axis(axis) for axis in axes]
        used = [name for names in mapped for name in names]
        if len(set(used)) != len(used):
            raise ValueError(f"{axes} maps two dimensions to one mesh axis: {used}.")
        return PartitionSpec(*(None if not names else names[0] if len(names) == 1 else names for names in mapped))

    def sharding(
        self, mesh: Mesh | AbstractMesh, axes: Sequence[str | None], shape: Sequence[int], *, staged: bool = False
    ) -> NamedSharding:
        """Return where an array of this shape lives. A dimension that does not divide is an error, never a copy.

        staged: whether the first dimension has a part for each stage of a pipeline, one after the other, which the
          other axes split further.
        """
        stages = self._on(mesh, "stages") if staged else ()
        if stages:
            shape = (shape[0] // self.num_stages(mesh), *shape[1:])
        if len(axes) != len(shape):
            raise ValueError(f"axes {tuple(axes)} do not fit shape {tuple(shape)}: one name per dimension.")
        for axis, size in zip(axes, shape, strict=True):
            if axis is not None and size % (ways := self.ways(mesh, axis)):
                over = " x ".join(self._on(mesh, axis))
                raise ValueError(
                    f"{axis}={size} does not divide over {over}={ways} devices: choose another {over}, or "
                    f"ShardingRules({axis}=None) to keep a complete copy on every device."
                )
        spec = self.spec(*axes, mesh=mesh)
        if stages:
            first = () if spec[0] is None else (spec[0],) if isinstance(spec[0], str) else spec[0]
            spec = PartitionSpec((*stages, *first), *spec[1:])
        return NamedSharding(mesh, spec)

    def fetch_sharding(
        self, mesh: Mesh | AbstractMesh, axes: Sequence[str | None], shape: Sequence[int]
    ) -> NamedSharding:
        """Return where a weight comes to the devices while it is on its way from the host or a disk.

        As `sharding` says; but a matrix that every device will have whole comes to each in a part, so that no byte
        comes twice, and `collectives.gather_fetched` makes it whole (DeepSpeed Inference, section VI-B).
        """
        placed, devices = self.sharding(mesh, axes, shape), math.prod(mesh.shape.values())
        if is_shared(placed.is_fully_replicated, shape, devices):
            return NamedSharding(mesh, PartitionSpec(tuple(mesh.shape)))
        return placed

    @classmethod
    def from_mapping(cls, fields: Mapping[str, Any]) -> Self:
        """Make rules from names: {"heads": "tensor", "mlp": ["expert", "tensor"], "vocab": []}; [] splits nothing.

        Raises ValueError for an unknown name, and for what the class refuses.
        """
        if unknown := sorted(fields.keys() - {*cls.SPLIT, "exchange"}):
            raise ValueError(f"unknown axis {unknown[0]!r}; known: {', '.join(cls.SPLIT)}, and exchange.")
        given: dict[str, Any] = {
            axis: tuple(names) or None if isinstance(names, list) else names for axis, names in fields.items()
        }
        if "heads" in given:
            given.setdefault("kv_heads", given["heads"])
        return cls(**given)


def is_shared(is_whole: bool, shape: Sequence[int], devices: int) -> bool:
    """Return whether a weight of this shape, whole on every device if `is_whole`, comes to each in a part."""
    return is_whole and devices > 1 and len(shape) > 1 and shape[0] % devices == 0
