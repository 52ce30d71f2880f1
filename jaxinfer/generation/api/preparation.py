"""Where `AsyncLLM` prepares requests, so that one that takes long holds up only others of its kind."""

import enum
import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jaxinfer.compiled import Origin
from jaxinfer.generation.params import StructuredOutputsParams
from jaxinfer.generation.sampling.structured_outputs import grammar_arguments
from jaxinfer.sandbox.process import Sandbox, TooSlowError

THREADS = 2
"""Threads that prepare requests of a kind."""
KEPT_GRAMMARS = 128
"""Grammars that need not be checked again."""
QUICK_SECONDS = 0.25
"""Seconds in which nearly all grammars compile."""


class Kind(enum.Enum):
    """The step of preparing a request that may take long."""

    PROMPT = enum.auto()
    GRAMMAR = enum.auto()
    SLOW_GRAMMAR = enum.auto()
    CHAT = enum.auto()
    GIVEN_TEMPLATE = enum.auto()


class Preparation:
    """Threads for each kind of request, and sandboxes in which chat templates are rendered and grammars tried.

    One that never ends, or takes gigabytes, ends with its process. A grammar that is not quick is tried again in
    another process, which gives it more time. So quick ones wait for each of the rest only `QUICK_SECONDS`, and until a
    new process has started.

    Attributes:
      is_quick: tries a grammar for `QUICK_SECONDS`; returns whether that was enough. Raises ValueError if it does not
        compile or takes too much memory; RuntimeError after `close`.
    """

    def __init__(self):
        self._threads = {kind: ThreadPoolExecutor(THREADS, f"jaxinfer-{kind.name.lower()}") for kind in Kind}
        self._templates = {kind: Sandbox("render", "The chat template") for kind in (Kind.CHAT, Kind.GIVEN_TEMPLATE)}
        self._grammars = Sandbox("check_grammar", "The grammar", seconds=QUICK_SECONDS)
        self._slow_grammars = Sandbox("check_grammar", "The grammar")
        self._origin = Origin("This preparation")
        # Without this object itself, which then ends when it is dropped.
        self.is_quick = functools.lru_cache(KEPT_GRAMMARS)(functools.partial(_is_quick, self._grammars))
        self._check = functools.lru_cache(KEPT_GRAMMARS)(functools.partial(_check_grammar, self._slow_grammars))

    def submit[Result](self, kind: Kind, prepare: Callable[[], Result]) -> Future[Result]:
        """Call a function in a thread of this kind. Raises RuntimeError after `close`."""
        return self._threads[kind].submit(prepare)

    def check_grammar(self, params: StructuredOutputsParams) -> None:
        """Try a grammar. Raises as `is_quick`, and ValueError if it takes too long."""
        if not self.is_quick(params):
            self._check(params)

    def renderer(self, kind: Kind) -> Callable[[str, dict[str, Any]], str]:
        """Return what renders a template in the process of this kind. It raises as `Sandbox.call` does."""
        sandbox = self._templates[kind]
        return lambda template, arguments: sandbox.call(template=template, arguments=arguments)

    def close(self) -> None:
        """End the processes, and the threads once what waits for them has found that its owner is closed.

        A process that was forked leaves them to the other.
        """
        if self._origin.forked:
            return
        for sandbox in (*self._templates.values(), self._grammars, self._slow_grammars):
            sandbox.close()
        for threads in self._threads.values():
            threads.shutdown(wait=False)


def _check_grammar(sandbox: Sandbox, params: StructuredOutputsParams) -> None:
    if params.kind is not None:
        sandbox.call(**grammar_arguments(params))


def _is_quick(sandbox: Sandbox, params: StructuredOutputsParams) -> bool:
    try:
        _check_grammar(sandbox, params)
    except TooSlowError:
        return False
    return True
