"""Schedules keep the order that data asks for, and are as long as the closed forms say."""

import collections
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.sharding import schedules
from jaxinfer.sharding.schedules import Job, Phase, Schedule, chunk_costs, chunk_sizes, chunked, drained, hybrid, queued

STAGES, MICRO_BATCHES, TOKENS = st.integers(1, 6), st.integers(1, 9), st.integers(1, 6)
UNITS = st.floats(0.01, 100)
KINDS = st.sampled_from([drained, queued])


def ticks_of(schedule):
    """The tick of each job at each stage; fails if a job comes twice."""
    ticks = {}
    for tick, jobs in enumerate(schedule.ticks):
        for stage, job in enumerate(jobs):
            if job is not None:
                assert ticks.setdefault((stage, job), tick) == tick
    return ticks


def check_stages(schedule, jobs):
    """Each job runs once at each stage, a tick after the stage before it."""
    ticks = ticks_of(schedule)
    assert ticks.keys() == {(stage, job) for stage in range(schedule.stages) for job in jobs}
    assert all(ticks[stage, job] == ticks[0, job] + stage for stage, job in ticks)
    return ticks


def check_tokens(schedule, ticks):
    """A token of a micro-batch enters after the one before it has left the last stage."""
    last = schedule.stages - 1
    for stage, job in ticks:
        before = [
            tick
            for (s, other), tick in ticks.items()
            if (s, other.micro_batch, other.token) == (last, job.micro_batch, job.token - 1)
        ]
        assert stage > 0 or all(tick < ticks[0, job] for tick in before)


def jobs_of(micro_batches, tokens, prompt_units=None):
    units = 1.0 if prompt_units is None else prompt_units / micro_batches
    prompts = [Job(each, Phase.PROMPT, 0, 0, units) for each in range(micro_batches)]
    return prompts + [Job(each, Phase.GENERATION, token) for each in range(micro_batches) for token in range(1, tokens)]


def simulate(stages, micro_batches, tokens, *, drain):
    """What stages do that each take what has come first; a micro-batch that comes back stands in line again."""
    lines = [
        collections.deque((each, 0) for each in range(micro_batches)),
        *(collections.deque() for _ in range(stages - 1)),
    ]
    back, ticks = [], []
    while any(lines):
        running = [line.popleft() if line else None for line in lines]
        ticks.append(tuple(job and schedules.job_of_pass(*job) for job in running))
        for stage, job in enumerate(running):
            if job is not None and stage + 1 < stages:
                lines[stage + 1].append(job)
            elif job is not None and job[1] + 1 < tokens:
                back.append((job[0], job[1] + 1))
        if not drain or not any(lines):
            lines[0].extend(back)
            back = []
    return Schedule(stages, tuple(ticks))


@given(STAGES, MICRO_BATCHES, TOKENS, st.booleans())
def test_schedules_are_what_queues_do(stages, micro_batches, tokens, drain):
    made = (drained if drain else queued)(stages, micro_batches, tokens)
    assert made == simulate(stages, micro_batches, tokens, drain=drain)


@given(KINDS, STAGES, MICRO_BATCHES, TOKENS, UNITS)
def test_dependencies_hold(kind, stages, micro_batches, tokens, units):
    schedule = kind(stages, micro_batches, tokens, prompt_units=units)
    check_tokens(schedule, check_stages(schedule, jobs_of(micro_batches, tokens, units)))


@given(KINDS, STAGES, MICRO_BATCHES, TOKENS)
def test_micro_batches_keep_their_order(kind, stages, micro_batches, tokens):
    schedule = kind(stages, micro_batches, tokens)
    expected = [(token, each) for token in range(tokens) for each in range(micro_batches)]
    for stage in range(stages):
        jobs = [tick[stage] for tick in schedule.ticks]
        assert [(job.token, job.micro_batch) for job in jobs if job] == expected


@given(STAGES, MICRO_BATCHES, TOKENS)
def test_idle_slots_are_the_closed_forms(stages, micro_batches, tokens):
    waiting, going_on = drained(stages, micro_batches, tokens), queued(stages, micro_batches, tokens)
    assert waiting.idle_slots == schedules.drained_idle(stages, tokens) == tokens * stages * (stages - 1)
    assert len(waiting.ticks) == tokens * (micro_batches + stages - 1)
    assert going_on.idle_slots == schedules.queued_idle(stages, micro_batches, tokens)
    if micro_batches >= stages:
        assert going_on.idle_slots == stages * (stages - 1)
        assert len(going_on.ticks) == micro_batches * tokens + stages - 1
    for schedule in (waiting, going_on):
        assert schedule.utilisation == pytest.approx(1 - schedule.idle_share)
        assert schedule.slots - schedule.idle_slots == stages * micro_batches * tokens
        assert schedule.idle_share == pytest.approx(schedule.idle_slots / schedule.slots)
        assert schedule.length == len(schedule.ticks)


@given(STAGES, TOKENS)
def test_the_gain_of_queueing_is_its_closed_form(stages, tokens):
    gain = drained(stages, stages, tokens).length / queued(stages, stages, tokens).length
    assert gain == pytest.approx(schedules.queued_gain(stages, tokens))


@given(STAGES, MICRO_BATCHES, MICRO_BATCHES, TOKENS, UNITS)
def test_hybrids_read_prompts_and_generate_in_their_micro_batches(stages, prompts, generations, tokens, units):
    schedule = hybrid(stages, prompts, generations, tokens, prompt_units=units)
    jobs = jobs_of(prompts, 1, units) + [job for job in jobs_of(generations, tokens) if job.token]
    ticks = check_stages(schedule, jobs)
    check_tokens(schedule, ticks)
    read = max(tick for (_, job), tick in ticks.items() if job.phase is Phase.PROMPT)
    assert all(tick > read for (_, job), tick in ticks.items() if job.phase is Phase.GENERATION)
    if generations >= stages:
        read_units = units * (prompts + stages - 1) / prompts
        decode_units = generations * (tokens - 1) + stages - 1 if tokens > 1 else 0
        assert schedule.length == pytest.approx(read_units + decode_units)


def test_few_micro_batches_of_both_kinds_are_slower_than_the_hybrid_as_are_many():
    """Fig. 3."""
    few, many, both = (hybrid(4, *counts, 8, prompt_units=8.0) for counts in ((4, 4), (16, 16), (16, 4)))
    assert both.length < min(few.length, many.length)
    read = [
        sum(units for jobs, units in zip(s.ticks, s.durations, strict=True) if phase(jobs)) for s in (few, many, both)
    ]
    assert read == [14.0, 9.5, 9.5]
    assert [s.length - time for s, time in zip((few, many, both), read, strict=True)] == [31.0, 115.0, 31.0]


def phase(jobs):
    return any(job and job.phase is Phase.PROMPT for job in jobs)


@given(STAGES, st.lists(UNITS, min_size=1, max_size=9))
def test_chunks_follow_one_another(stages, units):
    schedule = chunked(stages, units)
    jobs = [Job(0, Phase.PROMPT, 0, chunk, each) for chunk, each in enumerate(units)]
    ticks = check_stages(schedule, jobs)
    for stage in range(stages):
        assert [ticks[stage, job] for job in jobs] == [stage + chunk for chunk in range(len(units))]
    expected = sum(max(units[max(0, tick - stages + 1) : tick + 1]) for tick in range(len(units) + stages - 1))
    assert schedule.length == pytest.approx(expected)
    assert schedule.utilisation * schedule.length == pytest.approx(sum(units))


@given(STAGES, st.integers(1, 12))
def test_the_speed_up_of_equal_chunks_is_its_closed_form(stages, chunks):
    alone, split = (chunked(each, [1.0] * chunks).length / each for each in (1, stages))
    assert alone / split == pytest.approx(schedules.chunk_speedup(stages, chunks))


COSTS = st.floats(0, 10)


@given(st.integers(1, 5000), st.integers(1, 40), COSTS, COSTS)
def test_chunks_never_grow_and_are_the_prompt(tokens, chunks, per_token, per_pair):
    if per_token + per_pair == 0 or chunks > tokens:
        chunks, per_token = min(chunks, tokens), 1.0
    sizes = chunk_sizes(tokens, chunks, per_token=per_token, per_pair=per_pair)
    assert (sum(sizes), len(sizes)) == (tokens, chunks)
    assert min(sizes) >= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@given(st.integers(1000, 100_000), st.integers(1, 16), st.floats(0, 1e-3))
def test_chunks_take_equally_long(tokens, chunks, per_pair):
    """But for what rounding changes: a token of each chunk, and as many tokens before it as there are chunks."""
    sizes = chunk_sizes(tokens, chunks, per_pair=per_pair)
    costs = chunk_costs(sizes, per_pair=per_pair)
    assert math.fsum(costs) == pytest.approx(tokens + per_pair * tokens**2 / 2)
    token = 1 + per_pair * (tokens + chunks * sizes[0])
    assert max(costs) - min(costs) <= 2 * token


def test_shrinking_chunks_are_faster_than_equal_ones():
    cost = {"per_pair": 1 / 24576}
    lengths = [chunked(4, chunk_costs(sizes, **cost)).length for sizes in ((4096,) * 8, chunk_sizes(32768, 8, **cost))]
    assert lengths[0] > 1.09 * lengths[1]
    whole = sum(chunk_costs((32768,), **cost))
    assert 4 * whole / lengths[1] == pytest.approx(schedules.chunk_speedup(4, 8), rel=1e-3)


@pytest.mark.parametrize(("stages", "micro_batches", "passes"), [(4, 4, 3), (4, 2, 3), (2, 5, 4), (1, 3, 2)])
@pytest.mark.parametrize("kind", [drained, queued])
def test_what_is_traced_is_what_is_planned(kind, stages, micro_batches, passes):
    """The sizes too, as in a program that runs any number of them."""

    @jax.jit
    def job(tick, stage, micro_batches, passes, stride):
        return jnp.stack(
            [
                jnp.int32(x)
                for x in schedules.ring_job(tick, stage, micro_batches=micro_batches, passes=passes, stride=stride)
            ]
        )

    stride = getattr(schedules, f"{kind.__name__}_stride")(stages, micro_batches)
    ticks = schedules.ring_ticks(stages, micro_batches, passes, stride)
    each = jax.vmap(jax.vmap(job, (None, 0, None, None, None)), (0, None, None, None, None))
    table = each(jnp.arange(ticks), jnp.arange(stages), micro_batches, passes, stride)
    assert Schedule.from_ring(np.asarray(table)) == kind(stages, micro_batches, passes)


def test_the_figures_of_the_paper():
    """Four sequences, four stages, three tokens (Fig. 2); 50 tokens on two and five stages (Figs. 8 and 10b)."""
    assert [drained(4, 4, 3).idle_slots, queued(4, 4, 3).idle_slots] == [36, 12]
    assert [tick[0] and (tick[0].micro_batch, tick[0].token) for tick in queued(4, 4, 2).ticks] == [
        *((each, token) for token in range(2) for each in range(4)),
        *[None] * 3,
    ]
    gains = [round(schedules.queued_gain(stages, 50), 2) for stages in (2, 5)]
    assert gains == [1.49, 1.77]
    assert round(schedules.chunk_speedup(2, 8), 2) == 1.78


def test_a_ring_may_say_what_its_passes_are():
    table = [[(3, 7, 1), (0, 0, 0)], [(0, 0, 0), (3, 7, 1)]]
    job = Job(3, Phase.GENERATION, 9)
    made = Schedule.from_ring(table, lambda micro_batch, number: Job(micro_batch, Phase.GENERATION, number + 2))
    assert made == Schedule(2, ((job, None), (None, job)))
    assert (made.slots, made.idle_slots, made.durations) == (4, 2, (1.0, 1.0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: queued(0, 4, 3), r"Schedule\.stages must be an integer >= 1, below .*, got 0\."),
        (lambda: drained(4, 2.0, 3), r"Schedule\.micro_batches must be an integer >= 1, below .*, got 2\.0\."),
        (lambda: queued(4, 4, True), r"Schedule\.tokens must be an integer >= 1, below .*, got True\."),
        (lambda: hybrid(4, -1, 4, 3), r"Schedule\.prompt_micro_batches must be an integer >= 1, below .*, got -1\."),
        (lambda: queued(4, 4, 3, prompt_units=0), r"Schedule\.prompt_units must be a positive number, got 0\."),
        (lambda: chunked(4, []), r"Schedule\.chunks must be an integer >= 1, below .*, got 0\."),
        (lambda: chunked(4, [1, math.nan]), r"Schedule\.units\[1\] must be a positive number, got nan\."),
        (lambda: chunk_sizes(3, 4), r"Schedule\.chunks=4 is more than the prompt's 3 tokens; .* at least one\."),
        (lambda: chunk_sizes(9, 3, per_pair=-1), r"per_pair=-1 must be >= 0, and one of them above 0\."),
        (lambda: chunk_costs([3], per_token=0), r"per_token=0 and per_pair=0\.0 must be >= 0"),
        (lambda: queued(4, 4, 3).then(queued(2, 4, 3)), r"2 stages cannot follow 4; both need the same number\."),
        (lambda: Schedule(2, ((None,),)), r"Schedule\.ticks\[0\] has 1 jobs for 2 stages; give one for each stage"),
        (lambda: Schedule.from_ring([]), r"integers \[ticks, stages, 3\] with at least one tick.*; got 0 ticks"),
        (lambda: Schedule.from_ring([[[0, 1]]]), r"got 1 ticks of \[2\]\."),
        (lambda: Schedule.from_ring([[[0, 0, 1]], [[0, 0, 1]] * 2]), r"Schedule\.ticks\[1\] has 2 jobs for 1 stages"),
    ],
)
def test_what_is_no_schedule_is_refused_in_a_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
