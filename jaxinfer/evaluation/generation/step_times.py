"""How long the steps of an engine take: as its record of costs has it, or as the planner predicts it."""

import dataclasses
import functools

import numpy as np

from jaxinfer.compiled import CostTable
from jaxinfer.generation.engine.batch import Batch
from jaxinfer.generation.engine.buckets import chunks_per_micro_batch
from jaxinfer.generation.engine.speculation import PREFILL
from jaxinfer.generation.execution.packing import pass_sizes
from jaxinfer.generation.execution.plan import Plan, Way
from jaxinfer.sharding.planner import Runner, Tokens
from jaxinfer.sharding.schedules import queued_stride


class RecordedTimes:
    """Times of a model on this machine, from its record of costs.

    A step at sizes that were never measured takes what a line through the measured ones says: seconds for nothing, for
    each chunk, and for each row.

    Args:
      costs: the record.
      plan: the engine's, all of whose layers are on one device.

    Raises ValueError for another plan, and if too little was measured.
    """

    def __init__(self, costs: CostTable, plan: Plan):
        if plan.way is not Way.WHOLE:
            raise ValueError("Simulations know the steps of models that are whole on one device, not in stages.")
        self._costs, self._plan = costs, plan
        self._prefill = functools.cache(self._prefill_seconds)
        self._decode = functools.cache(self._decode_seconds)

    def seconds(self, batch: Batch) -> float:
        """Compute the seconds of a step."""
        sizes, _ = pass_sizes(batch, self._plan.decoder_buckets)
        if sizes.chunks:
            return self._prefill(sizes.chunks, sizes.batch)
        return batch.passes * self._decode(sizes.batch)

    def _prefill_seconds(self, chunks: int, batch: int) -> float:
        known = self._costs.mean(PREFILL, chunks=chunks, batch=batch)
        return self._line(PREFILL, ("chunks", "batch"), (chunks, batch)) if known is None else known

    def _decode_seconds(self, batch: int) -> float:
        name = self._plan.way.value
        known = self._costs.mean(name, batch=batch, speculative=0)
        return self._line(name, ("batch",), (batch,)) if known is None else known

    def _line(self, name: str, over: tuple[str, ...], at: tuple[int, ...]) -> float:
        """Compute what the least-squares plane through the relative errors of all measured sizes says."""
        points = [(dict(bucket), cost) for (program, bucket), cost in self._costs.costs.items() if program == name]
        points = [(sizes, cost.mean) for sizes, cost in points if cost.weight and not sizes.get("speculative")]
        if len(points) <= len(over):
            raise ValueError(f"The record of costs has too few times of {name}: run the model first (jaxinfer bench).")
        rows = np.array([[1.0, *(sizes[size] for size in over)] for sizes, _ in points])
        seconds = np.array([mean for _, mean in points])
        weights, *_ = np.linalg.lstsq(rows / seconds[:, None], np.ones(len(points)), rcond=None)
        return max(float(np.dot(weights, [1.0, *at])), float(seconds.min()))


@dataclasses.dataclass(frozen=True)
class PlannedTimes:
    """Times of a model on devices that need not be there, as the planner predicts them.

    Lanes run together, as long as the one with the most tokens. A pipeline runs as jaxinfer's does: a step's chunks go
    through its stages in micro-batches, and its rows too, queued.

    Attributes:
      runner: the model on its devices.
    """

    runner: Runner

    def seconds(self, batch: Batch) -> float:
        """Compute the seconds of a step."""
        return max(self._lane(lane, batch.passes, batch.micro_batches) for lane in batch.lanes if lane)

    def _lane(self, lane: Batch, passes: int, micro_batches: int) -> float:
        stages = self.runner.ways.pipeline
        chunks, rows = len(lane.chunks), len(lane.rows)
        if chunks:
            parts = -(-chunks // chunks_per_micro_batch(chunks, stages)) if stages > 1 else 1
            ticks = parts + stages - 1
        else:
            parts = min(micro_batches, rows)
            ticks = (passes - 1) * queued_stride(stages, parts) + parts + stages - 1
        return ticks * self._tick(lane, 1 / parts)

    def _tick(self, lane: Batch, share: float) -> float:
        """The seconds that a stage takes for a share of a step's tokens, and for sending them on."""
        tokens, last = [], 0
        if lane.chunks:
            count = sum([chunk.count for chunk in lane.chunks])
            seen = sum([chunk.count * (chunk.start + chunk.count / 2) for chunk in lane.chunks])
            last = sum([chunk.last for chunk in lane.chunks])
            sequences = len({chunk.slot for chunk in lane.chunks})
            tokens.append(Tokens(count=share * count, sequences=share * sequences, context=seen / count))
        if rows := len(lane.rows):
            context = sum([len(row.sequence.token_ids) for row in lane.rows]) / rows
            tokens.append(Tokens(count=share * rows, sequences=share * rows, context=context))
        seconds = self.runner.stage(tokens, rows=share * (rows + last))
        return (seconds + self.runner.hop(sum(part.count for part in tokens))).total
