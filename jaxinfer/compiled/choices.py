"""Measured choices between implementations of operations, kept on disk for each kind of device.

Programs are traced with the choices that were on disk when the process first compiled one, so that all programs of a
process agree. They are part of the key of an executable (`disk_cache/keys.py` describes the contexts of a trace).
"""

import functools
import json
import logging
from collections.abc import Iterable, Iterator

import jax

from jaxinfer.compiled.cpu_library import cpu_library
from jaxinfer.disk_cache import KeptFiles, cache_folder, keys
from jaxinfer.models.devices import device_name
from jaxinfer.pallas_kernels.choices import Call, Choices, fastest, measure
from jaxinfer.pallas_kernels.cpu.library import use_library
from jaxinfer.pallas_kernels.dispatch import kernels_available
from jaxinfer.pallas_kernels.target import interpreting

MAX_BYTES = 16 << 20
"""Bytes of the tables of all devices together."""
LOCK_SECONDS = 5.0

Table = dict[str, dict[str, str]]
"""{operation: {shapes: implementation's name}}."""

_log = logging.getLogger("jaxinfer.compiled")


@functools.cache
def stored_choices() -> Choices:
    """The choices on disk for this process's device; none if nothing was measured with this code."""
    try:
        return Choices.from_table(_read(_file_name()))
    except keys.NoKeyError as error:
        _log.info("implementations are chosen without measurements: %s", error)
        return Choices()


def warn_of_unmeasured_kernels() -> None:
    """Log, once in a process, that GPU kernels run which were not measured on this kind of GPU."""
    if kernels_available() and not interpreting() and not stored_choices().entries:
        _warn_once(
            "GPU kernels run here that were never measured on this GPU: `jaxinfer tune DIR` measures them; "
            "kernels=False (--no-kernels) leaves them out, kernels=True (--kernels) uses them without this warning"
        )


@functools.cache
def _warn_once(message: str) -> None:
    _log.warning(message)


def measure_choices(calls: Iterable[Call]) -> Iterator[tuple[Call, dict[str, float]]]:
    """Measure calls one after another, keep the fastest of each for later processes, and yield its seconds by name.

    Raises OSError, before anything is measured, if nothing can be kept on disk, and NoKeyError (a ValueError) if the
    code has changed since the process started.
    """
    files, name, library = _files(), _file_name(), cpu_library()
    files.make()
    for call in calls:
        with use_library(library):
            seconds = measure(call)
        with files.locked(seconds=LOCK_SECONDS):  # another process may measure too
            table = _read(name)
            table.setdefault(call.operation, {})[call.shapes] = fastest(call, seconds)
            files.write(name, json.dumps(table, sort_keys=True).encode())
        yield call, seconds


def forget_choices() -> None:
    """Delete the choices on disk for this process's device."""
    _files().remove(_file_name())


def _files() -> KeptFiles:
    return KeptFiles(cache_folder() / "choices", max_bytes=MAX_BYTES)


def _file_name() -> str:
    """The name of the device's table, which holds for this code and these libraries alone."""
    return keys.digest({"device": device_name(jax.devices()[0]), **keys.code_key()})


def _read(name: str) -> Table:
    content = _files().get(name)
    return json.loads(content) if content else {}
