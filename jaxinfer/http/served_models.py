"""The models of a server: their names, their adapters, and whether they are loaded."""

import asyncio
import enum
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from jaxinfer.fields import shown
from jaxinfer.generation.api.async_llm import AsyncLLM
from jaxinfer.http.config import check_names
from jaxinfer.http.errors import BadRequestError
from jaxinfer.http.residency import LONGEST_TURN, PREEMPT_AFTER, Residency
from jaxinfer.http.turns import TurnMemory
from jaxinfer.serving import NotLoadedError
from jaxinfer.serving.use import Use
from jaxinfer.text.parsing import AnswerFormat

log = logging.getLogger(__name__)

RETRY_SECONDS = 10.0
"""Seconds after a failure to load a model until the next attempt."""


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


class ModelChoice(NamedTuple):
    """The model, and perhaps the adapter, that a request asks for.

    Attributes:
      model: the model.
      name: the name that the client gave, or the model's.
      adapter: the adapter's name in the engine; None: the model as it is.
    """

    model: ServedModel
    name: str
    adapter: str | None


class ServedModels:
    """All models of a server. Requests find them by name; no name is ever a path.

    Args:
      models: the models.
      preempt_after: as in `Residency`.

    Attributes:
      residency: decides which of them have memory.

    Raises ValueError unless all names are distinct.
    """

    def __init__(self, models: Iterable[ServedModel], *, preempt_after: float | None = PREEMPT_AFTER):
        self._models, self._same = list(models), dict[str, ServedModel]()
        check_names(name for model in self._models for name in (model.name, *model.adapters))
        self.residency = Residency(self._models, preempt_after=preempt_after)
        self._loading = dict[str, asyncio.Task[None]]()

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    @property
    def distinct(self) -> list[ServedModel]:
        """The models that are loaded: all but those that share another's files."""
        return [model for model in self._models if model.name not in self._same]

    def share(self, model: ServedModel, other: str) -> None:
        """Have requests for one model answered by another, which has the same files."""
        self._same[model.name] = self.find(other).model

    @property
    def only(self) -> ServedModel | None:
        """The model, if there is one only."""
        return self._models[0] if len(self._models) == 1 else None

    @property
    def are_ready(self) -> bool:
        """Whether requests for all are taken."""
        return all(model.is_ready for model in self.distinct)

    @property
    def are_running(self) -> bool:
        """Whether all take requests, or will once they are loaded."""
        return all(model.is_running for model in self._models)

    @property
    def names(self) -> list[str]:
        """The names of all models and adapters, each model's adapters after it."""
        return [name for model in self._models for name in (model.name, *model.adapters)]

    def find(self, name: str) -> ModelChoice:
        """Find a model or an adapter, loaded or not; an empty name stands for the only model.

        Raises BadRequestError if there is none.
        """
        if not name:
            if self.only is None:
                raise BadRequestError(f"model is missing; models: {', '.join(self.names)}.", param="model")
            return ModelChoice(self.only, self.only.name, None)
        for model in self._models:
            if name == model.name:
                return ModelChoice(self._same.get(name, model), name, None)
            if (adapter := model.adapters.get(name)) is not None:
                return ModelChoice(self._same.get(model.name, model), name, adapter)
        raise BadRequestError(
            f"there is no model {shown(name)}; models: {', '.join(self.names)}.",
            param="model",
            status=404,
            code="model_not_found",
        )

    async def load(self, model: ServedModel, timeout: float | None) -> None:
        """Load a model on demand; without its weights, which come once it has a request.

        Args:
          timeout: seconds to wait for it at most; None: any time.

        Raises NotLoadedError if it is not loaded in time.
        """
        try:
            async with asyncio.timeout(timeout):
                while model.loaded is None and model.retry_at is None:  # it may be unloaded as soon as it has loaded
                    await asyncio.shield(self._begin_loading(model))
        except TimeoutError:
            raise NotLoadedError(f"the model {model.name!r} was not loaded in time; try again later.") from None

    def _begin_loading(self, model: ServedModel) -> "asyncio.Task[None]":
        """Load a model on demand, once for all requests that wait for it."""
        if (task := self._loading.get(model.name)) is None:
            task = self._loading[model.name] = asyncio.create_task(self._load(model))
            task.add_done_callback(lambda _: self._loading.pop(model.name))
        return task

    async def _load(self, model: ServedModel) -> None:
        """Load a model, without its weights. If that fails, `check_failure` tells."""
        try:
            await asyncio.to_thread(model.load, asleep=True)
        except NotLoadedError:
            return
        except Exception as error:
            log.error("%s cannot be loaded: %s", model.name, error)
            return
        self.residency.watch(model)

    async def change(self, function: Callable[[], object]) -> None:
        """Have a function change models in the thread of the residency, and wait for it. Raises what it raises."""
        await asyncio.wrap_future(self.residency.run(function))

    def close(self, *, drain: bool) -> None:
        """Close all models, with `drain` once their requests have ended."""
        self.residency.close()
        for model in self._models:
            model.close(drain=drain)
        self.residency.join()
