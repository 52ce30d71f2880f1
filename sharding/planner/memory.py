"""The memory of a device: weights, the KV cache, what it knows of requests, and what a pass computes.

All but the last are the arguments of jaxinfer's compiled programs, byte for byte
(`tests/generation/api/test_planned_programs.py`).
"""

import dataclasses
import math

from jaxinfer.sharding.planner.costs import WHOLE_BYTES, Runner
from jaxinfer.sharding.planner.exchanges import INTEGER_BYTES
from jaxinfer.sharding.planner.shapes import WORD, LayerShape, stage_places

OPTION_INTEGERS = 1654
"""Integers of a request's sampling options, without flags of logits processors."""
FLAG_BYTES = 1
LOGITS_COPIES, OPTION_COPIES = 9.5, 3
"""Copies of a row's logits, or else of its options, that programs have room for while they choose its token."""
RESULT_BYTES = 344
"""Bytes of a token's log probabilities while a ring of stages collects them."""
SNAPSHOTS = 2
"""Recurrent states that the prefix cache keeps for each request besides its own."""
PROMPT_POSITIONS = 64
"""Most tokens of a chunk whose logits exist at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of a device, or of the host, in its largest stage.

    Attributes:
      weights, cache, requests, work: bytes for weights, the KV cache, what is known of requests, and what a pass
        computes.
      host, disk: bytes of the memory and of the disks of all nodes together.
    """

    weights: float
    cache: float
    requests: float
    work: float
    host: float = 0.0
    disk: float = 0.0

    @property
    def device(self) -> float:
        """All bytes of the device."""
        return self.weights + self.cache + self.requests + self.work


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """The sizes of an engine's step in a lane.

    Attributes:
      rows: that decode, of all micro-batches.
      chunks: of prompts, of all micro-batches.
      tokens: of prompts, of a micro-batch.
      micro_batches: in which they go through the stages.
      pages: of a request's page table.
      options: integers of a request's sampling options.
      speculates: whether rows have speculative tokens.
    """

    rows: int
    chunks: int = 0
    tokens: int = 0
    micro_batches: int = 1
    pages: int = 0
    options: int = OPTION_INTEGERS
    speculates: bool = False


def weight_bytes(runner: Runner) -> float:
    """Compute the bytes of a device's weights.

    In a pipeline the first stage's embedding and the last one's head take the same place.
    """
    layers = (runner.layer_bytes(layer) * stage_places(layer, runner.ways.pipeline) for layer in runner.model.layers)
    return outer_bytes(runner) + sum(layers)


def outer_bytes(runner: Runner) -> float:
    """Compute the bytes of a device's weights that belong to no layer."""
    model, ways = runner.model, runner.ways
    matrices = 1 if model.tied or ways.pipeline > 1 else 2
    table = model.head_params_of(ways.slices) * runner.format.weight_bytes
    inputs = model.inputs_width * model.vocab / ways.slices * runner.format.weight_bytes
    return matrices * table + inputs + model.whole_params * WHOLE_BYTES


def kv_bytes(runner: Runner, tokens: float, slots: float) -> float:
    """Compute the bytes of a device's KV cache; windows have room for all tokens.

    Args:
      tokens: that it has room for.
      slots: that have a recurrent state (`state_slots`).
    """
    stages, slices = runner.ways.pipeline, runner.ways.slices

    def of_layer(layer: LayerShape) -> float:
        pages = 0.0 if layer.shares_kv else tokens * layer.kv_values_of(slices) * runner.format.kv_bytes
        return pages + slots * runner.state_bytes(layer)

    return sum(stage_places(layer, stages) * of_layer(layer) for layer in runner.model.layers)


def state_slots(requests: int) -> int:
    """Count the recurrent states of a lane: those of its requests, their snapshots, and one that padding has."""
    return (1 + SNAPSHOTS) * requests + 1


def kept_bytes(runner: Runner) -> float:
    """Compute the bytes of a token of the KV cache in a tier beside the devices, which keeps all devices' parts."""
    return kv_bytes(runner, 1, 0) * runner.ways.slices * runner.ways.pipeline


def request_bytes(runner: Runner, step: Step, *, slots: int, context: int) -> float:
    """Compute the bytes of what a device knows of requests: their tokens and options, and the inputs of a step.

    Args:
      slots: requests that a lane has room for; there is one slot more.
      context: tokens that each may have.
    """
    integers = (slots + 1) * (context + 2 + step.options)
    words = math.ceil(runner.model.vocab / WORD)
    integers += step.rows * (1 + step.pages) + step.chunks * (3 + step.pages) + (step.rows + step.chunks) * words
    in_stages = runner.ways.pipeline > 1
    if not step.chunks and (step.speculates or in_stages):  # how many speculative tokens each may have
        integers += step.rows
    integers += 3 if in_stages else 0 if step.chunks else 1  # the schedule; passes
    return INTEGER_BYTES * integers + 2 * FLAG_BYTES * step.chunks


def work_bytes(runner: Runner, step: Step) -> float:
    """Estimate the bytes of a pass: the stream twice, half of a layer's inner widths, and what choosing tokens takes.

    The branches for all options of sampling have room for their logits and options, whether or not a row uses them, and
    a step with prompts has room for the logits of some of their tokens.
    """
    model, slices, size = runner.model, runner.ways.slices, runner.format.number_bytes
    rows = math.ceil((step.rows + step.chunks) / step.micro_batches)
    tokens = math.ceil(step.rows / step.micro_batches) + step.tokens
    inner = max(layer.active_params for layer in model.layers) / model.hidden / 2 / slices
    logits = WHOLE_BYTES * model.vocab / slices
    options = step.options * INTEGER_BYTES
    sampled = rows * max(LOGITS_COPIES * logits, OPTION_COPIES * options)
    if runner.ways.pipeline > 1:  # the rows of all micro-batches while one is computed, and their results
        sampled += 0 if step.chunks else step.rows * options
        sampled += (step.rows + step.tokens * step.micro_batches) * RESULT_BYTES
    chunks = step.chunks / step.micro_batches
    of_prompts = min(step.tokens, chunks * PROMPT_POSITIONS) * logits
    return size * tokens * (2 * model.hidden + inner) + sampled + of_prompts
