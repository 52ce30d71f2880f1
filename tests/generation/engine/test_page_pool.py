"""The page pool against a model that keeps what every page holds."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxinfer.generation.engine.page_pool import PagePool

SIZE = 3
COUNT = 10


class Request:
    """Tokens and their pages; the first `written` tokens have their keys and values."""

    def __init__(self, root, tokens):
        self.root, self.tokens, self.pages = root, list(tokens), []
        self.written, self.node, self.findable = 0, root, 0


class Heard:
    """What a listener has heard to be in the tree."""

    def __init__(self):
        self.nodes = set()

    def stored(self, node):
        assert node not in self.nodes
        self.nodes.add(node)

    def removed(self, node):
        self.nodes.remove(node)

    def cleared(self):
        self.nodes.clear()


class Pool(RuleBasedStateMachine):
    """Requests share, copy, write, register and release pages.

    `contents` says what is in each page: the tokens before it, from the root on, and its own.
    """

    def __init__(self):
        super().__init__()
        self.pool = PagePool(COUNT, SIZE, b"model")
        self.pool.listener = self.heard = Heard()
        self.requests: list[Request] = []
        self.holders: Counter[int] = Counter()
        self.contents: dict[int, tuple] = {}
        self.remembered: list[int] = []  # pages that nobody holds and that can be found; the oldest first
        self.registered: set[int] = set()
        self.findable: set[tuple] = set()  # beginnings that must be found; None evicted since the last `clear`
        self.evicted = False

    @rule(root=st.sampled_from("ab"), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4 * SIZE))
    def start(self, root, tokens):
        request = Request(root, tokens)
        match = self.pool.match(root, tokens[:-1])
        held = match.pages + ([match.copy_from] if match.num_copied_tokens else [])
        self.holders.update(held)
        self.remembered = [page for page in self.remembered if page not in held]
        known = self.check_match(root, tokens[:-1], match)
        needed = self.pool.pages_for(len(tokens)) - len(match.pages)
        if needed > self.pool.free:
            self.release(held)
            return
        request.pages = match.pages + self.allocate(needed)
        if match.num_copied_tokens:
            self.contents[request.pages[len(match.pages)]] = (
                root, tuple(tokens[: len(match.pages) * SIZE]), tuple(tokens[len(match.pages) * SIZE : known])
            )  # fmt: skip
            self.release([match.copy_from])
        request.written, request.node, request.findable = known, match.parent, len(match.pages)
        self.requests.append(request)

    def check_match(self, root, tokens, match):
        """The pages hold these very tokens; how many of them."""
        full = len(match.pages) * SIZE
        for index, page in enumerate(match.pages):
            assert self.contents[page] == (root, tuple(tokens[: index * SIZE]), tuple(tokens[index * SIZE :][:SIZE]))
        assert bool(match.num_copied_tokens) == (match.copy_from >= 0)
        if match.num_copied_tokens:
            of, before, inside = self.contents[match.copy_from]
            assert (of, before) == (root, tuple(tokens[:full]))
            assert inside[: match.num_copied_tokens] == tuple(tokens[full : full + match.num_copied_tokens])
        known = full + match.num_copied_tokens
        assert known <= len(tokens)
        if not self.evicted:
            common = [_common(text, tokens) for of, text in self.findable if of == root]
            assert known == max(common, default=0)
        return known

    def allocate(self, count):
        empty = COUNT - len(self.remembered) - len(+self.holders)
        contents = {page: self.contents.get(page) for page in self.remembered}
        pages = self.pool.allocate(count)
        forgotten = [page for page in pages if page in self.remembered]
        full = [page for page in forgotten if len(contents[page][2]) == SIZE]
        taken = self.pool.take_forgotten()
        assert [(node.page, node.tokens) for node in taken] == [(page, contents[page][2]) for page in full]
        assert forgotten == self.remembered[: max(0, count - empty)]  # only if it must; the oldest first
        del self.remembered[: len(forgotten)]
        self.evicted |= bool(forgotten)
        self.registered -= set(forgotten)
        for page in pages:
            self.contents.pop(page, None)
        self.holders.update(pages)
        return pages

    def release(self, pages):
        self.pool.release(pages)
        self.holders.subtract(pages)
        self.remembered += [p for p in reversed(pages) if not self.holders[p] and p in self.registered]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def write_and_register(self, data):
        request = data.draw(st.sampled_from(self.requests), "request")
        request.written = data.draw(st.integers(request.written, len(request.tokens)), "written")
        tokens = request.tokens
        for index in range(request.findable, self.pool.pages_for(request.written)):
            inside = tuple(tokens[index * SIZE : request.written][:SIZE])
            self.contents[request.pages[index]] = (request.root, tuple(tokens[: index * SIZE]), inside)
        for index in range(request.findable, request.written // SIZE):
            request.node = self.insert(request, index, tokens[index * SIZE :][:SIZE])
            request.findable = index + 1
        if rest := tokens[request.findable * SIZE : request.written]:
            self.insert(request, request.findable, rest)
        self.findable.add((request.root, tuple(tokens[: request.written])))

    def insert(self, request, index, tokens):
        node = self.pool.insert(request.node, tokens, request.pages[index])
        assert self.contents[node.page][0] == request.root
        assert node.tokens == tuple(tokens)
        if node.page == request.pages[index]:
            self.registered.add(node.page)
        return node

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def grow(self, data):
        request = data.draw(st.sampled_from(self.requests), "request")
        if len(request.tokens) == len(request.pages) * SIZE:
            if not self.pool.free:
                return
            request.pages += self.allocate(1)
        request.tokens.append(data.draw(st.integers(0, 1), "token"))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data):
        index = data.draw(st.integers(0, len(self.requests) - 1), "request")
        self.release(self.requests.pop(index).pages)

    @precondition(lambda self: not self.requests)
    @rule()
    def clear(self):
        self.pool.clear()
        assert self.pool.match("a", [0] * SIZE).pages == []
        self.remembered, self.evicted = [], False
        self.registered.clear()
        self.findable.clear()

    @invariant()
    def counts_fit(self):
        self.pool.check_integrity([request.pages for request in self.requests])
        assert self.pool.free == COUNT - len(+self.holders)
        assert self.heard.nodes == {node for node in self.pool._node_of.values() if len(node.tokens) == SIZE}


def _common(first, second):
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=80, stateful_step_count=40)


def fill(pool, root, tokens):
    """The pages of a request for these tokens, all registered."""
    match = pool.match(root, tokens)
    pages = match.pages + pool.allocate(pool.pages_for(len(tokens)) - len(match.pages))
    if match.num_copied_tokens:
        pool.release([match.copy_from])
    parent = match.parent
    for index in range(len(match.pages), len(pages)):
        parent = pool.insert(parent, tokens[index * pool.page_size :][: pool.page_size], pages[index])
    return pages


def test_the_least_recently_used_goes_first_and_a_text_from_its_end():
    pool = PagePool(4, 2)
    old = fill(pool, "root", [1, 2, 3, 4])
    new = fill(pool, "root", [5, 6, 7, 8])
    pool.release(old)
    pool.release(new)
    assert pool.allocate(1) == [old[1]]
    kept = pool.match("root", [1, 2, 3, 4])
    assert kept.pages == [old[0]]
    pool.release(kept.pages)  # now it is the latest used
    assert pool.allocate(3) == [new[1], new[0], old[0]]
    assert pool.match("root", [1, 2]).pages == []


def test_a_page_that_grew_is_found_by_all_it_holds():
    pool = PagePool(4, 4)
    (page,) = fill(pool, "root", [1, 2])
    assert pool.match("root", [1, 2, 3, 4])[2:] == (page, 2)
    pool.insert("root", [1, 2, 3], page)
    assert pool.match("root", [1, 2, 3, 4])[2:] == (page, 3)
    pool.insert("root", [1, 2, 3, 4], page)
    assert pool.match("root", [1, 2, 3, 4]).pages == [page]
    assert pool.match("root", [1, 2, 9, 9])[2:] == (page, 2)  # of a full page, too, what is common can be copied


def test_roots_share_nothing():
    pool = PagePool(4, 2)
    fill(pool, "one", [1, 2, 3])
    assert pool.match("other", [1, 2, 3])[:1] == ([],)
    assert pool.match("other", [1, 2, 3]).num_copied_tokens == 0


def test_the_same_tokens_are_registered_once():
    pool = PagePool(4, 2)
    first, second = pool.allocate(2)
    node = pool.insert("root", [1, 2], first)
    assert pool.insert("root", [1, 2], second) is node
    pool.release([second])
    pool.release([first])
    pool.check_integrity([])
    assert pool.allocate(4)[-1] == first  # the only one whose contents are worth keeping


def identity_of(model):
    return lambda root: model + root.encode()


def test_keys_name_all_tokens_up_to_the_end_of_a_page():
    pool, same = (PagePool(4, 2, identity_of(b"model")) for _ in range(2))
    tokens = [1, 2, 3, 4, 5]
    for one in (pool, same):
        one.release(fill(one, "root", tokens))
    node = pool.match("root", tokens).parent
    keys = list(pool.keys_after("root", tokens))
    assert len(keys) == 2  # of full pages
    assert [pool.key_of(node.parent), pool.key_of(node)] == keys == list(same.keys_after("root", tokens))
    assert list(pool.keys_after(node.parent, tokens[2:])) == keys[1:]
    others = [
        PagePool(4, 2, identity_of(b"other")).keys_after("root", tokens),
        pool.keys_after("other", tokens),
        pool.keys_after("root", [7, *tokens[1:]]),
    ]
    assert len({key for other in (keys, *others) for key in other}) == 8


def test_forgotten_pages_are_noted_for_those_who_want_them():
    for identity, wanted in ((identity_of(b"model"), [(1, 2)]), (None, [])):
        pool = PagePool(2, 2, identity)
        pool.release(fill(pool, "root", [1, 2, 3]))
        pool.allocate(2)  # the page that is not full is not kept
        assert [node.tokens for node in pool.take_forgotten()] == wanted
        assert pool.take_forgotten() == []


def test_more_than_there_is_is_refused_and_changes_nothing():
    pool = PagePool(3, 2)
    held = pool.allocate(2)
    with pytest.raises(ValueError, match="2 pages asked for, 1 of 3 free"):
        pool.allocate(2)
    pool.check_integrity([held])
