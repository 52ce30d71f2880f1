"""The device mesh: how many ways each kind of parallelism splits the devices."""

import dataclasses
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import msgspec
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxinfer.fields import Size, check_fields
from jaxinfer.sharding.rules import MESH_AXES, ShardingRules


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The number of devices along each axis of the mesh.

    Attributes:
      data: lanes, each serving a part of the requests with a copy of the model; the experts of a mixture are shared out
        over all lanes.
      pipeline: stages, consecutive groups of layers of a decoder, through which micro-batches go one after the other.
      expert: parts of every layer, as `tensor`; of a mixture of experts groups of whole experts.
      tensor: parts of every layer (heads, hidden width of MLPs and of each expert, vocabulary).
    """

    data: Size = 1
    pipeline: Size = 1
    expert: Size = 1
    tensor: Size = 1

    AXES: ClassVar = MESH_AXES

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def size(self) -> int:
        """The number of devices in the mesh."""
        return math.prod(getattr(self, axis) for axis in self.AXES)

    def build(self, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
        """Build the mesh over `devices`, or over the first `size` devices of this process's backend."""
        more = ""
        if devices is None:
            devices = jax.devices()[: self.size]
            more = f", or set JAX_NUM_CPU_DEVICES={self.size}" if jax.default_backend() == "cpu" else ""
        if len(devices) != self.size:
            ways = {axis: size for axis in self.AXES if (size := getattr(self, axis)) > 1}
            given = ", ".join(f"{axis}={size}" for axis, size in ways.items())
            raise ValueError(
                f"mesh {given} needs {self.size} devices, and there {'is' if len(devices) == 1 else 'are'} "
                f"{len(devices)}: lower {' or '.join(ways or self.AXES)}{more}."
            )
        shape = tuple(getattr(self, axis) for axis in self.AXES)
        # Placing arrays needs Auto axes. Model programs are traced inside `jax.shard_map`, which makes them Manual.
        return jax.make_mesh(shape, self.AXES, (AxisType.Auto,) * len(shape), devices=devices)

    def abstract(self) -> AbstractMesh:
        """The mesh without devices, for planning on a machine that has fewer."""
        return AbstractMesh(tuple(getattr(self, axis) for axis in self.AXES), self.AXES)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the form of the command line, such as "tensor=2,data=1".

        >>> MeshConfig.parse("tensor=2")
        MeshConfig(data=1, pipeline=1, expert=1, tensor=2)
        """
        fields: dict[str, Any] = {}
        for part in text.split(","):
            axis, _, ways = part.strip().partition("=")
            if axis in fields:
                raise ValueError(f"mesh {text!r}: {axis} is given twice; give it once.")
            fields[axis] = int(ways) if ways.isdecimal() else ways
        return cls.from_mapping(fields, source=f"mesh {text!r}")

    @classmethod
    def from_mapping(cls, fields: Mapping[str, Any], *, source: str) -> Self:
        """Make a config from the sizes of axes by name; every error begins with `source`."""
        if unknown := sorted(set(fields) - set(cls.AXES)):
            raise ValueError(f"{source}: unknown field {unknown[0]!r}; known: {', '.join(cls.AXES)}.")
        try:
            return cls(**fields)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error


def check_rules(rules: ShardingRules) -> None:
    """Raise ValueError for rules that name an axis that meshes do not have.

    Every device would have the whole, without a word.
    """
    for axis in rules.SPLIT:
        for name in rules.mesh_axes(axis):
            if name not in MeshConfig.AXES:
                raise ValueError(
                    f"ShardingRules.{axis}={getattr(rules, axis)!r}: {name!r} is not a mesh axis; use "
                    f"{', '.join(map(repr, MeshConfig.AXES))} or None."
                )


def axes_text(mesh: Mesh | AbstractMesh) -> str:
    """Format the axes of a mesh that have several devices.

    >>> axes_text(MeshConfig(data=2, tensor=4).abstract())
    'data=2, tensor=4'
    """
    return ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)


def check_mesh(mesh: Mesh) -> None:
    """Raise ValueError for a mesh of JAX that no MeshConfig describes: with other axes."""
    MeshConfig.from_mapping(dict(mesh.shape), source="mesh")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshFile:
    """A TOML file that says where a model runs.

    Attributes:
      mesh: its table `[mesh]`; None without one.
      rules: its table `[rules]`; None: the default.
      memory: its table `[memory]` as it stands, which `LLM` and `Embedder` read (`jaxinfer.streaming.config`).
      source: what errors call it.
    """

    mesh: MeshConfig | None = None
    rules: ShardingRules | None = None
    memory: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    source: str = dataclasses.field(default="the mesh", compare=False)


def read_mesh(path: str | os.PathLike[str]) -> MeshFile:
    """Read a TOML file with a table `[mesh]`, and perhaps `[rules]` and `[memory]`; or with `[memory]` alone.

    Raises ValueError, naming the file, for anything else in it.
    """
    tables = _read_tables(pathlib.Path(path))
    mesh = MeshConfig.from_mapping(tables["mesh"], source=f"{path}: [mesh]") if "mesh" in tables else None
    rules = None
    if "rules" in tables:
        try:
            check_rules(rules := ShardingRules.from_mapping(tables["rules"]))
        except ValueError as error:
            raise ValueError(f"{path}: [rules]: {error}") from error
    return MeshFile(mesh=mesh, rules=rules, memory=tables.get("memory", {}), source=str(path))


def _read_tables(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    try:
        document = msgspec.toml.decode(path.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid TOML: {error}.") from error
    tables = {name: table for name, table in document.items() if isinstance(table, dict)}
    known = document.keys() <= {"mesh", "rules", "memory"} and tables.keys() == document.keys()
    if not known or not tables.keys() & {"mesh", "memory"} or ("rules" in tables and "mesh" not in tables):
        tables = sorted(document)
        raise ValueError(f"{path}: expected a table [mesh], and optionally [rules] and [memory]; found {tables}.")
    return tables
