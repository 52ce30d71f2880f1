"""The records of costs, opened under everything that decides how long programs take."""

from typing import Any

from jaxinfer.compiled import Costs
from jaxinfer.models.devices import device_name


def open_costs(device: Any, *, mesh: str = "", kernels: bool = True, **model: object) -> Costs:
    """Open the record of a model's programs, which is kept on disk.

    Args:
      device: the device that runs them, or one of those of a mesh.
      mesh: the mesh and its rules in words; empty without one.
      kernels: whether operations may run as kernels.
      model: everything else that decides how long they take, by name: config, weights, options.
    """
    key = {name: str(value) for name, value in model.items()}
    if mesh:
        key["mesh"] = mesh
    if not kernels:
        key["kernels"] = "False"
    return Costs.open(device=device_name(device), model=key)
