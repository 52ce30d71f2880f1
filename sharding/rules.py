"""One table from logical axis names to mesh axes. Change a layout here, never inside a layer."""

import dataclasses
from collections.abc import Sequence

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingRules:
    """Logical axis -> mesh axis; None: every device has the whole dimension.

    Parameters and caches of the models name their dimensions by these logical axes.
    """

    batch: str | None = "data"
    vocab: str | None = "tensor"
    heads: str | None = "tensor"
    kv_heads: str | None = "tensor"
    mlp: str | None = "tensor"
    embed: str | None = None
    word_embed: str | None = None
    norm: str | None = None
    positions: str | None = None
    pages: str | None = None
    page: str | None = None
    head_dim: str | None = None

    def spec(self, *axes: str | None) -> PartitionSpec:
        """The PartitionSpec of an array with these logical axes (None: a dimension that is not split)."""
        table = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if unknown := {axis for axis in axes if axis is not None} - table.keys():
            raise ValueError(f"Unknown axes {sorted(unknown)}; known: {sorted(table)}.")
        mapped = [None if axis is None else table[axis] for axis in axes]
        used = [axis for axis in mapped if axis is not None]
        if len(set(used)) != len(used):
            raise ValueError(f"{axes} maps two dimensions to one mesh axis: {used}.")
        return PartitionSpec(*mapped)

    def sharding(self, mesh: Mesh | AbstractMesh, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
        """Where an array of this shape lives. A dimension that does not divide is an error, never a silent copy."""
        if len(axes) != len(shape):
            raise ValueError(f"axes {tuple(axes)} do not fit shape {tuple(shape)}: one name per dimension.")
        spec = self.spec(*axes)
        for axis, mapped, size in zip(axes, spec, shape, strict=True):
            if mapped is not None and size % mesh.shape[mapped]:
                raise ValueError(
                    f"{axis}={size} does not divide over {mapped}={mesh.shape[mapped]} devices: choose another "
                    f"{mapped}, or ShardingRules({axis}=None) to keep it whole on every device."
                )
        return NamedSharding(mesh, spec)
