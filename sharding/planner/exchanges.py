"""The exchanges of devices in a pass: collectives, the axes of the mesh that they are along, and their bytes.

It is what jaxinfer's compiled programs exchange for rows that want no more than their best tokens, byte for byte
(`tests/generation/api/test_planned_programs.py`). `costs.py` says how long it takes. The layers of a mixture of experts
choose their exchange by the same bytes (`models/layers/expert_exchange.py`).
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

from jaxinfer.sharding.planner.hardware import Ways
from jaxinfer.sharding.planner.shapes import LayerShape, ModelShape, stage_share

INTEGER_BYTES = 4
WITHIN_LAYERS = ("expert", "tensor")


def wire_bytes(kind: str, size: float, devices: int) -> float:
    """Compute the bytes that each of some devices sends in a collective, by the ring algorithms.

    Args:
      kind: as XLA calls it, such as "all-reduce".
      size: bytes of the result on each device.

    >>> wire_bytes("all-reduce", 100, 4), wire_bytes("all-gather", 100, 4), wire_bytes("reduce-scatter", 100, 4)
    (150.0, 75.0, 300)
    """
    others = devices - 1
    match kind:
        case "all-reduce":
            return 2 * size * others / devices
        case "reduce-scatter":
            return size * others
        case "collective-permute":
            return size
        case _:
            return size * others / devices


class Exchange(NamedTuple):
    """Some collectives of one kind and size.

    Attributes:
      kind: as XLA calls it.
      axes: of the mesh, along which devices exchange.
      devices: how many exchange with one another.
      size: bytes of the result on each device.
      times: how many such collectives; of stages with unequal layers, on average.
    """

    kind: str
    axes: tuple[str, ...]
    devices: int
    size: float
    times: float = 1

    @property
    def wire_bytes(self) -> float:
        """The bytes that each device sends in all of them."""
        return self.times * wire_bytes(self.kind, self.size, self.devices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExchangeSizes:
    """The sizes that decide how much devices exchange in a layer with experts.

    Attributes:
      lanes: Q, over which experts are split. column: L, devices of a lane over which experts are split.
      slices: parts of each expert's hidden width.
      tokens: T, of a lane. choices: experts of a token.
      experts: E. capacity: C, a lane's tokens that an expert takes.
      token_bytes: bytes of a token's D numbers.
    """

    lanes: int
    column: int
    slices: int
    tokens: float
    choices: int
    experts: int
    capacity: float
    token_bytes: float

    def exchanges(self, way: str) -> list[Exchange]:
        """List the collectives of a layer's experts, with the sum that finishes it; `way` is one of `EXCHANGES`."""
        tokens, everyone = self.tokens * self.token_bytes, (WITHIN_LAYERS, self.column * self.slices)
        within_experts = (("tensor",), self.slices)
        match way:
            case "all_to_all" | "pcc" | "pcc_all_gather":
                rows = self.rows(way)
                counts = INTEGER_BYTES * self.experts * rows.devices / (self.lanes * self.column)
                sent = [rows, rows._replace(size=counts, times=1)]
                if way == "pcc_all_gather":
                    table = self.experts * self.capacity * self.token_bytes
                    sent.append(Exchange("all-gather", ("expert",), self.column, table))
                sent += _sum(*(everyone if way == "pcc" else within_experts), tokens)
            case "all_gather":
                choices = self.tokens * self.choices * 8  # a weight and a number of an expert
                gather = Exchange("all-gather", ("data",), self.lanes, self.lanes * tokens)
                sent = [
                    gather,
                    gather._replace(size=self.lanes * choices),
                    Exchange("reduce-scatter", ("data",), self.lanes, tokens),
                    *_sum(*everyone, tokens),
                ]
            case _:
                raise ValueError(f"unknown exchange {way!r}")
        return [each for each in sent if each.devices > 1]

    def rows(self, way: str) -> Exchange:
        """Return the two all-to-alls of rows to the experts and back; of the paper's way, among lanes alone."""
        table = self.experts * self.capacity * self.token_bytes
        if way == "all_to_all":
            return Exchange("all-to-all", ("data", "expert"), self.lanes * self.column, table, 2)
        return Exchange("all-to-all", ("data",), self.lanes, table / self.column, 2)

    def wire_bytes(self, way: str) -> float:
        """The bytes that each device sends for its tokens, with the sums that finish a layer."""
        return math.fsum(each.wire_bytes for each in self.exchanges(way))

    @property
    def cheapest(self) -> str:
        """The exchange of the fewest bytes; of equal ones that which computes the fewest rows."""
        return min(("all_gather", "pcc", "pcc_all_gather", "all_to_all"), key=self.wire_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
    """A pass of a lane's tokens through all layers; in a pipeline, a tick of a micro-batch through a stage's.

    Attributes:
      tokens: that go through the layers.
      rows: for which a token is chosen.
      number_bytes: bytes of a number of the activations.
      decodes: whether its tokens go into the next pass, which runs in the same program.
      way: how tokens come to experts, one of `EXCHANGES`.
      drops: whether an expert takes only an even share of a lane's choices; else all tokens that choose it.
    """

    tokens: float
    rows: float
    number_bytes: float = 2.0
    decodes: bool = True
    way: str = "cheapest"
    drops: bool = False

    def exchanges(self, model: ModelShape, ways: Ways) -> Iterator[Exchange]:
        """Yield all collectives of the pass."""
        share = stage_share(model, ways.pipeline)
        yield from self.of_ends(model, ways)
        for layer in model.layers:
            for each in self.of_layer(model, layer, ways):
                yield each._replace(times=each.times * layer.count * share)
        yield from self.to_next(model, ways)

    def of_ends(self, model: ModelShape, ways: Ways) -> list[Exchange]:
        """List the collectives of embedding tokens and choosing the next: a score and a number of each device."""
        words = self.tokens * (model.word_width or model.hidden) * self.number_bytes
        sent = _sum(WITHIN_LAYERS, ways.slices, words)
        if ways.slices > 1:
            pairs = ways.slices * self.rows * 2 * INTEGER_BYTES
            sent.append(Exchange("all-gather", WITHIN_LAYERS, ways.slices, pairs))
        if self._lanes_go_on(ways):
            sent.append(Exchange("all-reduce", ("data",), ways.data, INTEGER_BYTES))
        return sent

    def of_layer(self, model: ModelShape, layer: LayerShape, ways: Ways) -> list[Exchange]:
        """List the collectives of one layer: sums after attention and after the MLP, or after both together."""
        size = self._size(model)
        if not layer.experts:
            return [each._replace(times=layer.sums) for each in _sum(WITHIN_LAYERS, ways.slices, size)]
        sizes = ExchangeSizes(
            lanes=ways.data,
            column=ways.expert,
            slices=ways.tensor,
            tokens=self.tokens,
            choices=layer.chosen,
            experts=layer.experts,
            capacity=layer.even_share(self.tokens) if self.drops else layer.capacity(self.tokens),
            token_bytes=model.hidden * self.number_bytes,
        )
        whole = _sum(WITHIN_LAYERS, ways.slices, size)
        if self.drops:  # a table of fixed size: its rows are not counted, and all slices add up what comes back
            rows = sizes.rows(self.way)
            return [*whole, *whole, *([rows] if rows.devices > 1 else [])]
        return [*whole, *sizes.exchanges(sizes.cheapest if self.way == "cheapest" else self.way)]

    def to_next(self, model: ModelShape, ways: Ways) -> list[Exchange]:
        """List the collectives that hand a micro-batch to the next stage: activations, then ids and positions."""
        if ways.pipeline == 1:
            return []
        activations = Exchange("collective-permute", ("pipeline",), ways.pipeline, self._size(model))
        tokens = activations._replace(size=self.rows * 2 * INTEGER_BYTES)
        return [activations, *([tokens] if self.decodes else [])]

    def once(self, ways: Ways, *, rows: int, width: int) -> list[Exchange]:
        """List the collectives of a step beside those of its passes.

        Args:
          rows: of all micro-batches.
          width: the most tokens that each gets in the step.
        """
        if ways.pipeline > 1:  # stages learn the tokens and lengths that the last one knows
            size = rows * (width + 1) * INTEGER_BYTES
            return [Exchange("all-reduce", ("pipeline",), ways.pipeline, size)]
        return [Exchange("all-reduce", ("data",), ways.data, INTEGER_BYTES)] if self._lanes_go_on(ways) else []

    def _lanes_go_on(self, ways: Ways) -> bool:
        """Return whether lanes tell one another that they have rows to decode; stages know their ticks before."""
        return self.decodes and ways.data > 1 and ways.pipeline == 1

    def _size(self, model: ModelShape) -> float:
        return self.tokens * model.hidden * self.number_bytes


def _sum(axes: tuple[str, ...], devices: int, size: float) -> list[Exchange]:
    return [Exchange("all-reduce", axes, devices, size)] if devices > 1 else []
