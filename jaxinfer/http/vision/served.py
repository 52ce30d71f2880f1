"""The systems of experts and elastic services of a server: their names, and whether they are loaded."""

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from jaxinfer.elastic.service import Service
from jaxinfer.experts.system import System
from jaxinfer.fields import shown
from jaxinfer.http.errors import BadRequestError
from jaxinfer.serving import NotLoadedError


class _ServedOne[Kind: System | Service]:
    """A system or service that clients ask for by its name, from before it is loaded until it is closed.

    Args:
      name: the name.
      load: returns it. It is called once, by `load`.
      image_folders: the folders with images that clients may name; none: they may name none.
    """

    def __init__(self, name: str, load: Callable[[], Kind], image_folders: Iterable[Path] = ()):
        self.name, self.image_folders = name, tuple(image_folders)
        self._load, self._held, self._closed = load, None, False
        self._lock = threading.Lock()  # `close` may come while another thread loads

    def load(self) -> None:
        """Load it. Raises what loading raises."""
        held = self._load()
        with self._lock:
            self._held, closed = held, self._closed
        if closed:
            held.close(drain=False)

    @property
    def held(self) -> Kind:
        """The system or service. Raises NotLoadedError until it is loaded."""
        if self._held is None:
            raise NotLoadedError(f"{self.name!r} is being loaded; try again later.")
        return self._held

    @property
    def is_loaded(self) -> bool:
        """Whether it is loaded. It stays so after `close`."""
        return self._held is not None

    @property
    def is_running(self) -> bool:
        """Whether it takes requests, or will once it is loaded."""
        return not self._closed and (self._held is None or self._held.is_running)

    @property
    def state(self) -> str:
        """A word for clients: "loading", "running" or "closed"."""
        if not self.is_running:
            return "closed"
        return "running" if self.is_loaded else "loading"

    def close(self, *, drain: bool) -> None:
        """Close it, with `drain` once its requests have ended. One that is being loaded closes when that ends."""
        with self._lock:
            self._closed = True
        if self._held is not None:
            self._held.close(drain=drain)


def prepared(service: Service) -> Service:
    """Prepare a service with tasks for queries, which then wait for nothing to be compiled."""
    if service.tasks:
        service.measure_latency()
        service.start()
    return service


class ServedSystem(_ServedOne[System]):
    """A system of experts."""

    @property
    def system(self) -> System:
        """The system. Raises NotLoadedError until it is loaded."""
        return self.held


class ServedService(_ServedOne[Service]):
    """An elastic service.

    Args:
      name: the name.
      load: returns the service.
      image_folders: the folders with images that clients may name.
      dataset_folders: the folders with data sets from which clients may register tasks; none: they may register none.

    Attributes:
      registering: held while a task is registered.
    """

    def __init__(
        self,
        name: str,
        load: Callable[[], Service],
        image_folders: Iterable[Path] = (),
        dataset_folders: Iterable[Path] = (),
    ):
        super().__init__(name, lambda: prepared(load()), image_folders)
        self.dataset_folders, self.registering = tuple(dataset_folders), asyncio.Lock()

    @property
    def service(self) -> Service:
        """The service. Raises NotLoadedError until it is loaded."""
        return self.held


class ServedOnes[Kind: ServedSystem | ServedService]:
    """All systems, or all services, of a server. Requests find them by name.

    Args:
      served: the systems or services.
      what: the word for one in errors, such as "system of experts".
    """

    def __init__(self, served: Iterable[Kind], what: str):
        self._served, self._what = {each.name: each for each in served}, what

    def __iter__(self) -> Iterator[Kind]:
        return iter(self._served.values())

    def find(self, name: str) -> Kind:
        """Find one by its name; an empty name stands for the only one. Raises BadRequestError."""
        known = ", ".join(self._served) or "none"
        if not name and len(self._served) == 1:
            return next(iter(self))
        if not name:
            raise BadRequestError(f"model is missing; each {self._what}: {known}.", param="model")
        if name not in self._served:
            raise BadRequestError(
                f"there is no {self._what} {shown(name)}; known: {known}.",
                param="model",
                status=404,
                code="model_not_found",
            )
        return self._served[name]
