"""Slices of a step, which a streamed layer runs one after the other: parts whose activations and pages fit."""

import dataclasses
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxinfer.generation.engine.batch import Batch, Chunk, DecodeRow


class SlicePages(NamedTuple):
    """The pages of a slice, which its programs know by their places here.

    Attributes:
      pages: int32 [N], those that it reads or writes, each once.
      written: int32 [M], the places of those that it writes.
    """

    pages: np.ndarray
    written: np.ndarray


def split(batch: Batch, *, chunks: int) -> list[Batch]:
    """Divide a step into slices with at most so many chunks.

    Rows are in the last: like later chunks, they may read what earlier ones write.
    """
    *first, last = [batch.chunks[start : start + chunks] for start in range(0, len(batch.chunks) or 1, chunks)]
    return [
        *(dataclasses.replace(batch, chunks=part, rows=()) for part in first),
        dataclasses.replace(batch, chunks=last),
    ]


def split_by_pages(batch: Batch, *, chunks: int, pages: int, page_size: int) -> list[Batch]:
    """Divide a step into slices with at most so many chunks, and pages in all; rows come after all chunks."""
    of_chunks = _parts(batch.chunks, chunks, pages, page_size)
    of_rows = _parts(batch.rows, len(batch.rows), pages, page_size)
    return [
        *(dataclasses.replace(batch, chunks=part, rows=()) for part in of_chunks),
        *(dataclasses.replace(batch, chunks=(), rows=part) for part in of_rows),
    ]


def _parts[T: Chunk | DecodeRow](each: Sequence[T], most: int, pages: int, page_size: int) -> Iterator[tuple[T, ...]]:
    together: list[T] = []
    there: set[int] = set()
    for part in each:
        needed = set(_pages_of(part, page_size)[0])
        if together and (len(together) == most or len(there | needed) > pages):
            yield tuple(together)
            together, there = [], set()
        together.append(part)
        there |= needed
    if together:
        yield tuple(together)


def in_slice(batch: Batch, page_size: int) -> tuple[Batch, SlicePages]:
    """The slice with places in `SlicePages` for pages, and these pages."""
    used = [_pages_of(part, page_size) for part in batch.parts]
    pages, places = np.unique(np.concatenate([np.frombuffer(p, np.int32) for p, _ in used]), return_inverse=True)
    ends = np.cumsum([len(p) for p, _ in used])
    of_parts = np.split(places.astype(np.int32), ends[:-1])
    written = np.unique(np.concatenate([part[first:] for part, (_, first) in zip(of_parts, used, strict=True)]))
    there = [array("i", part.tobytes()) for part in of_parts]
    count = len(batch.chunks)
    chunks = [dataclasses.replace(chunk, pages=p) for chunk, p in zip(batch.chunks, there[:count], strict=True)]
    rows = [row._replace(pages=p) for row, p in zip(batch.rows, there[count:], strict=True)]
    return dataclasses.replace(batch, chunks=tuple(chunks), rows=tuple(rows)), SlicePages(pages, written)


def _pages_of(part: Chunk | DecodeRow, page_size: int) -> tuple[array[int], int]:
    """The pages that a chunk or row reads or writes, and the place of the first that it writes.

    No step is in flight, so a row's last known token is the one that goes through the model.
    """
    if isinstance(part, Chunk):
        first, stop = part.start, part.start + part.count
    else:
        first = len(part.sequence.token_ids) - 1
        stop = first + 1 + part.num_speculative_tokens
    return part.pages[: -(-stop // page_size)], first // page_size
