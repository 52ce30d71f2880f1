"""Snapshots of recurrent states that host memory and disk keep: prompts go on from them, with the same tokens."""

import dataclasses
import signal
import subprocess
import sys
import time
from unittest import mock

import jax
import numpy as np
import pytest

from jaxinfer.compiled import Costs
from jaxinfer.generation.engine.state_pages import StatePages
from jaxinfer.generation.execution import memory
from tests.generation.api.test_recurrent_states import GREEDY, SIZES, WAYS
from tests.generation.few_programs import few_programs
from tests.generation.sampled import fail_one_launch
from tests.generation.ways import with_costs
from tests.tiny import HYBRID, save_tiny

PAGE = 16 * HYBRID.layer(1).attention.kv_values * 4
PROMPTS = [np.random.default_rng(seed).integers(0, 250, 100).tolist() for seed in range(6)]
"""Of six pages before a snapshot: the devices have room for two with what follows, and snapshots of four."""
PAGES = 16  # as other engines of these sizes have, so that they share programs
LIMIT = 400 * PAGE
SHORT = [prompt[:60] for prompt in PROMPTS]
PARAMS = dataclasses.replace(GREEDY, logprobs=0)
WITHOUT_CACHE = dataclasses.replace(PARAMS, prompt_logprobs=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "hybrid", config=HYBRID)


def make(folder, **options):
    """An engine that restores all that it can, since its record of costs knows nothing."""
    sizes = SIZES | {"token_budget": 8, "cache_bytes": PAGES * PAGE}
    with few_programs(), mock.patch.object(memory, "workspace_bytes", mock.Mock(return_value=0)):
        return with_costs(Costs.fixed({}), folder, **sizes | options)


def on_disk(path):
    return {"disk_kv": path / "kv", "disk_kv_limit": LIMIT}


@pytest.fixture(scope="module")
def hosted(folder):
    return make(folder, host_kv=LIMIT)


@pytest.fixture
def llm(hosted):
    """With nothing cached, on the devices or the host."""
    hosted.engine.page_tier.settle()
    hosted.engine.scheduler.restart()
    hosted.engine.page_tier.free_memory()
    return hosted


@pytest.fixture(scope="module")
def expected(hosted):
    return [tokens(hosted, prompt, WITHOUT_CACHE) for prompt in PROMPTS]


def tokens(llm, prompt, params=PARAMS):
    """What follows a prompt: tokens, and how likely each was."""
    return answer(llm.generate([prompt], params)[0])


def answer(output):
    (completion,) = output.outputs
    return [(token.token_id, token.logprob) for token in completion.logprobs]


def turn(llm, prompt):
    """The tokens after a prompt, and how many of its tokens were not computed."""
    (output,) = llm.generate([prompt], PARAMS)
    return answer(output), output.num_cached_tokens


def restored(stats):
    return stats.read_back, stats.hits


def test_prompts_that_were_forgotten_go_on_from_their_states(llm, expected):
    before, state = llm.stats(), llm.engine._restoring[0]._states.count
    assert [turn(llm, prompt) for prompt in PROMPTS] == [(wanted, 0) for wanted in expected]
    assert [turn(llm, prompt) for prompt in PROMPTS] == [(wanted, 96) for wanted in expected]
    after = llm.stats()
    assert (after.host_kv.read_back - before.host_kv.read_back) == 6 * (6 + state)
    assert (after.host_kv.hits - before.host_kv.hits) == 6
    assert after.compile_misses == before.compile_misses
    llm.engine.scheduler.check_integrity()
    llm.engine.page_tier.settle()
    llm.engine.page_tier.check_integrity()


def test_the_state_is_what_tokens_come_from(llm, expected, monkeypatch):
    """With another one, the same pages give others."""
    for prompt in PROMPTS:
        turn(llm, prompt)
    unpack = StatePages.unpack

    def other(*arguments):
        block, state = unpack(*arguments)
        return block, jax.tree.map(lambda x: 3 * x, state)

    monkeypatch.setattr(StatePages, "unpack", other)
    found, cached = turn(llm, PROMPTS[0])
    assert cached == 96
    assert found != expected[0]


def test_a_state_comes_back_to_pages_that_are_on_the_devices(llm, expected):
    """Its place was taken, though there are pages for all."""
    short = [prompt[:20] for prompt in PROMPTS[:5]]
    wanted = [tokens(llm, prompt, WITHOUT_CACHE) for prompt in short]
    before, state = llm.stats().host_kv, llm.engine._restoring[0]._states.count
    assert [turn(llm, prompt)[0] for prompt in short] == wanted
    assert turn(llm, short[0]) == (wanted[0], 16)
    after = llm.stats().host_kv
    assert (after.read_back - before.read_back, after.hits - before.hits) == (state, 1)


def test_a_failed_step_loses_no_state_of_the_host(llm, expected, monkeypatch):
    for prompt in PROMPTS[:4]:
        turn(llm, prompt)
    fail_one_launch(llm.engine.executor, monkeypatch)
    llm.generate([PROMPTS[5]], GREEDY)
    assert turn(llm, PROMPTS[0]) == (expected[0], 96)


def test_the_next_process_goes_on_from_states(folder, expected, tmp_path):
    """Here it is another engine. States of ended turns are on disk at once, though nothing took their place."""
    with make(folder, **on_disk(tmp_path)) as first:
        state = first.engine._restoring[0]._states.count
        assert [turn(first, prompt)[0] for prompt in PROMPTS[:2]] == expected[:2]
        first.engine.page_tier.settle()
        assert first.stats().disk_kv.stored == 2 * (6 + state)  # no page after the state
    with make(folder, **on_disk(tmp_path), host_kv=LIMIT) as later:
        longer = [*PROMPTS[0], *(token for token, _ in expected[0]), 1, 2, 3]
        assert turn(later, longer)[1] == 96
        assert turn(later, PROMPTS[1]) == (expected[1], 96)
        kept = later.stats()
        assert restored(kept.disk_kv) == (2 * (6 + state), 2)
        assert kept.host_kv.read_back == 0


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("way", [*WAYS, "speculative"])
def test_every_way(folder, tmp_path, way, tier):
    """Two turns of each chat, in batches; from disk also to another engine."""
    options = WAYS.get(way, {"num_speculative_tokens": 3})
    if "mesh" in options and options["mesh"].pipeline > 1:
        options |= {"token_budget": 32}
    plain = make(folder, **options | {"prefix_caching": False, "cache_bytes": None})
    tiers, shape = {"host": {"host_kv": LIMIT}, "disk": on_disk(tmp_path)}, plain.memory.page_bytes
    params = dataclasses.replace(GREEDY, max_tokens=20)

    def chats(llm):
        """What follows each prompt, and then what follows all that and more."""
        first = [output.outputs[0].token_ids for output in llm.generate(SHORT, params)]
        longer = [prompt + found + [n] * 16 for n, (prompt, found) in enumerate(zip(SHORT, first, strict=True))]
        return first, [output.outputs[0].token_ids for output in llm.generate(longer, params)]

    expected = chats(plain)
    for engine in range(2 if tier == "disk" else 1):
        llm = make(folder, **options | {"cache_bytes": (PAGES + 6) * shape} | tiers[tier])
        for _ in range(2):
            assert chats(llm) == expected
        llm.engine.scheduler.check_integrity()
        kept = getattr(llm.stats(), f"{tier}_kv")
        assert kept.hits > (12 if engine else 6)
        assert kept.read_back >= kept.hits * llm.engine._restoring[0]._states.count
        assert llm.stats().compile_misses == 0
        assert llm.stats().cached_tokens >= 48 * kept.hits
        llm.close()


@pytest.mark.slow
def test_sequences_that_give_way_go_on_from_the_state_of_their_prompt(folder):
    """The devices have pages for one sequence, and the prompt of another."""
    params = dataclasses.replace(GREEDY, max_tokens=60)
    llm = make(folder, host_kv=LIMIT, cache_bytes=9 * PAGE)
    expected = [llm.generate([prompt], dataclasses.replace(params, prompt_logprobs=0)) for prompt in SHORT]
    llm.engine.scheduler.restart()
    llm.engine.page_tier.free_memory()
    outputs = llm.generate(SHORT, params)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for (o,) in expected]
    assert llm.stats().preemptions > 0
    assert llm.stats().host_kv.read_back > 0


SERVER = """
import sys
from jaxinfer import AsyncLLM
from tests.generation.api.test_state_tiers import LIMIT, PAGE, PAGES, PARAMS, PROMPTS, SIZES
sizes = SIZES | {"token_budget": 8, "cache_bytes": PAGES * PAGE}
llm = AsyncLLM(sys.argv[1], disk_kv=sys.argv[2], disk_kv_limit=LIMIT, **sizes)
for prompt in PROMPTS[:2]:
    llm.submit(prompt, PARAMS).result(600)
print("ended", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("damaged", [False, True])
def test_sessions_of_a_killed_process_go_on(folder, expected, tmp_path, damaged, caplog):
    """Their turns ended five seconds before."""
    command = [sys.executable, "-c", SERVER, str(folder), str(tmp_path / "kv")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout.readline() == "ended\n"
        time.sleep(5)
        server.kill()
    assert server.returncode == -signal.SIGKILL
    for file in (tmp_path / "kv").glob("[0-9a-f]*") if damaged else ():
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    llm = make(folder, **on_disk(tmp_path))
    cached = 0 if damaged else 96
    assert [turn(llm, prompt) for prompt in PROMPTS[:2]] == [(wanted, cached) for wanted in expected[:2]]
    assert ("is not used, and deleted: it is damaged" in caplog.text) == damaged
    if damaged:  # what is missing is written anew
        for _ in range(12):  # each load finds one
            llm.engine.page_tier.settle()
            llm.engine.scheduler.restart()
            last = turn(llm, PROMPTS[0])
        assert last == (expected[0], 96)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_kv": 2 * PAGE}, r"host_kv=\d+ has no room for one page of 16 tokens and a recurrent state, which take"),
        ({"host_kv": LIMIT, "prefix_caching": False}, "prefix_caching=False: leave one of them out"),
    ],
)
def test_what_cannot_be_is_refused(folder, options, message):
    with pytest.raises(ValueError, match=message):
        make(folder, **options)
