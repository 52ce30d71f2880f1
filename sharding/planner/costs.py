"""The seconds of a pass through layers on one device: a roofline for products, alpha-beta for exchanges.

A layer takes as long as reading its weights and its part of the KV cache, or as its operations, whichever is longer;
then its exchanges, and the overheads of the system that runs it. Shares of peaks and overheads are constants of a
`System`, fitted to published measurements (`python -m benchmarks.deepspeed_figures`).
"""

import dataclasses
import math
import operator
from collections.abc import Iterable

from jaxinfer.sharding.planner.hardware import Device
from jaxinfer.sharding.planner.shapes import LayerShape, ModelShape, stage_share

ACTIVATION_BYTES = 2
STATE_BYTES = 4
MOST_IMBALANCED = 8.0
"""Largest load of the busiest group of experts, relative to the mean."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seconds:
    """Seconds by their cause. Parts that run at the same time count once, as the longest of them.

    Attributes:
      memory: reading weights and the KV cache from the device's memory.
      compute: operations.
      exchange: sending to other devices.
      overhead: launching kernels, and other work that does not depend on sizes.
      fetch: copying weights or the KV cache from the host or the disk.
      bubble: stages that wait for others.
    """

    memory: float = 0.0
    compute: float = 0.0
    exchange: float = 0.0
    overhead: float = 0.0
    fetch: float = 0.0
    bubble: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return math.fsum(self._parts)

    @property
    def _parts(self) -> tuple[float, float, float, float, float, float]:
        return self.memory, self.compute, self.exchange, self.overhead, self.fetch, self.bubble

    @property
    def bound(self) -> str:
        """The cause of most of the time."""
        return max(dataclasses.asdict(self).items(), key=lambda item: item[1])[0]

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds.from_parts(map(operator.add, self._parts, other._parts))

    def __mul__(self, factor: float) -> "Seconds":
        return Seconds.from_parts(factor * part for part in self._parts)

    @classmethod
    def from_parts(cls, parts: Iterable[float]) -> "Seconds":
        """Make one from the seconds of each cause, in the order of the attributes."""
        memory, compute, exchange, overhead, fetch, bubble = parts
        return cls(memory=memory, compute=compute, exchange=exchange, overhead=overhead, fetch=fetch, bubble=bubble)


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
    """The constants of a system that runs models, at most six of which are fitted.

    Attributes:
      bandwidth_share: share of the memory's peak bandwidth that products reach.
      flops_share: share of the peak operations a second.
      layer_s: seconds that a layer takes in addition.
      token_s: seconds that each token takes in a layer in addition.
      hop_s: seconds of a collective for each doubling of its participants.
      node_s: seconds that a collective between nodes takes in addition.
      expert_layer_s: seconds that a layer with experts takes in addition.
      peer_s: seconds for each other participant of an all-to-all.
      idle_experts: whether a pass reads experts that no token chose.
      coordinated: whether devices that have the same tokens share an all-to-all (the paper's PCC).
      fitted: the names of the constants that were fitted; the others are another system's, or 0.
      error: the largest relative error of the points that they were fitted to.
      source: what these points are.
    """

    name: str
    bandwidth_share: float
    flops_share: float
    layer_s: float
    token_s: float = 0.0
    hop_s: float = 0.0
    node_s: float = 0.0
    expert_layer_s: float = 0.0
    peer_s: float = 0.0
    idle_experts: bool = False
    coordinated: bool = True
    fitted: list[str] = dataclasses.field(default_factory=list, hash=False)
    error: float = 0.0
    source: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ways:
    """How many ways each kind of parallelism splits the devices, as `MeshConfig`.

    Attributes:
      data: lanes with requests of their own, which share the experts of a mixture.
      pipeline: stages.
      expert: parts of each layer; of a mixture, groups of experts.
      tensor: parts of each layer and of each expert.
    """

    data: int = 1
    pipeline: int = 1
    expert: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        """The number of devices."""
        return self.data * self.pipeline * self.expert * self.tensor

    @property
    def slices(self) -> int:
        """The parts of each layer."""
        return self.expert * self.tensor

    @property
    def groups(self) -> int:
        """The groups among which experts are shared out."""
        return self.data * self.expert

    def __str__(self) -> str:
        """The form of `--mesh`: axes with several devices."""
        axes = ((name, ways) for name, ways in dataclasses.asdict(self).items() if ways > 1)
        return ",".join(f"{name}={ways}" for name, ways in axes) or "data=1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """How numbers are stored and multiplied.

    Attributes:
      weight_bytes: bytes of a weight.
      eight_bit: whether products run at the device's 8-bit rate.
      kv_bytes: bytes of a number in the KV cache.
    """

    weight_bytes: float = 2.0
    eight_bit: bool = False
    kv_bytes: float = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
    """Tokens that go through a layer together, in each lane.

    Attributes:
      count: how many.
      sequences: that they belong to; each has its own KV cache.
      context: tokens that each of them sees, on average.
    """

    count: float
    sequences: float
    context: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runner:
    """A model on devices of one kind, run by a system.

    Attributes:
      streamed: bytes a second at which each device fetches the weights of layers; None: they are in its memory.
      kv_streamed: the same of the KV cache.
    """

    model: ModelShape
    device: Device
    system: System
    ways: Ways
    format: Format
    streamed: float | None = None
    kv_streamed: float | None = None

    def stage(self, batch: Iterable[Tokens], *, rows: float) -> Seconds:
        """Compute the seconds of the slowest stage for tokens, of which it makes log probabilities for `rows`."""
        batch, seconds = tuple(batch), self.head(rows)
        share = stage_share(self.model, self.ways.pipeline)
        for layer in self.model.layers:
            seconds += self.layer(layer, batch) * (layer.count * share)
        return seconds

    def head(self, rows: float) -> Seconds:
        """Compute the seconds of the head."""
        params = self.model.head_params / self.ways.slices
        return self._roofline(params * self.format.weight_bytes, 2 * rows * params)

    def layer(self, layer: LayerShape, batch: tuple[Tokens, ...]) -> Seconds:
        """Compute the seconds of one layer."""
        tokens = sum(part.count for part in batch)
        cache = self.cache_bytes(layer, batch)
        moved = cache if self.kv_streamed is None else 0.0  # what is fetched is counted there
        weights = layer.params / self.ways.slices * self.format.weight_bytes + self._expert_bytes(layer, tokens)
        attention = sum(part.count * layer.seen(part.context) for part in batch) * layer.pair_flops
        flops = (2 * tokens * layer.params + attention) / self.ways.slices + self._expert_flops(layer, tokens)
        seconds = self._roofline(weights + moved, flops) + self._exchanges(layer, tokens)
        overhead = self.system.layer_s + tokens * self.system.token_s
        overhead += self.system.expert_layer_s if layer.experts else 0.0
        seconds += Seconds(overhead=overhead)
        fetch = 0.0 if self.streamed is None else self.layer_bytes(layer) / self.streamed
        fetch += 0.0 if self.kv_streamed is None else cache / self.kv_streamed
        return Seconds(fetch=fetch) if fetch > seconds.total else seconds

    def layer_bytes(self, layer: LayerShape) -> float:
        """Compute the bytes of a layer's weights on one device."""
        experts = layer.experts * layer.expert_params / (self.ways.groups * self.ways.tensor)
        return (layer.params / self.ways.slices + experts) * self.format.weight_bytes

    def cache_bytes(self, layer: LayerShape, batch: Iterable[Tokens]) -> float:
        """Compute the bytes of a layer's KV cache and states on one device that a pass over these tokens reads."""
        copies = min(self.ways.slices, layer.kv_heads)
        each = layer.kv_values * self.format.kv_bytes / copies
        states = 2 * layer.state_values * STATE_BYTES / self.ways.slices
        return sum(part.sequences * (layer.seen(part.context) * each + states) for part in batch)

    def hop(self, tokens: float) -> Seconds:
        """Compute the seconds of sending a micro-batch to the next stage."""
        if self.ways.pipeline == 1:
            return Seconds()
        crosses = self.device.crosses_nodes(self.ways.slices * self.ways.pipeline)
        size = tokens * self.model.hidden * ACTIVATION_BYTES / self.ways.slices
        rate = self.device.network if crosses else self.device.link
        return Seconds(exchange=self.system.hop_s + crosses * self.system.node_s + size / rate)

    def _roofline(self, size: float, flops: float) -> Seconds:
        peak = self.device.flops8 if self.format.eight_bit else self.device.flops
        memory = size / (self.device.bandwidth * self.system.bandwidth_share)
        compute = flops / (peak * self.system.flops_share)
        return Seconds(memory=memory) if memory >= compute else Seconds(compute=compute)

    def _expert_bytes(self, layer: LayerShape, tokens: float) -> float:
        """Compute the bytes of the experts that a device reads: those that any lane's tokens chose."""
        if not layer.experts:
            return 0.0
        here = layer.experts / self.ways.groups
        read = 1.0
        if not self.system.idle_experts:
            read = 1 - (1 - layer.chosen / layer.experts) ** (tokens * self.ways.data)
        return here * read * layer.expert_params / self.ways.tensor * self.format.weight_bytes

    def _expert_flops(self, layer: LayerShape, tokens: float) -> float:
        """Compute the operations of the busiest device for the tokens of all lanes."""
        if not layer.experts:
            return 0.0
        choices = tokens * self.ways.data * layer.chosen / self.ways.groups
        busiest = choices * imbalance(choices, self.ways.groups)
        return 2 * busiest * layer.expert_params / self.ways.tensor

    def _exchanges(self, layer: LayerShape, tokens: float) -> Seconds:
        size = tokens * self.model.hidden * ACTIVATION_BYTES
        seconds = 2 * self.all_reduce(size)  # after attention, and after the MLP
        if layer.experts:
            seconds += 2 * self.all_to_all(size * layer.chosen)  # to the experts and back
        return Seconds(exchange=seconds)

    def all_reduce(self, size: float) -> float:
        """Compute the seconds of a sum over a layer's slices: in rings, first in nodes, then between them."""
        if (slices := self.ways.slices) == 1:
            return 0.0
        near = min(slices, self.device.node)
        nodes = slices / near
        seconds = self.system.hop_s * math.log2(slices) + 2 * (near - 1) / near * size / self.device.link
        if nodes > 1:
            seconds += self.system.node_s + 2 * (nodes - 1) / nodes * size / near / self.device.network
        return seconds

    def all_to_all(self, size: float) -> float:
        """Compute the seconds of an exchange of what each lane's tokens, `size` bytes, send to experts."""
        peers = self.ways.data if self.system.coordinated else self.ways.groups
        if peers == 1:
            return 0.0
        each = size / (self.ways.expert if self.system.coordinated else 1)
        apart = self.ways.size // peers  # devices between two peers
        near = min(peers, max(1, self.device.node // apart))
        seconds = self.system.peer_s * (peers - 1) + self.system.hop_s * math.log2(peers)
        seconds += self.system.node_s if near < peers else 0.0
        # Both kinds of links send at the same time.
        within, between = (near - 1) / peers * each, (peers - near) / peers * each
        return seconds + max(within / self.device.link, between / self.device.network)


def imbalance(choices: float, groups: int) -> float:
    """Estimate the load of the busiest of `groups`, relative to the mean `choices`, if tokens choose at random.

    The bound of balls in bins for many balls: the mean m grows to m + sqrt(2 m ln n) (Raab and Steger 1998).

    >>> imbalance(64.0, 1), round(imbalance(64.0, 8), 2)
    (1.0, 1.25)
    """
    if groups == 1:
        return 1.0
    return min(1 + math.sqrt(2 * math.log(groups) / max(choices, 1e-9)), MOST_IMBALANCED, groups)
