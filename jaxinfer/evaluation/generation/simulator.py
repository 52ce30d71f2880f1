"""Builds an engine whose device is simulated, and runs a load on it in virtual time."""

from collections.abc import Sequence

from jaxinfer.compiled import Costs
from jaxinfer.evaluation.generation.device import TOKEN, StepTimes, VirtualClock, VirtualExecutor
from jaxinfer.evaluation.generation.replay import Replayed, TokenRequest, replay
from jaxinfer.evaluation.generation.virtual_pages import TierTimes, VirtualPages
from jaxinfer.generation.api.build import decoder_lanes, restoring_of, scheduler_of
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.engine.engine import Engine
from jaxinfer.generation.engine.input import InputProcessor
from jaxinfer.generation.execution.plan import Plan


def simulate(
    requests: Sequence[TokenRequest],
    config: EngineConfig,
    plan: Plan,
    times: StepTimes,
    *,
    costs: Costs,
    platform: str,
    lanes: int = 1,
    tier: TierTimes | None = None,
    num_snapshots: int = 0,
) -> Replayed:
    """Run a load in virtual time, on an engine with the real one's scheduler.

    Args:
      requests: in the order of their arrivals.
      config: the engine's sizes.
      plan: its pages and buckets.
      times: tells how long steps take.
      costs: the times by which the scheduler chooses passes; it learns none here.
      platform: "cpu" or "gpu".
      lanes: of the engine's mesh.
      tier: seconds of the host's pages, if the plan has some.
      num_snapshots: snapshots of recurrent states of each lane; 0: the model has no states.

    Raises ValueError for a request that the engine could never run, and for recurrent states with a tier.
    """
    if tier is not None and num_snapshots:
        raise ValueError("A tier for pages is not simulated for models with recurrent states: leave one of them out.")
    clock = VirtualClock()
    vocab = 1 + max([TOKEN, *(token for request in requests for token in request.prompt)])
    inputs = InputProcessor(vocab=vocab, eos_ids=(), context=config.context, tokenizer=None, generates=True)
    passes = plan.pass_costs(costs, config.num_speculative_tokens)
    kept = None if tier is None else VirtualPages(plan.host_pages, plan.decoder_buckets, clock, tier)
    parts = decoder_lanes(
        config,
        plan,
        passes,
        platform=platform,
        lanes=lanes,
        tier=kept,
        identity=lambda root: b"simulated",
        num_snapshots=num_snapshots,
    )
    executor = VirtualExecutor(clock, times, page_seconds=0.0 if tier is None else tier.write)
    engine = Engine(config, inputs, scheduler_of(parts), executor, restoring=restoring_of(parts), clock=clock)
    return replay(engine, requests, clock=clock, wait=clock.wait)
