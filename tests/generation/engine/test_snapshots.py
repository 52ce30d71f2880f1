"""Which snapshots of recurrent states are kept."""

import pytest

from jaxinfer.generation.engine.page_pool import PagePool
from jaxinfer.generation.engine.snapshots import Snapshots

CHUNK = 4


@pytest.fixture
def pool():
    return PagePool(16, 2)


def fill(pool, tokens):
    """The nodes of these tokens, whose pages nobody uses any more."""
    match = pool.match("root", tokens)
    pages, node = match.pages + pool.allocate(len(tokens) // 2 - len(match.pages)), match.parent
    for index in range(len(match.pages), len(pages)):
        node = pool.insert(node, tokens[2 * index : 2 * index + 2], pages[index])
    pool.release(pages)
    return pool.full_nodes("root", tokens)


def test_a_snapshot_is_copied_in_the_next_step_and_can_be_used_in_it(pool):
    snapshots = Snapshots(2, pool, CHUNK)
    *_, node = fill(pool, [1, 2, 3, 4])
    snapshots.take(node, 7)
    assert snapshots.is_coming(node)
    assert snapshots.take_due() == ()
    snapshots.begin_step()
    assert not snapshots.is_coming(node)
    place = snapshots.use(node, extends=False)
    assert snapshots.take_due() == ((7, place),)
    assert snapshots.take_due() == ()
    snapshots.take(node, 3)  # which has it already
    snapshots.begin_step()
    assert snapshots.take_due() == ()


def test_prompts_take_snapshots_where_they_leave_others_and_near_their_end(pool):
    snapshots = Snapshots(2, pool, CHUNK)
    fill(pool, [1, 2, 3, 4, 5, 6])
    assert snapshots.ends("root", [1, 2, 3], 0) == ()
    assert snapshots.ends("root", [1, 2, 3, 4, 5, 6, 7], 0) == (4,)
    assert snapshots.ends("root", [1, 2, 3, 4, 9, 9, 9, 9, 9], 0) == (4, 8)
    assert snapshots.ends("root", [1, 2, 3, 4, 9, 9, 9, 9, 9], 4) == (8,)
    assert Snapshots(2, pool, 3).ends("root", [9] * 17, 0) == (12,)  # of whole pages and of whole chunks


def test_the_least_recently_used_gives_way(pool):
    snapshots = Snapshots(2, pool, CHUNK)
    first, second, third = (fill(pool, [n] * 4)[-1] for n in (1, 2, 3))
    snapshots.take(first, 0)
    snapshots.take(second, 0)
    snapshots.begin_step()
    snapshots.use(first, extends=False)
    snapshots.begin_step()
    snapshots.take(third, 0)
    assert [snapshots.covered("root", [n] * 4) for n in (1, 2, 3)] == [4, 0, 4]
    snapshots.check_integrity()


def test_that_of_an_earlier_turn_gives_way_before_others_unless_prompts_part_there(pool):
    for parts in (False, True):
        pool.clear()
        snapshots = Snapshots(2, pool, CHUNK)
        earlier, other = fill(pool, [1] * 4)[-1], fill(pool, [2] * 4)[-1]
        snapshots.take(earlier, 0)
        snapshots.take(other, 0)
        for follows in (3, 4) if parts else (3,):
            fill(pool, [1] * 4 + [follows] * 4)
        snapshots.begin_step()
        snapshots.use(earlier, extends=True)
        snapshots.begin_step()
        snapshots.take(fill(pool, [1] * 4 + [3] * 4)[-1], 0)
        assert snapshots.covered("root", [1] * 4) == (4 if parts else 0)
        assert snapshots.covered("root", [2] * 4) == (0 if parts else 4)


def test_those_of_pages_that_are_gone_give_way_first(pool):
    snapshots = Snapshots(2, pool, CHUNK)
    gone, kept = fill(pool, [1] * 4)[-1], fill(pool, [2] * 4)[-1]
    snapshots.take(kept, 0)
    snapshots.take(gone, 0)
    snapshots.begin_step()
    pages = pool.allocate(14)  # all but those of the second
    pool.release(pages[2:])
    assert not pool.has(gone)
    snapshots.take(fill(pool, [3] * 4)[-1], 0)
    assert snapshots.covered("root", [2] * 4) == 4


def test_none_gives_way_that_the_step_uses(pool):
    """One that comes from a tier is written before those in use are copied to slots."""
    snapshots = Snapshots(4, pool, CHUNK)
    nodes = [fill(pool, [n] * 4)[-1] for n in range(1, 7)]
    for node in nodes[:4]:
        snapshots.take(node, 0)
    snapshots.begin_step()
    used = [snapshots.use(node, extends=True) for node in nodes[:2]]
    given = [snapshots.restore(node) for node in nodes[4:]]
    assert sorted(used + given) == [0, 1, 2, 3]
    assert [snapshots.use(node, extends=False) for node in nodes[4:]] == given
    snapshots.check_integrity()
