"""The models of a server: their names, their adapters, and whether they are loaded."""

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from jaxinfer.fields import shown
from jaxinfer.generation.api.async_llm import AsyncLLM
from jaxinfer.http.config import check_names
from jaxinfer.http.errors import BadRequestError, LoadingError
from jaxinfer.http.turns import TurnMemory
from jaxinfer.text.parsing import AnswerFormat


class ServedModel:
    """A model that clients ask for by its name, from before it is loaded until it is closed.

    Args:
      name: the name.
      load: returns the model. It is called once, by `load`.
      adapter_folders: the folders from which clients may load LoRA adapters.
      tool_call_parser: how it writes calls; None: as its chat template has it.
      reasoning_parser: how it writes reasoning; None: as its chat template has it.

    Attributes:
      adapters: the LoRA adapters, by the names that clients know; the values are their names in the engine.
      loads_adapter: held while an adapter is read.
      turns: its latest answers in chats.
    """

    def __init__(
        self,
        name: str,
        load: Callable[[], AsyncLLM],
        adapter_folders: tuple[Path, ...] = (),
        *,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
    ):
        self._parsers = {"calls": tool_call_parser, "reasoning": reasoning_parser}
        self._formats = dict[tuple[str | None, bool], AnswerFormat]()
        self.name, self.adapters, self.adapter_folders = name, dict[str, str](), adapter_folders
        self.loads_adapter, self.turns = asyncio.Lock(), TurnMemory()
        self._load, self._llm, self._closed = load, None, False
        self._lock = threading.Lock()  # `close` may come while another thread loads

    def load(self) -> None:
        """Load the model. Raises what loading raises."""
        llm = self._load()
        adapters = None if llm.engine.adapters is None else llm.engine.adapters.names
        with self._lock:
            self.adapters = {name: name for name in adapters or ()}
            self._llm = llm
            closed = self._closed
        if closed:
            llm.close()

    @property
    def llm(self) -> AsyncLLM:
        """The model. Raises LoadingError until it is loaded."""
        if self._llm is None:
            raise LoadingError(f"the model {self.name!r} is being loaded; try again later.")
        return self._llm

    def answer_format(self, chat_template: str | None, *, has_tools: bool) -> AnswerFormat:
        """Find out how the model writes calls and reasoning, after one of its chat templates, or the text of another.

        Raises ValueError if it has no such template.
        """
        assert self.llm.tokenizer is not None, "it chats"
        templates = self.llm.tokenizer.chat_templates
        key = (chat_template, has_tools)
        if (form := self._formats.get(key)) is None:
            text = templates.text_of(chat_template, has_tools=has_tools)
            form = AnswerFormat.of_template(text, **self._parsers)
            if not templates.is_text(chat_template):  # of which clients may send any number
                self._formats[key] = form
        return form

    @property
    def is_loaded(self) -> bool:
        """Whether it is loaded. It stays so after `close`."""
        return self._llm is not None

    @property
    def is_running(self) -> bool:
        """Whether it takes requests, or will once it is loaded."""
        return not self._closed and (self._llm is None or self._llm.is_running)

    def close(self, *, drain: bool) -> None:
        """Close the model as `AsyncLLM.close` does. One that is being loaded closes when that ends."""
        with self._lock:
            self._closed = True
        if self._llm is not None:
            self._llm.close(drain=drain)


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

    Raises ValueError unless all names are distinct.
    """

    def __init__(self, models: Iterable[ServedModel]):
        self._models = list(models)
        check_names(name for model in self._models for name in (model.name, *model.adapters))

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    @property
    def only(self) -> ServedModel | None:
        """The model, if there is one only."""
        return self._models[0] if len(self._models) == 1 else None

    @property
    def are_loaded(self) -> bool:
        """Whether all are loaded."""
        return all(model.is_loaded for model in self._models)

    @property
    def are_running(self) -> bool:
        """Whether all take requests, or will once they are loaded."""
        return all(model.is_running for model in self._models)

    @property
    def names(self) -> list[str]:
        """The names of all models and adapters, each model's adapters after it."""
        return [name for model in self._models for name in (model.name, *model.adapters)]

    def find(self, name: str) -> ModelChoice:
        """Find a model or an adapter; an empty name stands for the only model.

        Raises BadRequestError if there is none; LoadingError while that is not known.
        """
        if not name:
            if self.only is None:
                raise BadRequestError(f"model is missing; models: {', '.join(self.names)}.", param="model")
            return ModelChoice(self.only, self.only.name, None)
        for model in self._models:
            if name == model.name:
                return ModelChoice(model, name, None)
            if (adapter := model.adapters.get(name)) is not None:
                return ModelChoice(model, name, adapter)
        if not self.are_loaded:  # a model that is being loaded may have an adapter of this name
            raise LoadingError("models are being loaded; try again later.")
        raise BadRequestError(
            f"there is no model {shown(name)}; models: {', '.join(self.names)}.",
            param="model",
            status=404,
            code="model_not_found",
        )

    def close(self, *, drain: bool) -> None:
        """Close all models, with `drain` once their requests have ended."""
        for model in self._models:
            model.close(drain=drain)
