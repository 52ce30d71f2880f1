"""The experts in each pool at the start (paper section 4.1)."""

from collections.abc import Callable, Iterable, Sequence

from jaxinfer.experts.scheduling.experts import ExpertInfo


def place(
    experts: Iterable[ExpertInfo],
    budgets: Sequence[int],
    can_run: Callable[[ExpertInfo, int], bool] = lambda expert, pool: True,
) -> list[list[str]]:
    """Deal experts out to pools in turn until no memory is left.

    Full pools are skipped; an expert that fits none is left out, and smaller ones are still tried.

    Args:
      experts: the experts in the order of dealing, the most used first.
      budgets: the bytes of each pool, those of accelerators first.
      can_run: whether an executor of a pool can run an expert.

    Returns:
      The names of each pool's experts.
    """
    placed: list[list[str]] = [[] for _ in budgets]
    free, turn = list(budgets), 0
    for expert in experts:
        for step in range(len(free)):
            pool = (turn + step) % len(free)
            if expert.bytes <= free[pool] and can_run(expert, pool):
                placed[pool].append(expert.name)
                free[pool] -= expert.bytes
                turn = pool + 1
                break
    return placed
