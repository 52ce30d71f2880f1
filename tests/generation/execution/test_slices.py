"""Steps are divided into slices whose pages fit together, and each slice knows its pages by their places."""

import types
from array import array

from jaxinfer.generation.engine.batch import Batch, Chunk, DecodeRow
from jaxinfer.generation.execution.slices import in_slice, split, split_by_pages

SIZE = 4


def row(length, pages, speculative=0):
    """A row whose last known token, the one that it computes, is number `length`."""
    return DecodeRow(types.SimpleNamespace(token_ids=[0] * length), 0, array("i", pages), None, None, speculative)


def chunk(start, count, pages):
    return Chunk(None, 0, start, count, False, array("i", pages))


def test_rows_come_with_the_last_chunks_since_they_may_read_their_pages():
    chunks, rows = tuple(chunk(4 * at, 4, range(6)) for at in range(5)), (row(4, [9]),)
    parts = split(Batch(chunks=chunks, rows=rows), chunks=2)
    assert [(part.chunks, part.rows) for part in parts] == [(chunks[:2], ()), (chunks[2:4], ()), (chunks[4:], rows)]
    assert split(Batch(rows=rows), chunks=2) == [Batch(rows=rows)]


def test_slices_have_as_many_rows_as_have_room():
    rows = tuple(row(8, [2 * at, 2 * at + 1]) for at in range(5))
    parts = split_by_pages(Batch(rows=rows), chunks=1, pages=5, page_size=SIZE)
    assert [part.rows for part in parts] == [rows[:2], rows[2:4], rows[4:]]
    shared = tuple(row(12, [0, 1, 2 + at]) for at in range(5))
    parts = split_by_pages(Batch(rows=shared), chunks=1, pages=5, page_size=SIZE)
    assert [part.rows for part in parts] == [shared[:3], shared[3:]]  # two pages are the same


def test_chunks_come_before_rows_and_in_their_order():
    chunks = tuple(chunk(4 * at, 4, range(6)) for at in range(5))
    rows = (row(4, [9]),)
    parts = split_by_pages(Batch(chunks=chunks, rows=rows), chunks=2, pages=4, page_size=SIZE)
    assert [(part.chunks, part.rows) for part in parts] == [
        (chunks[:2], ()),
        (chunks[2:4], ()),
        (chunks[4:], ()),
        ((), rows),
    ]


def test_a_slice_has_each_page_once_and_knows_which_are_written():
    batch = Batch(chunks=(chunk(6, 5, [7, 3, 9, 40]),), rows=(row(9, [7, 5, 8, 41]), row(8, [7, 6, 2], speculative=1)))
    local, (pages, written) = in_slice(batch, SIZE)
    assert pages.tolist() == [2, 3, 5, 6, 7, 8, 9]  # not those after the last token
    assert pages[written].tolist() == [2, 3, 6, 8, 9]  # of the chunk two, of the rows one and two
    whole = [[7, 3, 9], [7, 5, 8], [7, 6, 2]]
    assert [pages[list(part.pages)].tolist() for part in local.parts] == whole
    assert batch.rows[0].pages == array("i", [7, 5, 8, 41])
