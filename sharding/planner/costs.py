"""The seconds of a pass through layers on one device: a roofline for products, alpha-beta for exchanges.

A layer takes as long as reading its weights and its part of the KV cache, or as its operations, whichever is longer;
then its exchanges, and the overheads of the system that runs it. Shares of peaks and overheads are constants of a
`System`, fitted to published measurements (`python -m benchmarks.deepspeed_figures`).
"""

import bisect
import dataclasses
import math
import operator
from collections.abc import Iterable

from jaxinfer.sharding.planner.exchanges import Exchange, Pass
from jaxinfer.sharding.planner.hardware import Device, Ways
from jaxinfer.sharding.planner.shapes import LayerShape, ModelShape, stage_share

WHOLE_BYTES = 4
"""Bytes of a number of recurrent states, and of parameters that every device has."""
MOST_SEQUENCES = 1 << 20
"""Most sequences that `Runner.balanced` tries."""
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
      exchange: how tokens come to experts, one of `EXCHANGES`; the paper's is "pcc".
      drops: whether an expert takes only an even share of a lane's choices; else all tokens that choose it.
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
    exchange: str = "pcc"
    drops: bool = True
    fitted: list[str] = dataclasses.field(default_factory=list, hash=False)
    error: float = 0.0
    source: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """How numbers are stored and multiplied.

    Attributes:
      weight_bytes: bytes of a weight.
      eight_bit: whether products run at the device's 8-bit rate.
      kv_bytes: bytes of a number in the KV cache.
      number_bytes: bytes of a number of the activations.
    """

    weight_bytes: float = 2.0
    eight_bit: bool = False
    kv_bytes: float = 2.0
    number_bytes: float = 2.0


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

    def share(self, parts: int) -> "Tokens":
        """Make one of so many equal parts."""
        return dataclasses.replace(self, count=self.count / parts, sequences=self.sequences / parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fetched:
    """The weights and caches that come to a device in each pass, since they do not stay in its memory.

    Attributes:
      layers_s: seconds of fetching layers, without the experts of mixtures.
      experts: bytes a second of experts, of which those come that tokens chose; None: all stay on the device.
      held: share of the experts that stay on the device.
      cache: bytes a second of the KV cache; None: it stays on the device.
      slices: of the tokens, on which a layer runs one after the other if the device has no room for all their caches.
      ahead: whether things are fetched while others are computed.
    """

    layers_s: float = 0.0
    experts: float | None = None
    held: float = 0.0
    cache: float | None = None
    slices: int = 1
    ahead: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runner:
    """A model on devices of one kind, run by a system.

    Attributes:
      fetched: what comes in each pass.
    """

    model: ModelShape
    device: Device
    system: System
    ways: Ways
    format: Format
    fetched: Fetched = Fetched()

    def stage(self, batch: Iterable[Tokens], *, rows: float) -> Seconds:
        """Compute the seconds of the slowest stage for tokens, of which it makes log probabilities for `rows`."""
        batch = tuple(batch)
        share, tokens = stage_share(self.model, self.ways.pipeline), sum(part.count for part in batch)
        seconds = self.head(rows) + self.exchanged(self._pass(tokens, rows).of_ends(self.model, self.ways))
        slices = self.fetched.slices
        sliced = batch if slices == 1 else tuple(part.share(slices) for part in batch)
        for layer in self.model.layers:
            seconds += self.layer(layer, sliced) * (layer.count * share * slices)
        return overlapped(seconds, self.fetch_s(batch), ahead=self.fetched.ahead)

    def fetch_s(self, batch: tuple[Tokens, ...]) -> float:
        """Compute the seconds in which a pass over these tokens fetches what does not stay on the device."""
        fetched, seconds = self.fetched, self.fetched.layers_s
        if fetched.experts is None and fetched.cache is None:
            return seconds
        share, tokens = stage_share(self.model, self.ways.pipeline), sum(part.count for part in batch)
        for layer in self.model.layers:
            count = layer.count * share
            if fetched.experts is not None:
                missing = self.experts_read(layer, tokens) * (1 - fetched.held)
                seconds += count * missing * self.expert_bytes(layer) / fetched.experts
            if fetched.cache is not None:
                seconds += count * self.cache_bytes(layer, batch) / fetched.cache
        return seconds

    def head(self, rows: float) -> Seconds:
        """Compute the seconds of the head."""
        params = self.model.head_params_of(self.ways.slices)
        return self._roofline(params * self.format.weight_bytes, 2 * rows * params)

    def layer(self, layer: LayerShape, batch: tuple[Tokens, ...]) -> Seconds:
        """Compute the seconds of one layer."""
        tokens, slices = sum(part.count for part in batch), self.ways.slices
        moved = self.shared_bytes(layer) + self.experts_read(layer, tokens) * self.expert_bytes(layer)
        if self.fetched.cache is None:  # what is fetched is counted there
            moved += self.cache_bytes(layer, batch)
        attention = sum(part.count * layer.seen(part.context) for part in batch) * layer.pair_flops
        attention += tokens * layer.state_flops
        flops = 2 * tokens * (layer.params_of(slices) + layer.whole_params) + attention / slices
        seconds = self._roofline(moved, flops + self._expert_flops(layer, tokens))
        seconds += self.exchanged(self._pass(tokens, 0).of_layer(self.model, layer, self.ways))
        overhead = self.system.layer_s + tokens * self.system.token_s
        overhead += self.system.expert_layer_s if layer.experts else 0.0
        return seconds + Seconds(overhead=overhead)

    def shared_bytes(self, layer: LayerShape) -> float:
        """Compute the bytes of a layer's weights on one device, without experts."""
        return layer.params_of(self.ways.slices) * self.format.weight_bytes + layer.whole_params * WHOLE_BYTES

    def layer_bytes(self, layer: LayerShape) -> float:
        """Compute the bytes of a layer's weights on one device."""
        return self.shared_bytes(layer) + layer.experts / self.ways.groups * self.expert_bytes(layer)

    def streamed_bytes(self, layer: LayerShape) -> float:
        """Compute the least bytes of a streamed layer on one device; of a mixture with the experts of a token."""
        return self.shared_bytes(layer) + layer.chosen * self.expert_bytes(layer)

    def expert_bytes(self, layer: LayerShape) -> float:
        """Compute the bytes of one expert's weights on one device."""
        return layer.expert_params / self.ways.tensor * self.format.weight_bytes

    def cache_bytes(self, layer: LayerShape, batch: Iterable[Tokens]) -> float:
        """Compute the bytes of a layer's KV cache and states on one device that a pass over these tokens reads."""
        each = layer.kv_values_of(self.ways.slices) * self.format.kv_bytes
        states = 2 * self.state_bytes(layer)
        return sum(part.sequences * (layer.seen(part.context) * each + states) for part in batch)

    def state_bytes(self, layer: LayerShape) -> float:
        """Compute the bytes of a sequence's recurrent state in a layer on one device."""
        size = layer.state_values * WHOLE_BYTES + layer.conv_values * self.format.number_bytes
        return size / self.ways.slices

    def hop(self, tokens: float) -> Seconds:
        """Compute the seconds of sending a micro-batch to the next stage."""
        return self.exchanged(self._pass(tokens, tokens).to_next(self.model, self.ways))

    def experts_read(self, layer: LayerShape, tokens: float) -> float:
        """Compute how many experts of a layer a device reads: those that any lane's tokens chose, if at random."""
        if not layer.experts:
            return 0.0
        here = layer.experts / self.ways.groups
        if self.system.idle_experts:
            return here
        return here * (1 - (1 - layer.chosen / layer.experts) ** (tokens * self.ways.data))

    def turn(self, batch: Iterable[Tokens], *, rows: float) -> Seconds:
        """Compute the seconds of a pass through all stages, one after the other; arguments as in `stage`."""
        batch = tuple(batch)
        return (self.stage(batch, rows=rows) + self.hop(sum(part.count for part in batch))) * self.ways.pipeline

    def token(self, sequences: int, context: float) -> Seconds:
        """Compute the seconds of a token of each of some sequences, which lanes and micro-batches share out.

        context: tokens that each sees.
        """
        rows = math.ceil(sequences / (self.ways.data * self.ways.pipeline))
        return self.turn([Tokens(count=rows, sequences=rows, context=context)], rows=rows)

    def balanced(self, context: float) -> int:
        """Find the fewest sequences for which computing a token of each takes as long as fetching.

        More give no more tokens a second. context: as in `token`.
        """

        def is_computing(sequences: int) -> bool:
            return self.token(sequences, context).bound != "fetch"

        most = 1
        while most < MOST_SEQUENCES and not is_computing(most):
            most *= 2
        return bisect.bisect_left(range(1, most), True, key=is_computing) + 1

    def exchanged(self, exchanges: Iterable[Exchange]) -> Seconds:
        """Compute the seconds of exchanges one after the other."""
        return Seconds(exchange=math.fsum(each.times * self._exchange_s(each) for each in exchanges))

    def _exchange_s(self, each: Exchange) -> float:
        """Compute the seconds of a collective: in rings, first in nodes, then between them; or of one all-to-all."""
        device, system, count, size = self.device, self.system, each.devices, each.size
        near = min(count, max(1, device.node // self.ways.apart(each.axes[-1])))
        nodes = count / near
        seconds = system.hop_s * math.log2(count) + (system.node_s if nodes > 1 else 0.0)
        match each.kind:
            case "all-to-all":  # both kinds of links send at the same time
                within, between = (near - 1) / count * size, (count - near) / count * size
                return seconds + system.peer_s * (count - 1) + max(within / device.link, between / device.network)
            case "collective-permute":
                return seconds + size / (device.network if nodes > 1 else device.link)
        sent = {"all-reduce": 2 * size, "reduce-scatter": size * count}.get(each.kind, size)
        seconds += (near - 1) / near * sent / device.link
        return seconds + (nodes - 1) / nodes * sent / near / device.network

    def _pass(self, tokens: float, rows: float) -> Pass:
        system, size = self.system, self.format.number_bytes
        return Pass(tokens=tokens, rows=rows, number_bytes=size, way=system.exchange, drops=system.drops)

    def _roofline(self, size: float, flops: float) -> Seconds:
        device, system = self.device, self.system
        peak = device.flops8 if self.format.eight_bit else device.flops
        return roofline(size, flops, device.bandwidth * system.bandwidth_share, peak * system.flops_share)

    def _expert_flops(self, layer: LayerShape, tokens: float) -> float:
        """Compute the operations of the busiest device for the tokens of all lanes."""
        if not layer.experts:
            return 0.0
        choices = tokens * self.ways.data * layer.chosen / self.ways.groups
        busiest = choices * imbalance(choices, self.ways.groups)
        return 2 * busiest * layer.expert_params / self.ways.tensor


def roofline(size: float, flops: float, bandwidth: float, peak: float) -> Seconds:
    """Compute the seconds of reading `size` bytes, or of so many operations, whichever takes longer.

    >>> roofline(10.0, 100.0, 5.0, 100.0).bound
    'memory'
    """
    memory, compute = size / bandwidth, flops / peak
    return Seconds(memory=memory) if memory >= compute else Seconds(compute=compute)


def overlapped(computed: Seconds, fetch: float, *, ahead: bool = True) -> Seconds:
    """Compute the seconds of computing some things and fetching others, at the same time if they come `ahead`.

    >>> overlapped(Seconds(compute=1.0), 2.0).total, overlapped(Seconds(compute=1.0), 2.0, ahead=False).total
    (2.0, 3.0)
    """
    if not ahead:
        return computed + Seconds(fetch=fetch)
    return Seconds(fetch=fetch) if fetch > computed.total else computed


def imbalance(choices: float, groups: int) -> float:
    """Estimate the load of the busiest of `groups`, relative to the mean `choices`, if tokens choose at random.

    The bound of balls in bins for many balls: the mean m grows to m + sqrt(2 m ln n) (Raab and Steger 1998).

    >>> imbalance(64.0, 1), round(imbalance(64.0, 8), 2)
    (1.0, 1.25)
    """
    if groups == 1:
        return 1.0
    return min(1 + math.sqrt(2 * math.log(groups) / max(choices, 1e-9)), MOST_IMBALANCED, groups)
