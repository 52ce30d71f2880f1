"""An encoder's side of the engine: no pages, no slots, no tokens to choose; every prompt goes through in one pass."""

import bisect
import dataclasses
import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.compiled import Bucket, CostRecords, Program, ProgramCache, compile_program, powers, round_up
from jaxinfer.generation.config import EngineConfig
from jaxinfer.generation.request import FinishReason, Sequence
from jaxinfer.generation.runner import Flight
from jaxinfer.generation.scheduler import PRIORITY_WEIGHT, Batch, Piece
from jaxinfer.models.loading import LoadedModel

SHORTEST = 16
OPTIONS = ("slots", "context", "token_budget", "overlap", "kernels")
"""The fields of `EngineConfig` that mean something here."""


class EncoderSizes:
    """The shapes that an encoder's batches are padded to.

    Attributes:
      lengths: tokens a row. batches: rows.
    """

    def __init__(self, config: EngineConfig):
        for field in dataclasses.fields(config):
            if field.name not in OPTIONS and (value := getattr(config, field.name)) != field.default:
                raise ValueError(
                    f"EngineConfig.{field.name}={value!r} is for decoders; an encoder takes {', '.join(OPTIONS)}."
                )
        self.config = config
        self.lengths = powers(4, min(SHORTEST, config.context), config.context)
        self.batches = powers(2, 1, config.slots)

    def length(self, sequence: Sequence) -> int:
        """Tokens of the row that a prompt is padded to."""
        return round_up(sequence.prompt_length, self.lengths)

    def most(self, length: int) -> int:
        """Rows of this length in a batch, under the token budget."""
        return min(self.config.slots, max(1, self.config.token_budget // length))


class EncoderScheduler:
    """A queue in the engine's order; a batch is the first prompt and the next ones that pad to the same length."""

    stepwise = False  # no step needs what the one before has found

    def __init__(self, config: EngineConfig):
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.dropped: list[Sequence] = []
        self._sizes = EncoderSizes(config)
        self._arrivals = itertools.count()

    def check(self, sequence: Sequence) -> None:
        """Nothing to refuse: a prompt within the context always fits."""

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        sequence.order = next(self._arrivals) + PRIORITY_WEIGHT * sequence.params.priority
        sequence.arrive()
        bisect.insort(self.waiting, sequence, key=_order)

    def schedule(self, steps: int = 1, drafts: int = 0) -> Batch | None:
        """The next batch, or None if nothing waits; `steps` and `drafts` are for decoders."""
        if not self.waiting:
            return None
        length = self._sizes.length(self.waiting[0])
        alike = (s for s in self.waiting if self._sizes.length(s) == length)
        chosen = tuple(itertools.islice(alike, self._sizes.most(length)))
        self.waiting = [s for s in self.waiting if s not in chosen]
        self.running += chosen
        pieces = tuple(Piece(s, 0, s.prompt_length, last=True) for s in chosen)
        return Batch(admitted=chosen, copies=(), pieces=pieces, rows=(), steps=1, drafts=0)

    def commit(self, batch: Batch) -> list[Sequence]:
        """After a batch has come back; returns its sequences."""
        self.running = [s for s in self.running if not s.finished]
        return batch.sequences

    def abort(self, request_id: str) -> None:
        """Give up a request, whether it waits or runs."""
        for queue in (self.waiting, self.running):
            for sequence in [s for s in queue if s.request_id == request_id]:
                sequence.finish_reason = FinishReason.ABORT
                queue.remove(sequence)

    def restart(self) -> None:
        """After a step that failed: what runs and has not ended waits again."""
        self.waiting = sorted((s for s in (*self.waiting, *self.running) if not s.finished), key=_order)
        self.running = []

    def check_integrity(self) -> None:
        """Raise AssertionError unless every sequence is in one queue, in order, and not at its end."""
        assert self.waiting == sorted(self.waiting, key=_order)
        sequences = [*self.waiting, *self.running]
        assert len(set(map(id, sequences))) == len(sequences), "a sequence is queued twice"
        assert not any(s.finished for s in sequences)


def _order(sequence: Sequence) -> int:
    return sequence.order


class EncoderRunner:
    """The device side of an engine on an encoder: one program, "embed", for each number of rows and of tokens."""

    def __init__(self, model: LoadedModel, config: EngineConfig):
        self.model, self._sizes, self._kernels = model, EncoderSizes(config), config.kernels
        self.processors: dict = {}  # none: nothing is chosen
        self._leaves, self._treedef = jax.tree.flatten(model.state)
        self.programs = ProgramCache(self._build)
        self._records = CostRecords(f"{model.config} {model.weights} {model.mesh} {config}")
        self._ready = 0.0  # when the last step had come back

    def _build(self, name: str, bucket: Bucket) -> Program:
        sizes, graphdef, treedef = dict(bucket), self.model.graphdef, self._treedef
        tokens = jax.ShapeDtypeStruct((sizes["batch"], sizes["tokens"]), jnp.int32)

        def embed(leaves: list[jax.Array], tokens: jax.Array, positions: jax.Array) -> jax.Array:
            model = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
            return model.pool(model(tokens, positions), positions)

        args = self._leaves, tokens, tokens
        return compile_program(name, bucket, embed, args, mesh=self.model.mesh, kernels=self._kernels)

    def compile_ahead(self, sequences: Iterable[Sequence] | None = None) -> int:
        """Compile what these sequences need together, or any (None); returns how many programs were missing."""
        return self.programs.compile_ahead(self._every() if sequences is None else self._wanted(sequences))

    def _every(self) -> Iterator[tuple[str, dict[str, int]]]:
        for length in self._sizes.lengths:
            for batch in sorted({round_up(n, self._sizes.batches) for n in range(1, self._sizes.most(length) + 1)}):
                yield "embed", {"batch": batch, "tokens": length}

    def _wanted(self, sequences: Iterable[Sequence]) -> Iterator[tuple[str, dict[str, int]]]:
        """Whole batches of each length, and what remains."""
        counts: defaultdict[int, int] = defaultdict(int)
        for sequence in sequences:
            counts[self._sizes.length(sequence)] += 1
        for length, count in counts.items():
            most = self._sizes.most(length)
            for rows in {min(count, most), count % most} - {0}:
                yield "embed", {"batch": round_up(rows, self._sizes.batches), "tokens": length}

    def decode_steps(self, rows: int) -> int:
        """One: a prompt is through after its pass."""
        return 1

    def drafts(self, rows: Iterable[Sequence]) -> int:
        """None."""
        return 0

    def launch(self, batch: Batch) -> Flight:
        """Send a batch to the device, without waiting for it; `Flight.result` is float32 [rows, D]."""
        launched, sequences = time.perf_counter(), batch.sequences
        rows, width = round_up(len(sequences), self._sizes.batches), self._sizes.length(sequences[0])
        tokens, positions = np.zeros((rows, width), np.int32), np.full((rows, width), -1, np.int32)
        for row, sequence in enumerate(sequences):
            length = sequence.prompt_length
            tokens[row, :length], positions[row, :length] = sequence.ids, np.arange(length)
        program = self.programs.get("embed", batch=rows, tokens=width)
        result = program(self._leaves, tokens, positions)
        result.copy_to_host_async()
        return Flight(batch, program, result, launched)

    def collect(self, flight: Flight) -> None:
        """Wait for a batch and give its vectors to its sequences."""
        vectors, now = np.asarray(flight.result), time.perf_counter()
        flight.program.cost.record(now - max(flight.launched, self._ready))
        self._ready = now
        for sequence, vector in zip(flight.batch.sequences, vectors, strict=False):  # the last rows are padding
            if not sequence.finished:
                sequence.pool(vector, 0, last=True)  # pooled already; only its direction counts

    def restart(self) -> None:
        """Nothing is kept between steps."""

    def save_costs(self) -> None:
        """Add what the programs cost to the records of this kind of device."""
        self._records.save(self.programs)
