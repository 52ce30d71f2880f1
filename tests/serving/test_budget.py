"""The ledger of a memory: never more than there is, and always clear who has it."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from rich.console import Console

from jaxinfer.serving.budget import Budget, BudgetError, Holding, Offer

CAPACITY = 1000
TENANTS = st.sampled_from(["weights", "KV pages", "experts"])


class Ledger(RuleBasedStateMachine):
    """Tenants come and go; what they have is counted beside the budget."""

    taken = Bundle("taken")

    def __init__(self):
        super().__init__()
        self.budget, self.known = Budget("a device", CAPACITY), []

    @rule(target=taken, tenant=TENANTS, size=st.integers(0, CAPACITY), share=st.none() | st.floats(0, 1))
    def reserve(self, tenant, size, share):
        before = self.budget.holdings
        offer = None if share is None else lambda: Offer(int(share * size), 1.0)
        free = CAPACITY - sum(reservation.bytes for reservation in self.known)
        if size <= free:
            reservation = self.budget.reserve(tenant, size, offer=offer)
            self.known.append(reservation)
            return reservation
        with pytest.raises(BudgetError):
            self.budget.reserve(tenant, size, offer=offer)
        assert self.budget.holdings == before
        return multiple()

    @rule(reservation=consumes(taken))
    def release(self, reservation):
        free = self.budget.free
        self.budget.release(reservation)
        self.known.remove(reservation)
        assert self.budget.free == free + reservation.bytes
        with pytest.raises(ValueError):  # noqa: PT011
            self.budget.release(reservation)

    @invariant()
    def sums_agree(self):
        budget = self.budget
        held = [reservation.bytes for reservation in self.known]
        assert budget.reserved == sum(held) == sum(holding.bytes for holding in budget.holdings) <= CAPACITY
        assert budget.free == CAPACITY - sum(held)
        assert all(0 <= holding.offer.bytes <= holding.bytes for holding in budget.holdings)


TestLedger = Ledger.TestCase


def filled():
    budget = Budget("cuda:0", 80_000_000)
    budget.reserve_all({"weights": 50_000_000, "adapters": 0})
    budget.reserve("experts", 20_000_000, offer=lambda: Offer(15_000_000, 1.25))
    budget.reserve("experts", 1_000_000)
    return budget


def test_what_a_tenant_has_is_one_holding():
    assert filled().holdings == [
        Holding("weights", 50_000_000, Offer(0, 0)),
        Holding("experts", 21_000_000, Offer(15_000_000, 1.25)),
    ]


def test_a_refusal_says_who_has_what():
    with pytest.raises(BudgetError) as error:
        filled().reserve("KV pages", 10_000_000)
    assert str(error.value).splitlines() == [
        "KV pages would take 10.0 MB of cuda:0, which has too little free.",
        "cuda:0: 71.0 MB reserved of 80.0 MB",
        "  weights: 50.0 MB, 50.0 MB pinned and 0 bytes evictable",
        "  experts: 21.0 MB, 6.0 MB pinned and 15.0 MB evictable",
    ]
    assert isinstance(error.value, MemoryError)


@pytest.mark.parametrize("name", ["host", "NVIDIA H200 with a name that is long, of eight devices, each"])
def test_the_table_fits_a_terminal(name):
    budget, text = Budget(name, None), io.StringIO()
    for tenant in ("weights", "programs' workspace", "experts of an executor with a long name"):
        budget.reserve(tenant, 123_456_789, offer=lambda: Offer(99_999_999, 123.456))
    Console(file=text, width=80).print(budget.table())
    assert max(map(len, text.getvalue().splitlines())) <= 80
    assert "370.4 MB reserved" in " ".join(text.getvalue().split())
    assert text.getvalue().count("123.5 MB") == 3


def test_without_a_limit_nothing_is_refused():
    budget = Budget("a device that is not here", None)
    budget.reserve("weights", 1 << 60)
    assert (budget.free, budget.reserved) == (None, 1 << 60)


@given(st.integers(max_value=-1))
def test_less_than_nothing_is_refused(size):
    with pytest.raises(ValueError, match="at least 0 bytes"):
        Budget("host", size)
    with pytest.raises(ValueError, match="at least 0 bytes"):
        Budget("host", 1).reserve("weights", size)
