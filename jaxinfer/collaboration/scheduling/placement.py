"""Which experts are in which pool at the start (paper section 4.1)."""

from collections.abc import Iterable, Sequence

from jaxinfer.collaboration.scheduling.experts import ExpertInfo


def place(experts: Iterable[ExpertInfo], budgets: Sequence[int]) -> list[list[str]]:
    """The experts of each pool: dealt out in turn until no memory is left.

    A pool that is full is passed over; an expert that fits none is left out, and smaller ones are still tried.

    Args:
      experts: in the order in which they are dealt, the most used first.
      budgets: the bytes of each pool, those of accelerators first.
    """
    placed: list[list[str]] = [[] for _ in budgets]
    free, turn = list(budgets), 0
    for expert in experts:
        for step in range(len(free)):
            pool = (turn + step) % len(free)
            if expert.bytes <= free[pool]:
                placed[pool].append(expert.name)
                free[pool] -= expert.bytes
                turn = pool + 1
                break
    return placed
