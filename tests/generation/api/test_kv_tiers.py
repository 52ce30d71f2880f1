"""Pages of the prefix cache that host memory and disk keep: what was computed once is not computed again."""

import dataclasses
import signal
import subprocess
import sys
import threading
import time
from unittest import mock

import numpy as np
import pytest

from jaxinfer import LLM, AsyncLLM, Embedder, FinishReason, SamplingParams
from jaxinfer.compiled import Costs
from jaxinfer.generation.engine.host_pages import READ_PAGE, HostPages
from jaxinfer.generation.engine.restoring import RETRY, TRIES, WRITE_PAGE
from jaxinfer.generation.engine.speculation import PassCosts
from jaxinfer.generation.execution import memory
from jaxinfer.models.files.conversion import convert
from jaxinfer.serving.budget import BudgetError, host_budget
from tests.generation.conftest import PAGE_BYTES
from tests.generation.few_programs import few_programs
from tests.generation.sampled import fail_one_launch
from tests.generation.ways import with_costs
from tests.models import goldens
from tests.peft import random_pair, save_adapter

PAGES = 14  # of the devices; a request takes up to 8
PAGE = PAGE_BYTES // 2
SIZES = {"max_batch": 4, "context": 64, "page_size": 8, "token_budget": 16, "chunk_size": 16, "max_decode_passes": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
LIMIT = 200 * (PAGE + 4)
LONG = dataclasses.replace(GREEDY, max_tokens=24)
PROMPTS = [np.random.default_rng(seed).integers(0, 250, 40).tolist() for seed in range(6)]
"""Of five pages each: the devices have room for two."""


def make(model_dir, costs=None, **options):
    """An engine whose record of costs is fixed; by default it knows none, and so restores all that it can.

    No program is compiled to learn how much memory it needs.
    """
    with few_programs(), mock.patch.object(memory, "workspace_bytes", mock.Mock(return_value=0)):
        return with_costs(costs or Costs.fixed({}), model_dir, cache_bytes=PAGES * PAGE, **SIZES, **options)


def make_hosted(model_dir, pages=100, **options):
    return make(model_dir, host_kv=pages * PAGE, **options)


def make_on_disk(model_dir, folder, **options):
    return make(model_dir, disk_kv=folder, disk_kv_limit=LIMIT, **options)


@pytest.fixture(scope="module")
def hosted(model_dir):
    return make_hosted(model_dir)


@pytest.fixture(scope="module")
def expected(model_dir):
    """The tokens of each prompt, with nothing cached."""
    plain = make(model_dir)
    return {length: [tokens(plain, [p], params) for p in PROMPTS] for length, params in ((10, GREEDY), (24, LONG))}


@pytest.fixture
def llm(hosted):
    """With nothing cached, on the devices or the host."""
    hosted.engine.scheduler.pages.clear()
    hosted.engine.page_tier.free_memory()
    return hosted


class Work:
    """What an engine has done since this was made."""

    def __init__(self, llm):
        self._llm, self._before = llm, llm.stats()

    def __getattr__(self, name):
        now, before = self._llm.stats(), self._before
        if hasattr(now, name):
            return getattr(now, name) - getattr(before, name)
        return getattr(now.host_kv, name) - getattr(before.host_kv, name)


def tokens(llm, prompts, params=GREEDY):
    return [completion.token_ids for output in llm.generate(prompts, params) for completion in output.outputs]


def forget(llm):
    """Have the devices' pages overwritten: all are in the tree of other prompts."""
    for prompt in PROMPTS[2:]:
        llm.generate([prompt], GREEDY)


def test_prompts_that_were_forgotten_come_back(llm, expected):
    work = Work(llm)
    for _ in range(2):
        assert [tokens(llm, [prompt]) for prompt in PROMPTS] == expected[10]
    assert work.hits == len(PROMPTS)
    assert work.read_back == 4 * len(PROMPTS)
    assert work.read_back_bytes == work.read_back * PAGE
    assert work.cached_tokens == 32 * len(PROMPTS)
    assert 0 < llm.stats().host_kv.pages <= work.stored  # each page is written once
    assert work.stored <= 6 * len(PROMPTS)
    assert work.compile_misses == 0
    llm.engine.page_tier.check_integrity()


def test_sequences_that_give_way_are_swapped(llm, expected):
    """The pages of the third and the second are taken by the first, which grows to all that it can have."""
    prompts, params = [prompt[:16] for prompt in PROMPTS[:3]], dataclasses.replace(GREEDY, max_tokens=46)
    wanted = [tokens(llm, [prompt], params)[0] for prompt in prompts]
    llm.engine.scheduler.pages.clear()
    llm.engine.page_tier.free_memory()
    work = Work(llm)
    assert tokens(llm, prompts, params) == wanted
    assert work.preemptions > 1
    assert work.read_back > 0
    assert work.prompt_tokens == 3 * 16
    assert work.compile_misses == 0


def test_several_completions_share_what_came_back(llm):
    several = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=6, ignore_eos=True)
    wanted = tokens(llm, [PROMPTS[0]], several)
    forget(llm)
    work = Work(llm)
    assert tokens(llm, [PROMPTS[0]], several) == wanted
    assert (work.hits, work.read_back) == (1, 4)


def test_a_failed_step_loses_nothing_on_the_host(llm, expected, monkeypatch):
    tokens(llm, [PROMPTS[0]])
    forget(llm)
    fail_one_launch(llm.engine.executor, monkeypatch)
    assert llm.generate([PROMPTS[5]], GREEDY)[0].outputs[0].finish_reason is FinishReason.ERROR
    work = Work(llm)
    assert tokens(llm, [PROMPTS[0]]) == expected[10][0]
    assert work.read_back == 4


def test_pages_that_cannot_be_read_are_computed(llm, expected, monkeypatch, caplog):
    tokens(llm, [PROMPTS[0]])
    forget(llm)
    work = Work(llm)

    def fail(*_):
        raise OSError("damaged")

    monkeypatch.setattr(HostPages, "_read", fail)
    assert tokens(llm, [PROMPTS[0]]) == expected[10][0]
    monkeypatch.undo()
    assert "4 pages of the KV cache could not be read" in caplog.text
    assert (work.read_back, work.hits) == (0, 0)
    forget(llm)  # what was computed is kept again
    assert tokens(llm, [PROMPTS[0]]) == expected[10][0]
    assert work.read_back > 0


@pytest.mark.parametrize("end", ["read", "abort"])
def test_others_go_on_while_pages_come(llm, expected, monkeypatch, end):
    tokens(llm, [PROMPTS[0]])
    forget(llm)
    work, read, may_read = Work(llm), HostPages._read, threading.Event()

    def wait(*arguments):
        may_read.wait(60)
        return read(*arguments)

    monkeypatch.setattr(HostPages, "_read", wait)
    engine = llm.engine
    other, first = (
        engine.prepare(prompt, params).sequences() for prompt, params in ((PROMPTS[5], LONG), (PROMPTS[0], GREEDY))
    )
    engine.add(other)
    engine.step()
    engine.add(first)
    for _ in range(4):
        engine.step()
        engine.scheduler.check_integrity()
    assert engine.scheduler.allocation(first[0]).load is not None
    assert engine.scheduler.waits(first[0])
    assert other[0].num_output_tokens > 1
    if end == "abort":
        engine.abort(first[0].request_id)
    may_read.set()
    while not all(sequence.finished for sequence in (*other, *first)):
        engine.step()
        engine.scheduler.check_integrity()
    engine.drain()
    assert list(other[0].token_ids[40:]) == expected[24][5][0]
    assert (work.waited > 0) == (end == "read")
    if end == "read":
        assert list(first[0].token_ids[40:]) == expected[10][0][0]
    assert tokens(llm, [PROMPTS[0]]) == expected[10][0]


@pytest.fixture
def set_costs(llm, monkeypatch):
    """Sets the seconds of a chunk of two pages, and of reading and writing a page, in the record of costs."""

    def set_seconds(chunk, read, write):
        record, prefill = Costs(), ("prefill", (("chunks", 1), ("batch", 4), ("pages", 8)))
        for key, seconds in {prefill: chunk, (READ_PAGE, ()): read, (WRITE_PAGE, ()): write}.items():
            record.replace(*key, [seconds] * TRIES)
        costs = PassCosts(record, 0, chunks=(1,))
        monkeypatch.setattr(llm.engine.scheduler.allocator.restoring, "_costs", costs)

    return set_seconds


@pytest.mark.parametrize(("seconds", "pages", "from_back"), [(0.1, 4, 0), (0.3, 2, 2), (0.9, 0, 0)])
def test_pages_come_back_if_that_is_faster(llm, expected, set_costs, seconds, pages, from_back):
    """Four of five pages save two of three chunks, which take a second each."""
    set_costs(1.0, seconds, seconds)
    tokens(llm, [PROMPTS[0]])
    forget(llm)
    work = Work(llm)
    assert tokens(llm, [PROMPTS[0]]) == expected[10][0]
    assert (work.read_back, work.from_back) == (pages, from_back)
    assert work.cached_tokens == 8 * pages
    for _ in range(0 if pages else RETRY):  # once in a while it is tried again
        llm.engine.scheduler.pages.clear()
        tokens(llm, [PROMPTS[0]])
    assert work.hits == 1


def content_of(llm, prompt):
    """The keys and values of a prompt's full pages on the devices."""
    match = llm.engine.scheduler.pages.match(("root", None), prompt)
    llm.engine.scheduler.pages.release(match.pages + [match.copy_from] * (match.num_copied_tokens > 0))
    return [np.asarray(x)[match.pages] for layer in llm.engine.executor.state.arrays.caches for x in (layer.k, layer.v)]


@pytest.mark.parametrize("case", ["in time", "late", "too late", "fails", "abort", "gives way", "step fails"])
def test_a_prompt_comes_from_both_ends(llm, set_costs, monkeypatch, case):
    """The first two of its pages are computed, the next four come, and one more is computed."""
    prompt, brief = PROMPTS[0] + PROMPTS[1][:16], dataclasses.replace(GREEDY, max_tokens=4)
    (wanted,), content = tokens(llm, [prompt], brief), content_of(llm, prompt)
    forget(llm)
    work, read, may_read = Work(llm), HostPages._read, threading.Event()

    def wait(*arguments):
        may_read.wait(60)
        if case == "fails":
            raise OSError("damaged")
        return read(*arguments)

    monkeypatch.setattr(HostPages, "_read", wait)
    set_costs(*([1e-9] * 3 if "late" in case else [100.0] * 3))
    set_split(llm, monkeypatch, 2)
    engine, scheduler = llm.engine, llm.engine.scheduler
    other, first, last = (
        engine.prepare(tokens, params).sequences()[0]
        for tokens, params in ((PROMPTS[5][:8], LONG), (prompt, brief), (prompt, brief))
    )
    engine.add([other])
    engine.step()
    engine.add([first, last])
    for _ in range({"late": 2, "too late": 3}.get(case, 6)):
        engine.step()
        scheduler.check_integrity()
    allocation = scheduler.allocation(first)
    assert allocation.running
    assert (allocation.load is None) == (case == "too late")
    if case not in ("late", "too late"):
        assert allocation.num_prefilled_tokens == 16
        assert other.num_output_tokens > 1
        assert scheduler.waits(last)  # to share its pages
    if case == "abort":
        engine.abort(first.request_id)
    elif case == "gives way":
        scheduler._preempt(allocation)
    elif case == "step fails":
        fail_one_launch(engine.executor, pytest.MonkeyPatch())
    may_read.set()
    if case == "late":
        allocation.load.result.wait(60)
    while not (other.finished and first.finished and last.finished):
        engine.step()
        scheduler.check_integrity()
    engine.drain()
    assert list(last.token_ids[56:]) == wanted
    assert list(first.token_ids[56:]) == ([] if case == "abort" else wanted)
    come = {"in time": 4, "late": 2, "abort": 2, "gives way": 2, "step fails": 4}  # some found two pages more
    assert work.from_back == come.get(case, 0)
    for found, expected in zip(content_of(llm, prompt), content, strict=True):
        np.testing.assert_array_equal(found, expected)


def set_split(llm, monkeypatch, first):
    """Have so many of the first pages be computed while the others come; the record says when they are late."""
    restoring = llm.engine.scheduler.allocator.restoring
    split = restoring._split
    monkeypatch.setattr(restoring, "_split", lambda keys, tokens: (first, split(keys, tokens)[1]))


def stored_by_drain(llm, prompt):
    """The pages that are stored once a turn has ended: while requests wait, and later."""
    (sequence,) = llm.engine.prepare(prompt, GREEDY).sequences()
    llm.engine.add([sequence])
    while not sequence.finished:
        llm.engine.step()
    llm.engine.page_tier.settle()
    stored = [llm.stats().disk_kv.stored]
    for is_wanted in (True, False):
        llm.engine.drain(lambda is_wanted=is_wanted: is_wanted)
        llm.engine.page_tier.settle()
        stored.append(llm.stats().disk_kv.stored)
    return np.diff(stored).tolist()


def test_the_next_process_goes_on(hosted, model_dir, tmp_path, monkeypatch, caplog):
    """Here it is another engine. Pages of ended turns are on disk at once, though nothing took their place."""
    folder = tmp_path / "kv"
    with make_on_disk(model_dir, folder) as first:
        wanted = [tokens(first, [prompt]) for prompt in PROMPTS[:2]]
        assert first.stats().preemptions == first.stats().disk_kv.read_back == 0
        first.engine.page_tier.settle()
        assert first.stats().disk_kv.stored == len(list(folder.glob("[0-9a-f]*"))) == 2 * 6
        assert tokens(first, [PROMPTS[0]]) == wanted[0]  # from the devices
        with monkeypatch.context() as patch:
            patch.setattr(first.engine.executor, "read_pages", None)  # raises TypeError
            other = tokens(first, [PROMPTS[2]])
        assert "Pages of the KV cache could not be saved" in caplog.text
        assert tokens(first, [PROMPTS[2]]) == other
        assert stored_by_drain(first, PROMPTS[3]) == [0, 6]
    with make_on_disk(model_dir, folder, host_kv=100 * PAGE) as later:
        work = Work(later)
        assert [tokens(later, [prompt]) for prompt in PROMPTS[:2]] == wanted
        kept = later.stats()
        assert (kept.disk_kv.read_back, kept.disk_kv.hits, kept.host_kv.stored) == (2 * 4, 2, 0)
        assert (work.cached_tokens, work.compile_misses) == (2 * 32, 0)
        forget(later)  # now the host has them, too
        assert tokens(later, [PROMPTS[0]]) == wanted[0]
        assert later.stats().host_kv.read_back == 4


def test_the_ledger_has_what_was_asked_for(llm, model_dir):
    assert 100 * PAGE in [h.bytes for h in host_budget().holdings if h.tenant == "KV pages of the host"]
    with pytest.raises(BudgetError, match=r"host_kv=4398046511104000: .* of the host's memory are free: lower it"):
        make(model_dir, host_kv="4000TiB")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_kv": PAGE, "prefix_caching": False}, "prefix_caching=False: leave one of them out"),
        ({"host_kv": PAGE - 1}, f"no room for one page of 8 tokens, which takes .*{PAGE} bytes"),
        ({"host_kv": "much"}, "host_kv must be bytes or a size"),
        ({"disk_kv": "kv"}, r"disk_kv=kv, disk_kv_limit=None: give both, a folder and the bytes"),
        ({"disk_kv_limit": "1GiB"}, r"disk_kv=None, disk_kv_limit=1073741824: give both"),
        ({"disk_kv": "", "disk_kv_limit": 9}, "disk_kv must be the path of a folder, got ''"),
        ({"disk_kv": __file__, "disk_kv_limit": 9}, "disk_kv must be a folder, and .*test_kv_tiers.py is a file"),
        ({"disk_kv": "/proc/kv", "disk_kv_limit": 9}, r"disk_kv='/proc/kv': it cannot be written \(.*\): name another"),
        ({"disk_kv": "/proc", "disk_kv_limit": 9}, "disk_kv='/proc': it has other files, such as '.*': name a new"),
        ({"disk_kv": "kv", "disk_kv_limit": "9000TiB"}, r"disk_kv='kv': .* bytes\) of its disk are free or have its"),
        (
            {"disk_kv": "kv", "disk_kv_limit": PAGE - 1},
            "disk_kv_limit=2047 has no room for one page of 8",
        ),
        (
            {"disk_kv": "kv", "disk_kv_limit": PAGE, "prefix_caching": False},
            "disk_kv=kv keeps pages of the prefix",
        ),
    ],
)
def test_what_cannot_be_is_refused(model_dir, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        make(model_dir, **options)


@pytest.mark.slow
def test_sleep_keeps_or_frees_the_host(model_dir, expected):
    with few_programs():
        llm = AsyncLLM(model_dir, cache_bytes=PAGES * PAGE, host_kv=100 * PAGE, **SIZES)
    with llm:

        def answer(prompt):
            return llm.submit(prompt, GREEDY).result(60).outputs[0].token_ids

        for prompt in PROMPTS:
            answer(prompt)
        for level, kept in ((1, True), (2, False)):
            awake = llm.reserved.total()
            llm.sleep(level=level)
            assert (llm.reserved.total() >= 100 * PAGE) == kept
            assert (llm.engine.page_tier.stats["host_kv"].pages > 0) == kept
            llm.wake_up()
            assert llm.reserved.total() == awake
            assert answer(PROMPTS[0]) == expected[10][0][0]
            assert (llm.stats().cached_tokens == 32) or not kept


def test_an_encoder_has_no_pages(tmp_path):
    convert(goldens.DIRECTORY / "bert_awkward", tmp_path / "bert")
    with pytest.raises(ValueError, match=r"Embedder.host_kv=1024 is for decoders, .* leave it out"):
        Embedder(tmp_path / "bert", host_kv="1KiB")


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_int8_pages_come_back_with_their_scales(model_dir, tmp_path, tier):
    size = {"kv_dtype": "int8", "cache_bytes": PAGES * 600}
    options = {"host": {"host_kv": 1 << 20}, "disk": {"disk_kv": tmp_path / "kv", "disk_kv_limit": 1 << 20}}
    with few_programs():
        plain = with_costs(Costs.fixed({}), model_dir, **SIZES | size)
        llm = with_costs(Costs.fixed({}), model_dir, **SIZES | size | options[tier])
    wanted = [tokens(plain, [prompt]) for prompt in PROMPTS]
    for _ in range(2):
        assert [tokens(llm, [prompt]) for prompt in PROMPTS] == wanted
    assert getattr(llm.stats(), f"{tier}_kv").read_back == 4 * len(PROMPTS)


@pytest.mark.slow
def test_sleep_keeps_the_disk(model_dir, expected, tmp_path):
    with few_programs():
        options = {"disk_kv": tmp_path / "kv", "disk_kv_limit": LIMIT}
        llm = AsyncLLM(model_dir, cache_bytes=PAGES * PAGE, **options, **SIZES)
    with llm:
        for level, cached in ((None, 0), (1, 32), (2, 64)):
            if level is not None:
                llm.sleep(level=level)
                llm.wake_up()
            assert llm.submit(PROMPTS[0], GREEDY).result(60).outputs[0].token_ids == expected[10][0][0]
            assert llm.stats().cached_tokens == cached


@pytest.mark.slow
def test_another_adapter_of_the_same_name_has_other_pages(model_dir, tmp_path):
    rng = np.random.default_rng(0)
    shape = LLM(model_dir).model.transformer.embed, 8
    folders = [
        save_adapter(tmp_path / name, {"model.layers.0.self_attn.v_proj": random_pair(shape[1] * 2, shape[0], 3, rng)})
        for name in ("one", "two")
    ]
    with_adapter = dataclasses.replace(GREEDY, adapter="a")

    def run(folder, **options):
        with make(model_dir, adapters={"a": folder}, **options) as llm:
            return tokens(llm, [PROMPTS[0]], with_adapter), llm.stats().disk_kv

    (first, _), (second, _) = map(run, folders)
    assert first != second
    disk = {"disk_kv": tmp_path / "kv", "disk_kv_limit": LIMIT}
    for folder, wanted, read_back in ((0, first, 0), (1, second, 0), (0, first, 4)):
        found, kept = run(folders[folder], **disk)
        assert (found, kept.read_back) == (wanted, read_back)


SERVER = """
import sys
from jaxinfer import LLM, AsyncLLM, SamplingParams
from tests.generation.api.test_kv_tiers import GREEDY, LIMIT, PAGE, PAGES, PROMPTS, SIZES
llm = AsyncLLM(sys.argv[1], cache_bytes=PAGES * PAGE, disk_kv=sys.argv[2], disk_kv_limit=LIMIT, **SIZES)
for prompt in PROMPTS[:2]:
    llm.submit(prompt, GREEDY).result(600)
print("ended", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("damaged", [False, True])
def test_sessions_of_a_killed_process_go_on(model_dir, expected, tmp_path, damaged, caplog):
    """Their turns ended five seconds before."""
    command = [sys.executable, "-c", SERVER, str(model_dir), str(tmp_path / "kv")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout.readline() == "ended\n"
        time.sleep(5)
        server.kill()
    assert server.returncode == -signal.SIGKILL
    if damaged:  # each in another place
        for number, file in enumerate(sorted((tmp_path / "kv").glob("[0-9a-f]*"))):
            data = bytearray(file.read_bytes())
            data[number * len(data) // 12] ^= 1
            file.write_bytes(data)
    llm = make_on_disk(model_dir, tmp_path / "kv")
    for _ in range(2):
        assert [tokens(llm, [prompt]) for prompt in PROMPTS[:2]] == expected[10][:2]
        llm.engine.scheduler.pages.clear()
    assert llm.stats().disk_kv.read_back == (2 if damaged else 16)
    named = [record for record in caplog.records if "is not used, and deleted: it is damaged" in record.message]
    assert len(named) == (4 if damaged else 0)  # the first of each prompt, which is written anew; then the second
