"""The ledger of all memories: never more than there is, always clear who has it, and nothing of who is gone."""

import functools
import io
import subprocess
import sys
import threading
import time
from collections import Counter

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from rich.console import Console

from jaxinfer.serving.budget import (
    Budget,
    BudgetError,
    Holding,
    Lender,
    Offer,
    Reservation,
    all_budgets,
    budget_of,
    host_budget,
    sizes_of,
)

CAPACITIES = {"a": 1000, "b": 500, "without a limit": None}
TENANTS = st.sampled_from(["weights", "KV pages", "experts"])
PLACES = st.dictionaries(st.tuples(st.sampled_from([*CAPACITIES]), TENANTS), st.integers(0, 600), max_size=5)


def refused(call):
    """What a refusal says; unlike `pytest.raises`, this keeps no frames, and so nothing that they have."""
    try:
        call()
    except BudgetError as error:
        return str(error)
    raise AssertionError


def give_nothing(size):
    """Give nothing: what was offered is in use by now."""


class Ledger(RuleBasedStateMachine):
    """Owners come, grow, shrink and go; what they have is counted beside the budgets."""

    owners = Bundle("owners")

    def __init__(self):
        super().__init__()
        self.budgets = {name: Budget(name, capacity) for name, capacity in CAPACITIES.items()}
        self.held, self.known, self.offered = {}, {}, {}

    @rule(target=owners)
    def come(self):
        owner = f"owner {len(self.known)}"
        self.held[owner], self.known[owner], self.offered[owner] = Reservation(owner), {}, 0.0
        return owner

    @rule(owner=owners, sizes=PLACES, share=st.floats(0, 1))
    def resize(self, owner, sizes, share):
        if owner not in self.held:
            return
        reservation = self.held[owner]
        places = {(self.budgets[name], tenant): size for (name, tenant), size in sizes.items()}
        lenders = {
            place: Lender(lambda size=size: Offer(int(share * size), share), give_nothing)
            for place, size in places.items()
        }
        after = {**self.known, owner: {place: size for place, size in sizes.items() if size}}
        grown = [name for name in CAPACITIES if self.total(after, name) > self.total(self.known, name)]
        lacking = [name for name in grown if self.total(after, name) > (CAPACITIES[name] or float("inf"))]
        if not lacking:
            reservation.resize(places, lenders=lenders)
            self.known, self.offered[owner] = after, share
            return
        before = [budget.holdings for budget in self.budgets.values()]
        refusal = refused(lambda: reservation.resize(places, lenders=lenders))
        assert [budget.holdings for budget in self.budgets.values()] == before
        assert refusal.startswith(f"{owner} would take ")
        assert any(all(str(held) in refusal for held in self.budgets[name].holdings) for name in lacking)

    @rule(owner=consumes(owners))
    def release(self, owner):
        if owner not in self.held:
            return
        self.held[owner].release()
        self.held[owner].release()
        self.known[owner] = {}

    @rule(owner=consumes(owners))
    def drop(self, owner):
        self.held.pop(owner)
        self.known[owner] = {}

    @staticmethod
    def total(known, name):
        return sum(size for sizes in known.values() for (budget, _), size in sizes.items() if budget == name)

    @invariant()
    def sums_agree(self):
        for name, budget in self.budgets.items():
            total, capacity = self.total(self.known, name), CAPACITIES[name]
            assert budget.reserved == total == sum(held.bytes for held in budget.holdings)
            assert budget.free == (None if capacity is None else capacity - total)
            assert capacity is None or total <= capacity
            assert Counter(
                (held.owner, held.tenant, held.bytes, held.offer.bytes) for held in budget.holdings
            ) == Counter(
                (owner, tenant, size, int(self.offered[owner] * size))
                for owner, sizes in self.known.items()
                for (where, tenant), size in sizes.items()
                if where == name
            )


TestLedger = Ledger.TestCase


class Owner:
    """Has units of memory in one budget; some are pinned, some in flight, and it keeps a floor."""

    def __init__(self, budget, floor, next_use):
        self.budget, self.floor, self.next_use = budget, floor, next_use
        self.reservation, self.units, self.busy, self.pinned = Reservation("an owner"), [], 0, 0

    @property
    def bytes(self):
        return sum(self.units) + self.pinned

    def sizes(self, more=0):
        return {(self.budget, "units"): sum(self.units) + more, (self.budget, "pinned"): self.pinned}

    def resize(self, more=0):
        lenders = {(self.budget, "units"): Lender(self.offer, self.give)}
        self.reservation.resize(self.sizes(more), lenders=lenders)
        self.units += [more] * bool(more)

    def idle(self):
        """The units that may go: the newest ones, without those in flight and its floor."""
        size, idle = self.bytes, 0
        for unit in reversed(self.units[self.busy :]):
            if size - idle - unit >= self.floor:
                idle += unit
            else:
                break
        return idle

    def offer(self):
        return Offer(self.idle(), 0.01 * self.idle(), self.next_use)

    def give(self, size):
        mine = self.offer()
        assert 0 < size <= mine.bytes
        cheapest = min(offer.cost for _, lender, offer in self.budget.offers(ASKING[0]))
        assert mine.cost == cheapest
        idle = self.idle()
        while size > 0 and idle:
            unit = self.units.pop()
            size, idle = size - unit, idle - unit
        self.resize()


ASKING = [None]


class Lending(RuleBasedStateMachine):
    """Owners ask for memory that others lend, begin to use what they have, and go."""

    def __init__(self):
        super().__init__()
        self.budget, self.owners = Budget("a device", 1000), []

    @rule(floor=st.integers(0, 200), next_use=st.sampled_from([0.0, 0.5, 60.0, float("inf")]))
    def come(self, floor, next_use):
        if len(self.owners) < 5:
            self.owners.append(Owner(self.budget, floor, next_use))

    def some(self, data):
        return data.draw(st.sampled_from(self.owners)) if self.owners else None

    @rule(data=st.data(), size=st.integers(1, 600))
    def ask(self, data, size):
        if (owner := self.some(data)) is None:
            return
        ASKING[0] = owner.reservation
        others = [other for other in self.owners if other is not owner]
        before, in_flight = [x.bytes for x in others], [x.units[: x.busy] for x in others]
        room = self.budget.free + sum(other.idle() for other in others)
        assert owner.reservation.lacking(owner.sizes(size)).total() == max(0, size - room)
        if size > room:
            text = refused(lambda: owner.resize(size))
            assert [x.bytes for x in others] == before
            assert all(str(held) in text for held in self.budget.holdings)
            return
        owner.resize(size)
        for other, had, units in zip(others, before, in_flight, strict=True):
            assert other.bytes >= min(other.floor, had), "it starves"
            assert other.units[: other.busy] == units, "what is in flight is taken"

    @rule(data=st.data())
    def begin(self, data):
        if (owner := self.some(data)) is not None:
            owner.busy = data.draw(st.integers(0, len(owner.units)))

    @rule(data=st.data(), size=st.integers(0, 300))
    def pin(self, data, size):
        if (owner := self.some(data)) is not None and size <= self.budget.free:
            owner.pinned = max(owner.pinned, size) if size <= self.budget.free + owner.pinned else owner.pinned
            owner.resize()

    @rule(data=st.data())
    def go(self, data):
        if (owner := self.some(data)) is not None:
            owner.reservation.release()
            self.owners.remove(owner)

    @invariant()
    def all_fits(self):
        assert self.budget.reserved == sum(owner.bytes for owner in self.owners) <= 1000


TestLending = Lending.TestCase
TestLending.settings = settings(max_examples=40)


@pytest.fixture
def gpu():
    return Budget("gpu:0", 80_000_000, available=lambda: 5_000_000)


@pytest.fixture
def system(gpu):
    system = Reservation("System board")
    lenders = {(gpu, "experts"): Lender(lambda: Offer(15_000_000, 1.25), give_nothing)}
    system.resize({(gpu, "experts"): 21_000_000, (gpu, "activations"): 50_000_000, (gpu, "none"): 0}, lenders=lenders)
    return system


def test_what_an_owner_has_is_a_holding_for_each_tenant(gpu, system):
    assert gpu.holdings == [
        Holding("System board", "experts", 21_000_000, Offer(15_000_000, 1.25)),
        Holding("System board", "activations", 50_000_000, Offer(0, 0)),
    ]
    assert system.budgets == {"gpu:0": gpu}


def test_a_refusal_says_who_has_what(gpu, system):
    second = Reservation("LLM demo_model")
    with pytest.raises(MemoryError) as error:
        second.resize({(gpu, "weights"): 9_000_000, (gpu, "KV pages"): 1_000_000}, remedy="lower cache_bytes")
    assert str(error.value).splitlines() == [
        "LLM demo_model would take 10.0 MB more of gpu:0 (in all: weights 9.0 MB, KV pages 1.0 MB), where "
        "9.0 MB are not reserved and the system has 5.0 MB free: lower cache_bytes.",
        "gpu:0: 71.0 MB reserved of 80.0 MB",
        "  System board, experts: 21.0 MB, 6.0 MB pinned and 15.0 MB evictable",
        "  System board, activations: 50.0 MB, 50.0 MB pinned and 0 bytes evictable",
    ]


def test_what_is_not_in_use_yet_must_be_free_in_the_system(gpu):
    owner = Reservation("LLM demo_model")
    owner.resize({(gpu, "weights"): 5_000_000}, unused=True)
    owner.resize({(gpu, "weights"): 10_000_000}, unused=True)  # 5 more
    with pytest.raises(BudgetError, match=r"would take 6.0 MB more .* the system has 5.0 MB free"):
        owner.resize({(gpu, "weights"): 16_000_000}, unused=True)
    owner.resize({(gpu, "weights"): 16_000_000})
    gpu._available = lambda: -2_000_000  # as where a container has more than it may
    owner.resize({(gpu, "weights"): 15_000_000}, unused=True)


def test_what_is_released_stays_so(gpu, system):
    system.release()
    assert (gpu.reserved, system.sizes) == (0, {})
    with pytest.raises(ValueError, match="System board has released its memory"):
        system.resize({(gpu, "experts"): 1})


@pytest.mark.parametrize("name", ["the host", "NVIDIA H200 with a name that is long, of eight devices, each"])
def test_the_table_fits_a_terminal(name):
    budget, text = Budget(name, None), io.StringIO()
    tenants = ("weights", "programs' workspace", "experts of an executor with a long name")
    owners = [Reservation("LLM a"), Reservation("Service of a model with a long name, which is of no use to anybody")]
    for owner in owners:
        owner.resize(
            {(budget, tenant): 123_456_789 for tenant in tenants},
            lenders={(budget, tenant): Lender(lambda: Offer(99_999_999, 123.456), give_nothing) for tenant in tenants},
        )
    Console(file=text, width=80).print(budget.table())
    assert max(map(len, text.getvalue().splitlines())) <= 80
    words = " ".join(text.getvalue().replace("│", " ").split())
    assert "740.7 MB reserved" in words
    assert words.count("123.5 MB 23.5 MB 100.0 MB 123") == 6
    assert words.index("LLM a") < words.index("weights") < words.index("Service of a model")


def test_owners_of_one_name_are_two():
    budget, text = Budget("the host", None), io.StringIO()
    owners = [Reservation("LLM a"), Reservation("LLM a")]
    for owner in owners:
        owner.resize({(budget, "weights"): 1, (budget, "KV pages"): 2})
    Console(file=text, width=80).print(budget.table())
    assert text.getvalue().count("LLM a") == 2
    assert len(budget.holdings) == 4


def test_without_a_limit_nothing_is_refused():
    budget, owner = Budget("a device that is not here", None), Reservation("LLM a")
    owner.resize({(budget, "weights"): 1 << 60})
    assert (budget.free, budget.available, budget.reserved) == (None, None, 1 << 60)


@given(st.integers(max_value=-1))
def test_less_than_nothing_is_refused(size):
    with pytest.raises(ValueError, match="at least 0 bytes"):
        Budget("the host", size)
    with pytest.raises(ValueError, match="LLM a must take at least 0 bytes of the host for weights"):
        Reservation("LLM a").resize({(Budget("the host", 1), "weights"): size})


@pytest.mark.parametrize("size", [float("nan"), float("inf")])
@pytest.mark.parametrize("capacity", [10, None])
def test_what_is_no_number_of_bytes_is_refused(size, capacity):
    budget, owner = Budget("the host", capacity), Reservation("LLM a")
    with pytest.raises(ValueError, match=f"LLM a must take a finite number of bytes of the host .*, got {size}"):
        owner.resize({(budget, "weights"): size})
    assert budget.reserved == 0


def test_cpus_have_the_hosts_memory():
    first, second = jax.local_devices(backend="cpu")[:2]
    assert budget_of(first) is budget_of(second) is host_budget()
    assert host_budget() in all_budgets()
    assert host_budget().capacity >= host_budget().available > 2**20
    taken = sizes_of([first, second], {"weights": 3, "layers": 1}, host={"layers": 10})
    assert taken == {(host_budget(), "weights"): 6, (host_budget(), "layers"): 12}


class Gpu:
    """What a device of JAX says of itself."""

    def __init__(self, index, stats):
        self.id, self.platform, self._stats = index, "gpu", stats

    def memory_stats(self):
        return self._stats


def test_a_device_has_a_budget_of_its_own(monkeypatch):
    monkeypatch.setattr("jaxinfer.serving.budget._budgets", {})
    first, second = Gpu(0, {"bytes_limit": 100, "bytes_in_use": 30}), Gpu(1, None)
    assert budget_of(first) is budget_of(first)
    assert [(x.name, x.capacity) for x in map(budget_of, (first, second))] == [("gpu:0", 100), ("gpu:1", None)]
    assert budget_of(first).available == 70
    assert [budget.name for budget in all_budgets()] == ["gpu:0", "gpu:1"]


class Slow(Budget):
    """Says how much is free when that may have changed."""

    @property
    def free(self):
        free = super().free
        time.sleep(0.01)
        return free


def test_threads_together_have_no_more_than_there_is():
    budget, begin, refused = Slow("a device", 100), threading.Barrier(8), []
    owners = [Reservation(f"owner {number}") for number in range(8)]

    def take(owner):
        begin.wait()
        try:
            owner.resize({(budget, "weights"): 30})
        except BudgetError:
            refused.append(owner)

    threads = [threading.Thread(target=take, args=(owner,)) for owner in owners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 5
    assert budget.reserved == 90


@pytest.mark.parametrize("other_asks", [10, 60])
def test_of_two_that_ask_at_once_one_has_its_memory(other_asks):
    """The other one asks when the first of two lenders has just given."""
    budget, asks = Budget("a device", 100), [other_asks]
    lenders, owners = [Reservation("LLM a"), Reservation("LLM b")], [Reservation("LLM c"), Reservation("LLM d")]

    def give(lender, size):
        lender.resize({})
        if asks:
            owners[1].resize({(budget, "weights"): asks.pop()})

    for lender in lenders:
        each = Lender(lambda lender=lender: Offer(sum(lender.sizes.values()), 1.0), functools.partial(give, lender))
        lender.resize({(budget, "weights"): 50}, lenders={(budget, "weights"): each})
    with pytest.raises(BudgetError, match="LLM d, weights"):
        owners[0].resize({(budget, "weights"): 100})
    assert budget.reserved == other_asks + (50 if other_asks == 10 else 0)
    owners[0].resize({(budget, "weights"): 100 - other_asks})


FORKED = """
import os, signal, sys, threading, time
from jaxinfer.serving import budget
held = threading.Event()
def hold():
    with budget._lock:
        held.set()
        time.sleep(0.2)
threading.Thread(target=hold).start()
held.wait()
if pid := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) % 256)
signal.alarm(30)  # what waits for ever ends so
memory = budget.Budget("a device", 1)
budget.Reservation("LLM a").resize({(memory, "weights"): 1})
os._exit(0)
"""


def test_a_child_that_was_forked_while_a_thread_reserved_waits_for_nobody():
    command = [sys.executable, "-W", "ignore", "-c", FORKED]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stderr) == (0, "")
