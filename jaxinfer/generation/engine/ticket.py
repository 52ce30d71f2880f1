"""A request between its caller, in any thread or event loop, and the thread that steps the engine."""

from typing import Any

import numpy as np

from jaxinfer.generation.engine.request import Sequence
from jaxinfer.generation.engine.view import RequestSnapshot, RequestView
from jaxinfer.generation.outputs import FinishReason, RequestOutput
from jaxinfer.serving.errors import FailedError, ServingError, with_output
from jaxinfer.serving.ticket import Reader, Ticket


class RequestTicket(Ticket[Any]):
    """A request that has not ended. Its outcome is a RequestOutput (for a reader its snapshot), a vector, or an error.

    Attributes:
      sequences: its completions, which belong to the engine's thread.
      limited: whether it may be refused since it would wait too long (`queue_time.py`).
      started: when it had its place in the batch, on the loop's clock; None before.
      error: why it was given up before it had ended; None unless it was, and for its caller's own cancellation.
    """

    key: str

    def __init__(
        self,
        sequences: list[Sequence],
        *,
        owner: object,
        reader: Reader[RequestSnapshot] | None = None,
        deadline: float | None = None,
        limited: bool = True,
    ):
        super().__init__(sequences[0].request_id, owner=owner, reader=reader, deadline=deadline)
        self.sequences, self.limited = sequences, limited
        self.started: float | None = None
        self.error: ServingError | None = None
        self._view = None if sequences[0].request.pooling else RequestView(sequences)
        self._num_tokens = sum([len(sequence.token_ids) for sequence in sequences])

    @property
    def priority(self) -> int:
        """Its priority: a smaller number runs earlier."""
        return self.sequences[0].params.priority

    @property
    def finished(self) -> bool:
        """Whether all completions have ended."""
        return None not in [sequence.finish_reason for sequence in self.sequences]

    def advance(self) -> bool:
        """Give the reader a snapshot, if it wants one and there are new tokens; returns whether it got one."""
        if self.reader is None or self.reader.final_only or self._view is None:
            return False
        count = sum([len(sequence.token_ids) for sequence in self.sequences])
        if count == self._num_tokens:  # a part of the prompt was computed
            return False
        self._num_tokens = count
        self.reader.newest = self._view.snapshot()
        return True

    def result(self) -> RequestOutput | RequestSnapshot | np.ndarray | ServingError:
        """The outcome of a request whose completions have ended."""
        snapshot = None if self._view is None else self._view.snapshot()
        if self.error is not None and any(each.finish_reason is FinishReason.ABORT for each in self.sequences):
            return with_output(self.error, snapshot and snapshot.output())
        for sequence in self.sequences:
            if sequence.finish_reason is FinishReason.ERROR:
                return FailedError(str(sequence.error), snapshot and snapshot.output())
        if snapshot is not None:
            return snapshot.output() if self.reader is None else snapshot
        vector = self.sequences[0].embedding
        if vector is None or self.sequences[0].finish_reason is FinishReason.ABORT:
            return FailedError("The request was aborted.")
        return vector
