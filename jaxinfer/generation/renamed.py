"""Options that have a new name are refused, with the new name."""

import functools
from collections.abc import Callable
from typing import Any


def renamed[T: Callable[..., Any]](owner: str | None = None, /, **names: str) -> Callable[[T], T]:
    """Decorate a class or function so that keyword arguments of old names raise TypeError with the new ones.

    owner: whose arguments the error calls them; None: those of what is decorated.

    >>> @renamed(width="beam_width")
    ... def search(beam_width=4): ...
    >>> search(width=2)
    Traceback (most recent call last):
    TypeError: search.width is now search.beam_width.
    """

    def decorate(target: T) -> T:
        called: Any = target.__init__ if isinstance(target, type) else target

        @functools.wraps(called)
        def checked(*args: Any, **options: Any) -> Any:
            for name in options.keys() & names.keys():
                where = owner or target.__qualname__
                raise TypeError(f"{where}.{name} is now {where}.{names[name]}.")
            return called(*args, **options)

        decorated: Any = target
        if isinstance(target, type):
            decorated.__init__ = checked
        else:
            decorated = checked
        return decorated

    return decorate
