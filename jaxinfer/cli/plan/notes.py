"""Notes below the tables of `jaxinfer plan`: on mixtures of experts, and on tiers that keep the KV cache."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxinfer.sharding.planner import Prediction, Runner, Workload


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


def offload_note(runner: "Runner", context: int, most: int, balanced: int) -> str:
    """Say how many sequences would share a fetch of the layers if their cache were on the host. Empty if no more do.

    Args:
      context: tokens of a sequence.
      most: sequences that the devices have room for.
      balanced: sequences with which computing takes as long as fetching.
    """
    from jaxinfer.sharding.planner.memory import kept_bytes
    from jaxinfer.sharding.planner.plans import USABLE

    if not runner.model.has_equal_pages:
        return ""
    each = context * kept_bytes(runner)
    count = min(balanced, int(USABLE * runner.device.host_memory / each))
    if count <= most:
        return ""
    size = math.ceil(count * each / 2**20)
    return f"With --kv-offload {size}MiB, which keeps the cache on the host, {count:,} would share a fetch of layers."


def tier_notes(best: "Sequence[Prediction]", runner: "Runner", workload: "Workload") -> list[str]:
    """Say what each tier of the KV cache gains or costs, against the best plan that has the same weights but no tier.

    Args:
      best: the plans, best first.
      runner: the model on its devices.
    """
    notes = []
    for tier in ("host", "disk"):
        if (there := next((each for each in best if each.plan.prefixes == tier), None)) is not None:
            notes.append(f"{tier}_kv: {_gain(there, best)}{_kept(there, runner, workload)}")
    offloads = (each for each in best if each.plan.weights != "device" and each.plan.cache != "device")
    if (there := next(offloads, None)) is not None:
        notes.append(f"kv_offload: {_gain(there, best)}")
    if not workload.hit_rate and not runner.model.has_states:
        notes.append("With --hit-rate, the share of prompts that come again, host_kv and disk_kv are ranked, too.")
    return notes


def _gain(there: "Prediction", best: "Sequence[Prediction]") -> str:
    """Compare a plan with the best of equal weights whose cache is on the devices alone."""
    from jaxinfer.cli.display import figure

    without = (there.plan.weights, "device", "device")
    base = next((each for each in best if each.plan.tiers == without), None)
    if base is None:
        return "without it, the devices have no room for a request."
    first, before = (figure(each.first.total, 3) for each in (there, base))
    return (
        f"{figure(there.tokens_per_s / base.tokens_per_s, 3)} times the tokens/s of the best plan without it, and a "
        f"TTFT of {first} s in place of {before} s."
    )


def _kept(there: "Prediction", runner: "Runner", workload: "Workload") -> str:
    """Say for how long a tier keeps what the requests of a plan bring."""
    from jaxinfer.cli.display import figure
    from jaxinfer.sharding.planner.memory import kept_bytes
    from jaxinfer.sharding.planner.plans import kept_room

    runner = dataclasses.replace(runner, ways=there.plan.ways)
    room = kept_room(runner, there, workload) * -(-runner.ways.size // runner.device.node)
    new = there.tokens_per_s * (1 + (workload.prompt - workload.known) / workload.generate)
    return f" It keeps what comes in {figure(room / kept_bytes(runner) / new, 3)} s."
