"""Inputs from files, or random ones, on their way through a system."""

import dataclasses
import functools
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.evaluation.experts.workloads import draw_kinds
from jaxinfer.evaluation.image_requests import encoded
from jaxinfer.experts.errors import RoutingError
from jaxinfer.experts.results import Result
from jaxinfer.experts.scheduling.executor_state import ExpertStatistics
from jaxinfer.experts.system import System
from jaxinfer.extras import MissingExtraError
from jaxinfer.models.config import EncoderConfig
from jaxinfer.models.vision.image_files import IMAGE_SUFFIXES, check_image_file, pixels_of
from jaxinfer.progress import long_work, paused

type Run = Callable[[Iterator[tuple[str, Any]]], Iterator[Result | Exception]]

LISTED = 5
"""Broken files that an error lists."""


@dataclasses.dataclass(frozen=True)
class Input:
    """An input: its name, its kind, and a function that reads or makes it."""

    name: str
    kind: str
    read: Callable[[], Any]


class Summary:
    """All inputs together: how many there are, how many were judged, and how many could not be."""

    def __init__(self, total: int):
        self.total, self.judged, self.failed, self._begun = total, 0, 0, time.perf_counter()

    @property
    def rate(self) -> str:
        """A line on what is done so far."""
        seconds, left = time.perf_counter() - self._begun, self.total - self.judged - self.failed
        return (
            f"{self.judged} inputs in {seconds:.3g} s: {self.judged / seconds:.4g} a second; {self.failed} failed"
            f"{f'; {left} not judged' if left else ''}."
        )

    def text(self, statistics: ExpertStatistics) -> str:
        """Return a summary in words, of what is done so far."""
        loads = statistics.loads
        return (
            f"{self.rate}\n"
            f"{statistics.batches} batches; {loads.total()} loads ({loads['disk']} from disk, {loads['host']} from "
            f"the host);\nmanaging experts took {statistics.management_share:.2%} of the executors' time."
        )


def image_files(folder: Path, kinds: Sequence[str]) -> list[tuple[str, Path]]:
    """Return the images of a folder with their kinds.

    Raises:
      ValueError: there are none, or some are no images.
      RoutingError: an unknown kind.
    """
    if not folder.is_dir():
        raise ValueError(f"--images {folder}: no such folder.")
    images = []
    for inside in sorted(path for path in folder.iterdir() if path.is_dir()):
        files = sorted(file for file in inside.iterdir() if file.suffix.lower() in {".npy", *IMAGE_SUFFIXES})
        if files and inside.name not in kinds:
            raise RoutingError(f"{inside}: unknown kind of input {inside.name!r}; known: {', '.join(kinds[:8])}.")
        images += [(inside.name, file) for file in files]
    if not images:
        raise ValueError(f"--images {folder}: no images found; expected KIND/NAME.jpg, .png or .npy.")
    if broken := [error for _, file in images if (error := _error_of(file))]:
        listed = "; ".join(error.rstrip(".") for error in [*broken[:LISTED], "..."][: len(broken)])
        raise ValueError(f"--images {folder}: {len(broken)} of {len(images)} files are no images: {listed}.")
    return images


def _error_of(file: Path) -> str:
    """Return why a file is no image, by its beginning; empty if it seems to be one."""
    try:
        if _is_array(file):
            pixels_of(_mapped(file))
        else:
            check_image_file(file)
    except MissingExtraError:
        raise
    except Exception as error:  # files can be broken in any way
        message = " ".join(str(error).split()) or type(error).__name__
        return message if str(file) in message else f"{file}: {message}"
    return ""


def read_images(system: System, files: Iterable[tuple[str, Path]]) -> Iterator[Input]:
    """Return the images as inputs, each read and resized when its turn comes."""

    def read(kind: str, file: Path) -> np.ndarray:
        return system.load_image(kind, _mapped(file) if _is_array(file) else file)

    return (Input(f"{kind}/{file.name}", kind, functools.partial(read, kind, file)) for kind, file in files)


def read_contents(files: Iterable[tuple[str, Path]]) -> Iterator[Input]:
    """Return the images as inputs of a server: the contents of files, arrays as PNG."""

    def read(file: Path) -> bytes:
        return encoded(pixels_of(_mapped(file))) if _is_array(file) else file.read_bytes()

    return (Input(f"{kind}/{file.name}", kind, functools.partial(read, file)) for kind, file in files)


def _is_array(file: Path) -> bool:
    return file.suffix.lower() == ".npy"


def _mapped(file: Path) -> np.ndarray:
    return np.load(file, mmap_mode="r", allow_pickle=False)


def random_inputs(system: System, count: int, seed: int) -> Iterator[Input]:
    """Draw random images, and token ids for encoders."""
    rng = np.random.default_rng(seed)

    def draw(kind: str) -> Any:
        expert = system.experts.get(system.graph.first(kind))
        if expert is None:
            return None  # submitting it says why there is no such expert
        config, shape = expert.kind.config, expert.kind.shape
        most = config.vocab if isinstance(config, EncoderConfig) else 256
        return rng.integers(0, most, shape).astype(expert.kind.dtype)

    for number, kind in enumerate(draw_kinds(system.graph, count, seed=seed)):
        yield Input(f"{kind}/{number}", kind, lambda kind=kind: draw(kind))


def judge(run: Run, inputs: Iterable[Input], summary: Summary, write: Callable[[str], None], *, as_json: bool) -> None:
    """Judge all inputs; writes a line for each, in their order, and counts it in the summary.

    Args:
      run: yields the results or errors of (kind, value) pairs, in their order.
      inputs: the inputs.
      summary: counts them.
      write: writes a line.
      as_json: whether lines are JSON.
    """
    with long_work("judging inputs", total=summary.total) as work:
        for item, outcome in _outcomes(run, inputs):
            if isinstance(outcome, Exception):
                line = _error_line(item, outcome, as_json)
                summary.failed += 1
            else:
                line = _line(item, outcome, as_json)
                summary.judged += 1
            work.advance()
            with paused():
                write(line)


def _outcomes(run: Run, inputs: Iterable[Input]) -> Iterator[tuple[Input, Result | Exception]]:
    """Yield the inputs in their order, each with its result or error."""
    given = deque[tuple[Input, Exception | None]]()  # inputs whose turn has not come, and why they cannot be read

    def readable() -> Iterator[tuple[str, Any]]:
        for item in inputs:
            try:
                value = item.read()
            except Exception as error:  # files can be broken in any way
                given.append((item, error))
            else:
                given.append((item, None))
                yield item.kind, value

    def unreadable() -> Iterator[tuple[Input, Exception]]:
        while given and (error := given[0][1]) is not None:
            yield given.popleft()[0], error

    for result in run(readable()):
        yield from unreadable()
        yield given.popleft()[0], result
    yield from unreadable()


def _line(item: Input, result: Result, as_json: bool) -> str:
    if not as_json:
        way = " -> ".join(f"{stage.expert}: {stage.judgement.verdict}" for stage in result.stages)
        return f"{item.name}  {result.verdict}  ({way}; {result.latency * 1e3:.1f} ms)"
    stages = [
        {
            "expert": stage.expert,
            "verdict": stage.judgement.verdict,
            "executor": stage.executor,
            "batch": stage.batch,
            "seconds": stage.seconds,
        }
        for stage in result.stages
    ]
    fields = {"input": item.name, "kind": item.kind, "verdict": result.verdict, "latency": result.latency}
    return json.dumps(fields | {"stages": stages})


def _error_line(item: Input, error: Exception, as_json: bool) -> str:
    message = " ".join(str(error).split()) or type(error).__name__
    if as_json:
        return json.dumps({"input": item.name, "kind": item.kind, "error": type(error).__name__, "message": message})
    return f"{item.name}  failed: {message}"
