"""The devices that an executor uses: one, or all those of a mesh."""

import dataclasses
from typing import Any, Self

import jax
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from jaxinfer.checkpoints import Leaf
from jaxinfer.models.devices import devices_of
from jaxinfer.sharding import ShardingRules, axes_text

RULES = ShardingRules()
"""The rules by which a mesh divides experts and batches."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an executor keeps experts and runs them: one device, or all devices of a mesh.

    Attributes:
      devices: the devices.
      mesh: how experts and batches are divided over them; None: there is one device.
    """

    devices: tuple[Any, ...]  # jax.Device has no static type
    mesh: Mesh | None = None

    @classmethod
    def on_mesh(cls, mesh: Mesh) -> Self:
        """All devices of a mesh."""
        return cls(tuple(devices_of(mesh)), mesh)

    @property
    def platform(self) -> str:
        """The kind of its devices: "cpu", "gpu"."""
        return self.devices[0].platform

    @property
    def name(self) -> str:
        """Its device, such as "gpu:0", or its mesh, such as "gpu data=2, tensor=2"."""
        return f"{self.platform}:{self.devices[0].id}" if self.mesh is None else self.processor

    @property
    def processor(self) -> str:
        """Its name in profiles, which places with equal costs share: "gpu", or "gpu data=2, tensor=2"."""
        return self.platform if self.mesh is None else f"{self.platform} {axes_text(self.mesh) or 'data=1'}"

    @property
    def lanes(self) -> int:
        """How many groups of its devices have different inputs."""
        return RULES.lanes(self.mesh)

    def sharding(self, leaf: Leaf) -> Sharding:
        """Return where a leaf of an expert lives."""
        if self.mesh is None:
            return SingleDeviceSharding(self.devices[0])
        return RULES.sharding(self.mesh, leaf.axes, leaf.shape)

    def copy(self, leaves: list[jax.Array]) -> list[jax.Array]:
        """Copy an expert here, and wait for it.

        leaves: from this place, or the host, or without a mesh from another device.
        """
        shardings = [self._sharding_like(leaf) for leaf in leaves]
        return jax.block_until_ready(jax.device_put(leaves, shardings, may_alias=False))

    def _sharding_like(self, array: jax.Array) -> Sharding:
        if self.mesh is None:
            return SingleDeviceSharding(self.devices[0])
        assert isinstance(array.sharding, NamedSharding), "it comes from the devices of the mesh"
        return NamedSharding(self.mesh, array.sharding.spec)
