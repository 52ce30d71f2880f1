"""The models of a server, which requests find by their names."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from jaxinfer.fields import shown
from jaxinfer.http.config import check_names
from jaxinfer.http.errors import BadRequestError
from jaxinfer.http.residency import PREEMPT_AFTER, Residency
from jaxinfer.http.served_model import ServedModel
from jaxinfer.serving import NotLoadedError

log = logging.getLogger(__name__)


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
