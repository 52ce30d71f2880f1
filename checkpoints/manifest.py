"""The manifest of a model directory: every weight with its shape, everything stored with its size and sha256."""

import dataclasses
import math
import pathlib

import ml_dtypes  # noqa: F401  (teaches numpy the name "bfloat16")
import msgspec
import numpy as np

from jaxinfer.checkpoints.errors import CheckpointError

FORMAT = 2
"""2: leaves have the names of the parameters in memory (`weight`, `gate_up`)."""
MANIFEST = "manifest.json"
EXPERTS = "experts"
"""The first logical axis of leaves that have a part for each expert."""
STATE = "state"
"""The folder of the weights."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One weight: its shape, its dtype's name, and the logical name of each dimension."""

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape):
            raise ValueError(f"axes {self.axes} do not fit shape {self.shape}: one name per dimension.")
        if self.axes[:1] == (EXPERTS,) and "mlp" in self.axes:  # as written before experts' widths were split otherwise
            object.__setattr__(self, "axes", tuple("expert_mlp" if axis == "mlp" else axis for axis in self.axes))

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def parts(self) -> int:
        """How many parts it is stored in, each by itself: one for each expert, else 0.

        So a conversion holds one expert at a time, and one can be read without the others.
        """
        return self.shape[0] if self.axes and self.axes[0] == EXPERTS else 0

    @property
    def part(self) -> "Leaf":
        """One of the parts, as a leaf."""
        return Leaf(self.shape[1:], self.dtype, self.axes[1:])

    @property
    def bytes(self) -> int:
        """Bytes as stored."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class File:
    """One file: its size in bytes and the sha256 of its content, in hex."""

    size: int
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of `manifest.json`.

    Attributes:
      format: its version.
      leaves: the weights by dotted path.
      files: what is stored by path relative to the directory; in a single file each leaf is one, `state/NAME`.
    """

    format: int
    leaves: dict[str, Leaf]
    files: dict[str, File]

    @property
    def bytes(self) -> int:
        """Bytes of all weights as stored."""
        return sum(leaf.bytes for leaf in self.leaves.values())

    def leaf(self, name: str) -> Leaf:
        """A leaf, or a part of one, by its name."""
        whole, index = part_of(name)
        return self.leaves[whole] if index is None else self.leaves[whole].part


def part_name(name: str, index: int) -> str:
    """The name that a part of a leaf is stored under: no dot, since names of leaves may end in numbers.

    >>> part_name("layers.0.mlp.experts.down.weight", 7)
    'layers.0.mlp.experts.down.weight@7'
    """
    return f"{name}@{index}"


def part_of(name: str) -> tuple[str, int | None]:
    """The leaf that a name is of, and which part of it (`Leaf.parts`); None: the whole leaf.

    >>> part_of("layers.0.mlp.experts.down.weight@7")
    ('layers.0.mlp.experts.down.weight', 7)
    """
    whole, _, index = name.partition("@")
    return whole, int(index) if index else None


def encode_manifest(leaves: dict[str, Leaf], files: dict[str, File]) -> bytes:
    """Return the content of `manifest.json`, in one line."""
    return msgspec.json.encode(Manifest(format=FORMAT, leaves=dict(sorted(leaves.items())), files=files))


class _Format(msgspec.Struct):
    """The part of `manifest.json` that is the same in every version."""

    format: int


def decode_manifest(content: bytes, file: pathlib.Path) -> Manifest:
    """Return the manifest that `file` has. Raises CheckpointError if it is damaged, or of another version."""
    try:
        version = msgspec.json.decode(content, type=_Format).format
        if version == FORMAT:
            return msgspec.json.decode(content, type=Manifest)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{file}: damaged ({error}); convert or copy the model again.") from error
    reads = f"format={version} and this version reads {FORMAT}"
    if version < FORMAT:
        raise CheckpointError(
            f"{file}: {reads}: an older version of jaxinfer wrote it; convert the model again, or register the task "
            "again."
        )
    raise CheckpointError(f"{file}: {reads}; update jaxinfer.")
