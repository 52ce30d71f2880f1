"""Placement of weights while a model runs, and limits on its memory: the user's choice, and the resulting plan."""

import dataclasses
import itertools
import os
import pathlib
import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal, Self, TypedDict

from msgspec import Meta
from rich.filesize import decimal

from jaxinfer.fields import AtLeast1, check, check_fields

WEIGHTS = ("device", "host", "disk", "auto")
USED_WITH = {
    "host_memory": ("host", "disk", "auto"),
    "prefetch": ("host", "disk", "auto"),
    "layer_files": ("disk", "auto"),
    "kv_offload": ("host", "disk", "auto"),
}
"""The values of `weights` with which other fields of `MemoryConfig` have an effect; those left out always have one."""
Tier = Literal["device", "host", "disk"]
MAX_PROGRAM_LAYERS = 32
"""Maximum layers of one program: a call costs little beside them, and each layer adds compile time."""
_SIZES = "device_memory", "host_memory", "host_kv", "disk_kv_limit", "kv_offload"
"""The fields of `MemoryConfig` in bytes."""
_Bytes = Annotated[int, Meta(ge=0, le=2**63 - 1, description='bytes or a size such as "12GiB" or "800MB"')]
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


class MemoryOptions(TypedDict, total=False):
    """The fields of `MemoryConfig`, as `LLM` and `Embedder` take them."""

    weights: str
    """"device": all on the devices; "host", "disk": layers are streamed from there; "auto": the first that fits."""
    device_memory: int | str | None
    """Memory of each device for weights and cache: bytes, or such as "12GiB"; None: all that is free."""
    host_memory: int | str | None
    """Host memory for layers; None: all that is free."""
    host_kv: int | str | None
    """Host memory for pages of the prefix cache that the devices forget: bytes, or such as "8GiB"; None: none."""
    disk_kv: str | os.PathLike[str] | None
    """Folder for pages of the prefix cache, which outlive the process; None: none."""
    disk_kv_limit: int | str | None
    """Bytes that the files in `disk_kv` may take, or such as "100GiB"."""
    kv_offload: int | str | None
    """Host memory for the KV cache of streamed layers, which run on slices of the rows; None: it is on the devices."""
    prefetch: int | None
    """Layers fetched ahead of the one that computes; None: chosen by the costs of earlier fetches."""
    layer_files: str | os.PathLike[str] | None
    """The folder where layer files are written and read; None: the cache, unless the model directory has them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Placement of weights while a model runs; see `MemoryOptions`."""

    weights: str = "device"
    device_memory: AtLeast1 | None = None
    host_memory: AtLeast1 | None = None
    host_kv: AtLeast1 | None = None
    disk_kv: pathlib.Path | None = None
    disk_kv_limit: AtLeast1 | None = None
    kv_offload: AtLeast1 | None = None
    prefetch: Annotated[int, Meta(ge=0, le=64, description="an integer in [0, 64]")] | None = None
    layer_files: pathlib.Path | None = None

    def __post_init__(self) -> None:
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}, got {self.weights!r}.")
        check_fields(self, *_SIZES, "prefetch", where="MemoryOptions")
        for name, used in USED_WITH.items():
            if (value := getattr(self, name)) is not None and self.weights not in used:
                raise ValueError(
                    f"MemoryOptions.{name}={value} has no effect with weights={self.weights!r}: leave it out, or set "
                    f"weights to {' or '.join(map(repr, used))}."
                )
        if (self.disk_kv is None) != (self.disk_kv_limit is None):
            raise ValueError(
                f"disk_kv={self.disk_kv}, disk_kv_limit={self.disk_kv_limit}: give both, a folder and the bytes it "
                "may take, or neither."
            )
        for name in ("host_kv", "disk_kv"):
            if self.kv_offload is not None and (value := getattr(self, name)) is not None:
                raise ValueError(
                    f"kv_offload={self.kv_offload} keeps all pages in the host's memory, and {name}={value} those that "
                    "the devices forget: leave one of them out."
                )
        for name in ("layer_files", "disk_kv"):
            if (folder := getattr(self, name)) is not None and folder.exists() and not folder.is_dir():
                raise ValueError(f"{name} must be a folder, and {folder} is a file.")

    @classmethod
    def from_options(cls, options: MemoryOptions) -> Self:
        """Make a config from the options of `LLM`; sizes may be strings."""
        sizes = {name: parse_bytes(name, value) for name in _SIZES if (value := options.get(name)) is not None}
        return cls(
            weights=options.get("weights", "device"),
            prefetch=options.get("prefetch"),
            layer_files=_folder("layer_files", options.get("layer_files")),
            disk_kv=_folder("disk_kv", options.get("disk_kv")),
            **sizes,
        )


def _folder(name: str, folder: object) -> pathlib.Path | None:
    if folder is None:
        return None
    if not folder or not isinstance(folder, str | os.PathLike):
        raise ValueError(f"{name} must be the path of a folder, got {folder!r}.")
    return pathlib.Path(folder)


def parse_bytes(name: str, value: int | str) -> int:
    """Parse bytes from a number or a string.

    >>> parse_bytes("device_memory", "1.5GiB")
    1610612736
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value) if isinstance(value, str) else None
    if match and (unit := match[2].upper()) in _UNITS:
        value = int(min(float(match[1]) * _UNITS[unit], 2.0**64))
    return check(name, value, _Bytes)


def exact_bytes(size: int) -> str:
    """Format a size for people, and exactly, to be copied.

    >>> exact_bytes(48524531)
    '48.5 MB (48524531 bytes)'
    """
    return f"{decimal(size)} ({size} bytes)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefetchDepth:
    """Number of layers fetched ahead of the one that computes.

    Attributes:
      device: into the devices' memory, which holds one layer more than that.
      host: from disk into the host's memory, at least as many; on a CPU both are the same memory and the same layers.
    """

    device: int = 1
    host: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.device <= self.host:
            raise ValueError(f"prefetch depths must be 0 <= device <= host, got {self.device} and {self.host}.")


@dataclasses.dataclass(frozen=True)
class LayerRange:
    """Consecutive layers that one program runs: a streamed one, or some that stay.

    Attributes:
      first: the first layer.
      count: the number of layers.
      kind: the first layer of the model that begins as many layers of the same kinds: ranges of equal kind and
        count are one executable.
      streamed: whether its weights come and go.
    """

    first: int
    count: int
    kind: int
    streamed: bool

    @property
    def layers(self) -> slice:
        """The range as a slice of a list with an entry per layer of the model."""
        return slice(self.first, self.first + self.count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertPlacement:
    """The place of the experts of a mixture of experts while the model runs.

    Attributes:
      tier: where they come from.
      count: the number of experts of all layers.
      slots: how many are on the devices at a time; 0 if they are used where they are, in the memory of host and CPU.
      bytes: bytes of the largest.
    """

    tier: Tier
    count: int
    slots: int
    bytes: int

    @property
    def is_fetched(self) -> bool:
        """Whether experts come to the device; a CPU uses those in the host's memory where they are."""
        return self.tier == "disk" or self.slots > 0

    @property
    def device_bytes(self) -> int:
        """The bytes of experts on the device."""
        return self.slots * self.bytes

    @property
    def host_bytes(self) -> int:
        """The bytes of experts that stay in the host's memory."""
        return self.count * self.bytes if self.tier == "host" else 0

    def __str__(self) -> str:
        kept = f", {self.slots} at a time" if self.slots else ""
        return f"{self.count} experts of {decimal(self.bytes)} on {self.tier}{kept}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """The place of each layer while the model runs.

    Attributes:
      tiers: each layer's tier.
      depth: number of layers fetched ahead.
      layer_bytes: bytes of the largest layer, without experts, on each device.
      reason: the reason for it, in one line.
      experts: the place of experts; None: the model has none.
      kv_offload: whether keys and values come to each layer, too: each runs alone, then.
    """

    tiers: tuple[Tier, ...]
    depth: PrefetchDepth
    layer_bytes: int
    reason: str
    experts: ExpertPlacement | None = None
    kv_offload: bool = False

    @property
    def streamed(self) -> tuple[int, ...]:
        """The layers that are not on the devices all the time."""
        return tuple(layer for layer, tier in enumerate(self.tiers) if tier != "device")

    def ranges(self, kinds: Sequence[int], moe_layers: Sequence[int] = ()) -> tuple[LayerRange, ...]:
        """Divide a pass into ranges, in order: each streamed layer alone, the layers between two of them together.

        So is each layer with experts, whose programs are others, and with `kv_offload` every layer.

        More than `MAX_PROGRAM_LAYERS` together are halved, or divided further, as evenly as possible.

        Args:
          kinds: the first layer of each layer's kind (`layer_kinds` of the model's config).
          moe_layers: the layers with experts.
        """
        alone = range(len(self.tiers)) if self.kv_offload else (*self.streamed, *moe_layers)
        cuts = {0, len(self.tiers)} | {at for layer in alone for at in (layer, layer + 1)}
        ranges = []
        for first, end in itertools.pairwise(sorted(cuts)):
            programs = -(-(end - first) // MAX_PROGRAM_LAYERS)
            places = [first + (end - first) * i // programs for i in range(programs + 1)]
            ranges += [self._range(start, stop - start, kinds) for start, stop in itertools.pairwise(places)]
        return tuple(ranges)

    def _range(self, first: int, count: int, kinds: Sequence[int]) -> LayerRange:
        pattern = kinds[first : first + count]
        kind = next(at for at in range(first + 1) if kinds[at : at + count] == pattern)
        return LayerRange(first, count, kind, streamed=self.tiers[first] != "device")

    @property
    def buffer_bytes(self) -> int:
        """The bytes of streamed layers on each device."""
        return min(self.depth.device + 1, len(self.streamed)) * self.layer_bytes

    @property
    def staged(self) -> int:
        """The number of layers in the host's memory at a time on their way from disk."""
        return min(self.depth.host + 1, self.tiers.count("disk"))

    def __str__(self) -> str:
        counts = Counter(self.tiers)
        where = ", ".join(f"{counts[tier]} on {tier}" for tier in ("device", "host", "disk") if counts[tier])
        experts = "" if self.experts is None else f"{self.experts}; "
        return f"layers: {where}; {self.depth.device} ahead, of {decimal(self.layer_bytes)}; {experts}{self.reason}"


def spread(layers: int, counts: dict[Tier, int]) -> tuple[Tier, ...]:
    """Assign tiers, interleaving the nearer ones evenly so that fetches are evenly spaced.

    The first layer is among the farthest: it is fetched while the previous pass ends, and so the layers that stay form
    as few ranges as possible.

    Args:
      counts: number of layers on the device, and on the host; the others are on disk.

    >>> spread(6, {"device": 2})
    ('disk', 'disk', 'device', 'disk', 'disk', 'device')
    """
    tiers: list[Tier] = ["disk"] * layers
    places = list(range(layers))
    for tier in ("device", "host"):
        farther = max(0, len(places) - counts.get(tier, 0))
        rest = [places[i * len(places) // farther] for i in range(farther)]
        for layer in set(places) - set(rest):
            tiers[layer] = tier
        places = rest
    return tuple(tiers)
