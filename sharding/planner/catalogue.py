"""The data files of this folder: models, devices and systems, each with its source."""

import dataclasses
import functools
import tomllib
from pathlib import Path
from typing import Any

from jaxinfer.sharding.planner.costs import Format, System
from jaxinfer.sharding.planner.hardware import Device
from jaxinfer.sharding.planner.shapes import ModelShape

DATA = Path(__file__).parent / "data"


@dataclasses.dataclass(frozen=True)
class Catalogue:
    """The models, devices and systems that have names; the constants of systems were fitted."""

    models: dict[str, ModelShape]
    devices: dict[str, Device]
    systems: dict[str, System]

    @classmethod
    @functools.cache
    def read(cls) -> "Catalogue":
        """Read the data files."""
        return cls(
            models={name: ModelShape.from_fields(name, fields) for name, fields in _read("models").items()},
            devices={name: Device(name=name, **fields) for name, fields in _read("devices").items()},
            systems={name: System(name=name, **fields) for name, fields in _read("systems").items()},
        )

    def model(self, name: str) -> ModelShape:
        """Return a model by its name. Raises ValueError for an unknown one."""
        return _find("model", name, self.models)

    def system(self, model: ModelShape, form: Format) -> System:
        """Return the constants that predict a model best: those of mixtures, of 8-bit products, or of 16-bit ones.

        Unlike the system to which they were fitted, it does as jaxinfer does: it reads no experts that no token chose,
        drops no tokens, and takes the exchange with the fewest bytes.
        """
        if model.experts:
            moe = self.systems["deepspeed-moe"]
            return dataclasses.replace(moe, idle_experts=False, exchange="cheapest", drops=False)
        return self.systems["deepspeed-int8" if form.eight_bit else "deepspeed-fp16"]

    def device(self, name: str) -> Device:
        """Return a device by its name. Raises ValueError for an unknown one."""
        return _find("device", name, self.devices)


def _find(kind: str, name: str, known: dict[str, Any]) -> Any:
    if name not in known:
        raise ValueError(f"{kind} {name!r} is unknown; known: {', '.join(known)}.")
    return known[name]


def _read(name: str) -> dict[str, dict[str, Any]]:
    return tomllib.loads((DATA / f"{name}.toml").read_text(encoding="utf-8"))
