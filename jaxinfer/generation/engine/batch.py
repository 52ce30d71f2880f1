"""Inputs and results of the device: `Batch`, everything about a step, and `StepOutput`, plain values."""

import dataclasses
import functools
from array import array
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Self

import numpy as np

from jaxinfer.generation.engine.request import Sequence
from jaxinfer.generation.lora.peft import Adapter
from jaxinfer.generation.outputs import ExpertLoad, TokenLogprob


class PageBlock(NamedTuple):
    """The content of N pages of a lane; numpy on the host.

    Layers whose pages have the same shape share an array. With S stages of a pipeline, the pages of each stage come one
    after the other; so do those of the lanes in a stage.

    Attributes:
      kv: keys and values, [N, L, 2, page_size, Hkv, K], for each such group of L layers.
      scale: float32 [N, L, 2, Hkv] for each group if they are int8, else empty.
    """

    kv: tuple[Any, ...]
    scale: tuple[Any, ...] = ()

    def map(self, change: Callable[[Any], Any]) -> "PageBlock":
        """Change each array."""
        return PageBlock(tuple(map(change, self.kv)), tuple(map(change, self.scale)))

    @property
    def places(self) -> int:
        """The number of pages, padding included, of a block on the host, [S, N, ...]."""
        return self.kv[0].shape[1]


class StateBlock(NamedTuple):
    """The recurrent states of N rows of a lane: slots or snapshots; numpy on the host.

    With S stages of a pipeline, the rows of each stage come one after the other; so do those of the lanes in a stage.

    Attributes:
      arrays: [N, ...], all arrays of all layers with states.
    """

    arrays: tuple[Any, ...]


class Restored(NamedTuple):
    """Pages that come back to the cache before anything is read.

    Attributes:
      pages: the page that each of the block becomes; -1: none.
      block: their content, numpy [S, N, ...].
    """

    pages: list[int]
    block: PageBlock


class RestoredState(NamedTuple):
    """A snapshot of recurrent states that comes back before anything is read.

    Attributes:
      snapshot: its place.
      block: its content, numpy [S, 1, ...].
      pages: how many pages of the tier it took.
    """

    snapshot: int
    block: StateBlock
    pages: int


class Stored(NamedTuple):
    """A page, or snapshot, whose content the step brings to the host before anything else is written there.

    It is for a tier of the cache.

    Attributes:
      place: the page, or the place of the snapshot.
      key: the name of the content of the page, or of that at whose end the snapshot lies (`page_pool.page_key`).
    """

    place: int
    key: bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Admission:
    """A sequence that has just got its slot.

    Attributes:
      sequence: the sequence.
      slot: its place on the device while it runs.
      adapter_index: its LoRA adapter on the device, from 1; 0 is none.
      token_ids: its tokens so far.
      num_cached_tokens: tokens whose keys and values the cache has, or that are on their way from a tier.
      decodes: whether only its last token still has to go through the model, so that it decodes at once.
      copy: the (source, target) page to copy before anything is written, or None.
      snapshot: the snapshot of recurrent states to copy into the slot, or None.
    """

    sequence: Sequence
    slot: int
    adapter_index: int
    token_ids: list[int]
    num_cached_tokens: int
    decodes: bool
    copy: tuple[int, int] | None = None
    snapshot: int | None = None


@dataclasses.dataclass(slots=True, eq=False)  # neither frozen nor by keyword: a prompt has many
class Chunk:
    """A part of a prompt: `count` known tokens of a sequence from `start` on.

    Attributes:
      sequence: the sequence.
      slot: its place on the device.
      start: the position of the first token.
      count: how many tokens.
      last: whether these are the last known tokens.
      pages: the sequence's pages, in order; int32. An encoder has none.
      bitmask: uint32 [ceil(V / 32)], the tokens that may be chosen after the last chunk; None: all.
      error: why the sequence cannot go on; its other results are then ignored.
    """

    sequence: Sequence
    slot: int
    start: int
    count: int
    last: bool
    pages: array[int]
    bitmask: np.ndarray | None = None
    error: str | None = None

    @property
    def chooses(self) -> bool:
        """Whether a token is chosen after the chunk."""
        return self.last and not self.sequence.request.pooling


class DecodeRow(NamedTuple):
    """A decoding sequence: one token, and perhaps speculative ones, in every pass.

    Attributes:
      sequence, slot, pages, bitmask, error: as in `Chunk`.
      num_speculative_tokens: how many tokens the proposer may add in a pass.
    """

    sequence: Sequence
    slot: int
    pages: array[int]
    bitmask: np.ndarray | None = None
    error: str | None = None
    num_speculative_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Failure:
    """A sequence that ends before it could run, and why."""

    sequence: Sequence
    message: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """One step of the engine.

    Attributes:
      admissions: sequences that have just got their slot.
      adapter_uploads: (adapter index, adapter) to place on the device before anything runs.
      snapshots: (slot, snapshot): recurrent states to copy from slots before slots are filled.
      stored: pages to bring to the host before anything runs.
      stored_states: snapshots to bring to the host, after those of `snapshots` are there.
      restored: pages that come from a tier before anything runs, for each sequence that gets some.
      restored_states: snapshots that come from a tier before slots are filled.
      chunks: chunks of prompts.
      rows: sequences that decode.
      passes: passes through the model; 1 if there are chunks.
      num_speculative_tokens: how many speculative tokens a row may have in a pass.
      micro_batches: in how many parts the rows of a decode step go through the stages of a pipeline.
      failures: sequences that the step leaves out because they cannot run.
      joined: the steps of several lanes that this one joins, in their order; none: it is one lane's.
    """

    admissions: tuple[Admission, ...] = ()
    adapter_uploads: tuple[tuple[int, Adapter], ...] = ()
    snapshots: tuple[tuple[int, int], ...] = ()
    stored: tuple[Stored, ...] = ()
    stored_states: tuple[Stored, ...] = ()
    restored: tuple[Restored, ...] = ()
    restored_states: tuple[RestoredState, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    rows: tuple[DecodeRow, ...] = ()
    passes: int = 1
    num_speculative_tokens: int = 0
    micro_batches: int = 1
    failures: tuple[Failure, ...] = ()
    joined: tuple["Batch", ...] = ()

    @classmethod
    def of_lanes(cls, lanes: Iterable[Self]) -> Self:
        """Join the steps of several lanes, which have equally many passes unless they have no rows."""
        lanes = tuple(lanes)

        def join(field: str) -> tuple[Any, ...]:
            return tuple(part for lane in lanes for part in getattr(lane, field))

        tuples = [field.name for field in dataclasses.fields(cls) if field.default == () and field.name != "joined"]
        joined = {field: join(field) for field in tuples}
        return cls(
            **joined,
            passes=max((lane.passes for lane in lanes if lane.rows), default=1),
            num_speculative_tokens=max(lane.num_speculative_tokens for lane in lanes),
            micro_batches=max(lane.micro_batches for lane in lanes),
            joined=lanes,
        )

    @property  # cached, a step that has one lane would refer to itself, and so keep its blocks until it is collected
    def lanes(self) -> tuple["Batch", ...]:
        """The step of each lane, in their order."""
        return self.joined or (self,)

    def __bool__(self) -> bool:
        """Return whether there is anything to run."""
        return bool(self.chunks or self.rows)

    @property
    def copies(self) -> list[tuple[int, int]]:
        """(source, target) pages of a lane to copy before anything is written."""
        return [admission.copy for admission in self.admissions if admission.copy is not None]

    @property
    def used_snapshots(self) -> list[tuple[int, int]]:
        """(snapshot, slot) of a lane: recurrent states to copy to slots, after those of `snapshots`."""
        return [(admission.snapshot, admission.slot) for admission in self.admissions if admission.snapshot is not None]

    @functools.cached_property
    def keeps(self) -> bool:
        """Whether something comes to the host for a tier."""
        return bool(self.stored or self.stored_states)

    @property
    def num_restored_pages(self) -> int:
        """How many pages come from a tier, in all lanes, those of states included."""
        states = sum([state.pages for state in self.restored_states])
        return states + sum([page >= 0 for pages, _ in self.restored for page in pages])

    @functools.cached_property
    def parts(self) -> tuple[Chunk | DecodeRow, ...]:
        """Chunks, then rows: the order of `StepOutput.outputs`."""
        return self.chunks + self.rows

    @functools.cached_property
    def sequences(self) -> list[Sequence]:
        """All sequences that the step runs, each once."""
        return list(dict.fromkeys([part.sequence for part in self.parts]))

    @functools.cached_property
    def growth(self) -> list[tuple[Sequence, int, int]]:
        """The fewest and the most tokens that each sequence gets, unless something ends it."""
        lanes = self.lanes
        growth = [(chunk.sequence, 1, 1) for lane in lanes for chunk in lane.chunks if chunk.last]
        for lane in lanes:
            least, most = lane.passes, lane.passes * (1 + lane.num_speculative_tokens)
            growth += [(row.sequence, least, most) for row in lane.rows]
        return growth


class SequenceOutput(NamedTuple):
    """The results of a step for one chunk or row.

    Attributes:
      token_ids: new tokens, in order.
      logprobs: one entry per new token, if asked for.
      prompt_logprobs: (position, entry) of the prompt tokens after those of a chunk, if asked for.
      embedding: float32 [D], a chunk's vector, for a pooling request (`Pooler`).
      num_draft_tokens: tokens proposed by speculation.
      num_accepted_tokens: proposed tokens that were right.
      expert_load: where its tokens went in a mixture of experts, if the engine counts them.
    """

    token_ids: list[int] | tuple[()] = ()
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[tuple[int, TokenLogprob]] | None = None
    embedding: np.ndarray | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    expert_load: ExpertLoad | None = None


NOTHING = SequenceOutput()
"""The results for a chunk after which no token is chosen."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOutput:
    """The results of a step, as plain values.

    Attributes:
      outputs: one for each of `Batch.parts`.
      stored: blocks with each lane's pages of `Batch.stored`, in their order, numpy [S, N, ...]; and a block for each
        of its `Batch.stored_states`, perhaps with others after them.
    """

    outputs: list[SequenceOutput]
    stored: list[list[PageBlock | StateBlock]] = dataclasses.field(default_factory=list)
