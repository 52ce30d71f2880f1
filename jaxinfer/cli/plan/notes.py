"""Notes below the tables of `jaxinfer plan`: on mixtures of experts, and on tiers that keep the KV cache."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxinfer.sharding.planner import Runner


def expert_note(runner: "Runner", sequences: int) -> str:
    """Say how many experts a pass over a token of each sequence reads, and how unequal their loads are.

    Empty for a dense model.
    """
    from jaxinfer.cli.display import figure
    from jaxinfer.sharding.planner.costs import imbalance

    layer = next((layer for layer in runner.model.layers if layer.experts), None)
    if layer is None:
        return ""
    ways = runner.ways
    rows = -(-sequences // (ways.data * ways.pipeline))
    tokens = rows * ways.data
    read = runner.experts_read(layer, rows) * ways.groups
    over = f"A pass over {tokens:,} token{'s' if tokens > 1 else ''}"
    note = f"{over} reads {figure(read, 3)} of a layer's {layer.experts} experts, if tokens choose at random"
    if ways.groups == 1:
        return f"{note}."
    busiest = imbalance(tokens * layer.chosen / ways.groups, ways.groups)
    return f"{note}; of {ways.groups} groups of experts, the busiest has {figure(busiest, 3)} times the mean load."


def cache_note(runner: "Runner", prompt: int, rates: Mapping[str, float]) -> str:
    """Say how many tokens tiers of the KV cache keep, and what reading a prompt back costs.

    Args:
      prompt: its tokens.
      rates: bytes a second from tiers to the devices that have a request, where they are known.
    """
    from jaxinfer.cli.display import figure, kept_tokens
    from jaxinfer.sharding.planner import Tokens
    from jaxinfer.sharding.planner.memory import kept_bytes

    if not (each := kept_bytes(runner)):
        return ""
    note = kept_tokens(each)
    computed = runner.turn([Tokens(count=prompt, sequences=1, context=prompt / 2)], rows=1).total
    times = [f"{figure(1e3 * prompt * each / rate, 3)} ms to read back from the {tier}" for tier, rate in rates.items()]
    if times:
        note += (
            f" A prompt of {prompt:,} tokens takes {', '.join(times)}, and {figure(1e3 * computed, 3)} ms to compute."
        )
    return note
