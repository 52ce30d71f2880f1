"""`decode`: several passes in one loop, each over a token of every row, with speculative tokens if asked."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.compiled import ProgramSpec, Sizes
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.execution.layout import DecoderStatic, DeviceLayout, integers
from jaxinfer.generation.execution.programs.expert_load import ExpertCounts, count_experts, no_counts
from jaxinfer.generation.execution.programs.verification import (
    DecodeOutput,
    DecodeRows,
    PassState,
    Speculation,
    finish_step,
    speculate,
    tokens_of,
    verify,
)
from jaxinfer.generation.execution.state import DeviceState, Rows, progress_of
from jaxinfer.generation.sampling.logprobs import no_logprobs
from jaxinfer.generation.sampling.sampler import LogitsProcessors
from jaxinfer.models import Cache, LayerAdapters
from jaxinfer.sharding.collectives import any_part

if TYPE_CHECKING:
    from jaxinfer.models import Decoder
    from jaxinfer.pallas_kernels.moe import Routing

MIN_ACCEPTED = 4
"""A row must have had one of this many speculative tokens right, or it gets no more in this step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decode(Sizes):
    """`batch` rows, `speculative` tokens of each in a pass, and `pages` of a page table."""

    program = "decode"
    batch: int
    speculative: int
    pages: int


class _Carry(NamedTuple):
    """The state that a pass changes.

    Attributes:
      caches: the caches of all layers.
      passed: history, progress and log probabilities.
      proposed, accepted: as in `DecodeOutput`.
      passes, speculative_passes: int32 [B], the passes in which each row was active.
      experts: as in `DecodeOutput`.
      going: bool [], whether there is another pass: of all lanes, which exchange what they compute in it.
    """

    caches: list[Cache]
    passed: PassState
    proposed: jax.Array
    accepted: jax.Array
    passes: jax.Array
    speculative_passes: jax.Array
    experts: ExpertCounts | None
    going: jax.Array


def decode(
    model: "Decoder",
    adapters: list[LayerAdapters] | None,
    state: DeviceState,
    rows: Rows,
    bitmask: jax.Array,
    passes: jax.Array,
    speculation_limit: jax.Array,
    *,
    max_passes: int,
    num_speculative_tokens: int,
    processors: LogitsProcessors,
    counts_experts: bool,
) -> tuple[DeviceState, DecodeOutput]:
    """Run up to `passes` passes of the model over one token a row, or over that and its speculative tokens.

    Args:
      bitmask: uint32 [B, V / 32], valid for all passes; rows whose bitmask changes take one pass a step.
      passes: int32 [], at most `max_passes`. Ends early when all rows are done, those of other lanes too.
      speculation_limit: int32 [B], how many speculative tokens each row may have in a pass, at most
        `num_speculative_tokens`.
      counts_experts: whether the output has `experts`.
    """
    slots, slot = state.slots, rows.slot
    step, before = DecodeRows.from_slots(slots, rows, bitmask), progress_of(slots, slot)
    batch, width = len(slot), max_passes * (1 + num_speculative_tokens)
    zeros = jnp.zeros(batch, jnp.int32)

    def run(carry: _Carry, guess: Speculation) -> _Carry:
        return _pass(model, adapters, step, carry, guess, passes, processors)

    def plain(carry: _Carry) -> _Carry:
        return run(carry, Speculation.none(batch))

    def speculative(carry: _Carry) -> _Carry:
        # A row whose speculative tokens were mostly wrong gets no more in this step.
        limit = jnp.where(carry.accepted * MIN_ACCEPTED >= carry.proposed, speculation_limit, 0)
        history, progress, _ = carry.passed
        guess = speculate(history, slot, progress, step.options, limit, num_speculative_tokens)
        speculates = any_part(jnp.any(guess.num_tokens > 0), "batch")
        return lax.cond(speculates, lambda carry: run(carry, guess), plain, carry)

    going = any_part(jnp.any(before.active) & (passes > 0), "batch")
    passed = PassState(slots.history, before, no_logprobs((batch, width)))
    experts = no_counts(batch, *_experts_of(model)) if counts_experts else None
    carry = _Carry(state.caches, passed, zeros, zeros, zeros, zeros, experts, going)
    carry = lax.while_loop(lambda carry: carry.going, speculative if num_speculative_tokens else plain, carry)
    speculated = jnp.max(carry.speculative_passes)
    counts = jnp.stack([jnp.max(carry.passes) - speculated, speculated])
    slots, output = finish_step(slots, step, carry.passed, carry.proposed, carry.accepted, counts, width=width)
    return DeviceState(carry.caches, slots), output._replace(experts=carry.experts)


def _experts_of(model: "Decoder") -> tuple[int, int]:
    """Return how many layers have experts, and how many experts each of them has."""
    layers = model.cfg.moe_layers
    moe = model.cfg.layer(layers[0]).mlp.moe
    assert moe is not None
    return len(layers), moe.router.experts


def _pass(
    model: "Decoder",
    adapters: list[LayerAdapters] | None,
    step: DecodeRows,
    carry: _Carry,
    guess: Speculation,
    max_passes: jax.Array,
    processors: LogitsProcessors,
) -> _Carry:
    """Run one pass over 1 + W tokens a row. max_passes: int32 []."""
    before = carry.passed
    group = tokens_of(before.history, step.rows, before.progress.position, step.adapter, guess)
    routings: list[Routing] = []
    speculates = guess.tokens.shape[1] > 0
    (hidden,), caches = model.forward((group,), carry.caches, adapters, routings, speculates=speculates)
    assert caches is not None
    passed, accepted = verify(model, step, before, hidden, guess, processors)
    active = before.progress.active.astype(jnp.int32)
    passes, experts = carry.passes + active, carry.experts
    if experts is not None:
        experts = jax.tree.map(jnp.add, experts, count_experts(routings, (group,)))
    return _Carry(
        caches,
        passed,
        carry.proposed + guess.num_tokens,
        carry.accepted + accepted,
        passes,
        carry.speculative_passes + active * int(speculates),
        experts,
        any_part(jnp.any(passed.progress.active & (passes < max_passes)), "batch"),
    )


def build(static: DecoderStatic, sizes: Decode) -> Callable[..., Any]:
    """Build the function of these sizes."""
    body = functools.partial(
        decode,
        max_passes=static.engine.max_decode_passes,
        num_speculative_tokens=sizes.speculative,
        processors=static.processors,
        counts_experts=static.engine.expert_load,
    )
    return static.with_model(body)


def spec(layout: DeviceLayout) -> ProgramSpec[Decode, Buckets]:
    """The spec for an engine."""

    def arguments(sizes: Decode) -> tuple[Any, ...]:
        batch = sizes.batch
        inputs = layout.rows(batch, sizes.pages), layout.bitmask(batch), integers(), integers(batch)
        return (layout.leaves, layout.adapters, layout.state, *layout.inputs(*inputs))

    return ProgramSpec(
        sizes=Decode,
        build=build,
        static=layout.static,
        arguments=arguments,
        reachable=lambda buckets: (
            Decode(batch=batch, speculative=speculative, pages=pages)
            for pages in buckets.page_tables
            for batch in buckets.decode_rows
            for speculative in sorted({0, layout.engine.num_speculative_tokens})
        ),
        donate=(2,),
        out_shardings=lambda sizes: None if layout.mesh is None else (layout.state_shardings, layout.output_sharding),
        compiler_options=lambda sizes: layout.compiler_options(tokens=sizes.batch * (1 + sizes.speculative)),
    )
