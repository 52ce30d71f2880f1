"""A model of a server: whether it is loaded, its adapters, and how often it is asked."""

import asyncio
import enum
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from jaxinfer.generation.api.async_llm import AsyncLLM
from jaxinfer.http.turns import TurnMemory
from jaxinfer.serving import NotLoadedError
from jaxinfer.serving.use import Use
from jaxinfer.text.parsing import AnswerFormat

RETRY_SECONDS = 10.0
"""Seconds after a failure to load a model until the next attempt."""
LONGEST_TURN = 30.0
"""Seconds after which the running requests of a model may be interrupted in any case."""


class State(enum.Enum):
    """Whether a model can answer; the values are those of `/v1/models`."""

    UNLOADED = "unloaded"  # a request loads it
    LOADING = "loading"
    LOADED = "loaded"
    SLEEPING = "sleeping"  # others may take its memory; a request wakes it, unless it is held asleep
    FAILED = "failed"  # a request tries again, after `RETRY_SECONDS`


class ServedModel:
    """A model that clients ask for by its name, from before it is loaded until the server ends.

    Args:
      name: the name.
      load: returns the model, asleep if it is to be so.
      adapter_folders: the folders from which clients may load LoRA adapters.
      adapters: the names of the LoRA adapters that it is loaded with.
      tool_call_parser: how it writes calls; None: as its chat template has it.
      reasoning_parser: how it writes reasoning; None: as its chat template has it.
      on_demand: whether the first request loads it; otherwise it is loaded at the start.
      pinned: whether it never makes room for another.
      ttl: seconds without a request after which it is unloaded; None: never.

    Attributes:
      adapters: the LoRA adapters, by the names that clients know; the values are their names in the engine.
      loads_adapter: held while an adapter is read.
      turns: its latest answers in chats.
      use: how often it was asked.
      held: whether it sleeps until `/wake_up`, whoever asks.
      load_seconds: what the last load, or waking up, took; None before any.
      woken_at: when it was woken up last, by `time.perf_counter`.
      interruptions: how many of its last turns were interrupted.
    """

    def __init__(
        self,
        name: str,
        load: Callable[[bool], AsyncLLM],
        adapter_folders: tuple[Path, ...] = (),
        *,
        adapters: Iterable[str] = (),
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        on_demand: bool = False,
        pinned: bool = False,
        ttl: float | None = None,
    ):
        self._parsers = {"calls": tool_call_parser, "reasoning": reasoning_parser}
        self._formats = dict[tuple[str | None, bool], AnswerFormat]()
        self.name, self.adapter_folders, self._own_adapters = name, adapter_folders, tuple(adapters)
        self.adapters = {adapter: adapter for adapter in self._own_adapters}
        self.on_demand, self.pinned, self.ttl = on_demand, pinned, ttl
        self.loads_adapter, self.turns, self.use = asyncio.Lock(), TurnMemory(), Use()
        self.held = False
        self.load_seconds: float | None = None
        self.woken_at, self.interruptions = 0.0, 0
        self._load, self._llm, self._closed = load, None, False
        self._loading = threading.Lock()  # held while it is loaded
        self._lock = threading.Lock()  # `close` may come while another thread loads
        self._error: tuple[Exception, float] | None = None

    def load(self, *, asleep: bool = False) -> AsyncLLM:
        """Load the model, unless it is loaded; `asleep` without its weights. From any thread.

        Raises what loading raises; NotLoadedError for `RETRY_SECONDS` after it has failed.
        """
        with self._loading:
            if self._llm is not None:
                return self._llm
            self.check_failure()
            try:
                llm = self._load(asleep)
            except Exception as error:
                self.fail(error)
                self.on_demand = True  # a later request tries again
                raise
            self.use.last = time.perf_counter()  # its `ttl` begins now
            with self._lock:
                self._llm, self._error = llm, None
                closed = self._closed
            if closed:
                llm.close()
            return llm

    def fail(self, error: Exception) -> None:
        """Note that it cannot be loaded, or woken up, for a while."""
        self._error = error, time.perf_counter()

    def woken(self, begun: float) -> None:
        """Note that it has memory again, and when waking it up began, by `time.perf_counter`."""
        now = time.perf_counter()
        self.load_seconds, self.woken_at, self._error = now - begun, now, None

    @property
    def turn_seconds(self) -> float:
        """The seconds from `woken_at` in which its requests are not interrupted for another model."""
        return min((self.load_seconds or 0.0) * 2**self.interruptions, LONGEST_TURN)

    @property
    def retry_at(self) -> float | None:
        """When it may be loaded again after a failure, by `time.perf_counter`; None: at once."""
        if self._error is None:
            return None
        _, when = self._error
        return when + RETRY_SECONDS if time.perf_counter() < when + RETRY_SECONDS else None

    def check_failure(self) -> None:
        """Raise NotLoadedError if loading it has failed a short time ago."""
        if self._error is not None and (retry_at := self.retry_at) is not None:
            error, _ = self._error
            raise self.not_loaded(retry_at - time.perf_counter()) from error

    def not_loaded(self, retry_after: float | None = None) -> NotLoadedError:
        """Make the error of requests while it cannot be loaded. It does not tell why: that has paths."""
        wait = RETRY_SECONDS if retry_after is None else retry_after
        return NotLoadedError(f"the model {self.name!r} cannot be loaded; the server's log says why.", wait)

    @property
    def loaded(self) -> AsyncLLM | None:
        """The model, if it is loaded or sleeps."""
        return self._llm

    @property
    def llm(self) -> AsyncLLM:
        """The model. Raises NotLoadedError until it is loaded."""
        if (llm := self._llm) is None:
            self.check_failure()
            raise NotLoadedError(f"the model {self.name!r} is being loaded; try again later.")
        return llm

    @property
    def state(self) -> State:
        """Whether it can answer."""
        if self._error is not None:
            return State.FAILED
        if (llm := self._llm) is not None:
            return State.SLEEPING if llm.is_sleeping else State.LOADED
        return State.LOADING if self._loading.locked() or not self.on_demand else State.UNLOADED

    def unload(self) -> None:
        """Close the model once its requests have ended; the next request loads it again. From any thread."""
        with self._loading:
            with self._lock:
                llm, self._llm, self.on_demand = self._llm, None, True
            if llm is not None:
                llm.close(drain=True)
                self.adapters = {adapter: adapter for adapter in self._own_adapters}
                self._formats.clear()

    def answer_format(self, chat_template: str | None, *, has_tools: bool) -> AnswerFormat:
        """Find out how the model writes calls and reasoning, after one of its chat templates, or the text of another.

        Raises ValueError if it has no such template.
        """
        tokenizer = self.llm.tokenizer
        assert tokenizer is not None, "it chats"
        templates = tokenizer.chat_templates
        key = (chat_template, has_tools)
        if (form := self._formats.get(key)) is None:
            text = templates.text_of(chat_template, has_tools=has_tools)
            form = AnswerFormat.of_template(text, **self._parsers)
            if not templates.is_text(chat_template):  # of which clients may send any number
                self._formats[key] = form
        return form

    @property
    def is_ready(self) -> bool:
        """Whether a request is taken: it is loaded, or will be when one comes."""
        return self._llm is not None or self.on_demand or self._error is not None

    @property
    def is_running(self) -> bool:
        """Whether it takes requests, or will once it is loaded."""
        return not self._closed and ((llm := self._llm) is None or llm.is_running)

    def close(self, *, drain: bool) -> None:
        """Close the model as `AsyncLLM.close` does. One that is being loaded closes when that ends."""
        with self._lock:
            self._closed = True
        if (llm := self._llm) is not None:
            llm.close(drain=drain)
