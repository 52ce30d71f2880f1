"""Requests of many tasks, event loops and threads, through one engine."""

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from random import Random

import numpy as np
import pytest

from jaxinfer import (
    LLM,
    AsyncLLM,
    Embedder,
    FinishReason,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
)
from jaxinfer.generation.api import async_llm
from jaxinfer.generation.api.preparation import Kind
from jaxinfer.generation.engine import ticket as engine_ticket
from jaxinfer.generation.engine import view
from jaxinfer.models.files.conversion import convert
from jaxinfer.serving import ClosedError, DeadlineExceededError, DiedError, FailedError, OverloadedError, ticket
from jaxinfer.serving import loop as loop_module
from tests.generation.api.test_embedding import GOLDEN
from tests.generation.conftest import SMALL, SMALL_BYTES

LONG = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
TO_FIRST_OUTPUT = 3
"""Steps in which a short prompt has its first output, and not all of `SHORT`."""
PATIENCE = 120.0
"""Seconds after which something that must happen is taken not to: never a matter of speed."""


@pytest.fixture(scope="module")
def llm(model_dir):
    """The model of every test here, by itself; its programs are compiled once."""
    llm = LLM(model_dir, cache_bytes=SMALL_BYTES, **SMALL)
    llm.engine.compile_ahead()
    return llm


@pytest.fixture(scope="module")
def short_outputs(llm):
    """Prompts, and what follows."""
    prompts = [prompt[:8] for prompt in prompts_of(6)]
    return prompts, [tokens_of(output) for output in llm.generate(prompts, SHORT)]


@pytest.fixture
def start(llm, model_dir, monkeypatch):
    """Makes an AsyncLLM around the model of `llm`; at the end nothing of its requests is left."""
    monkeypatch.setattr(async_llm, "load_engine", lambda path, **options: llm._loaded)
    monkeypatch.setattr(llm.engine, "close", lambda: None)  # other tests use it
    with contextlib.ExitStack() as stack:

        def start(**options):
            return stack.enter_context(contextlib.closing(AsyncLLM(model_dir, **options)))

        yield start
    scheduler = llm.engine.scheduler
    scheduler.check_integrity()
    assert not scheduler.waiting
    assert not scheduler.running
    assert scheduler.pages.free == scheduler.pages.count


@pytest.fixture
def served(start):
    return start()


class Gate:
    """Holds the driver before a step; `entered` says that it came there, `steps` how many have passed."""

    def __init__(self, engine):
        self.entered, self._passes = threading.Event(), threading.Semaphore(0)
        self.steps = 0
        self._step = engine.step

    def step(self, max_passes=None):
        self.entered.set()
        assert self._passes.acquire(timeout=PATIENCE)
        self.steps += 1
        return self._step(max_passes)

    def open(self, steps=1_000_000):
        """Let this many steps pass."""
        self._passes.release(steps)

    def close(self):
        self._passes = threading.Semaphore(0)


@pytest.fixture
def gate(llm, start, monkeypatch):
    """Before the AsyncLLM that `start` makes; one that a test leaves closed opens at its end, before that is closed."""
    gate = Gate(llm.engine)
    monkeypatch.setattr(llm.engine, "step", gate.step)
    yield gate
    gate.open()


def prompts_of(count, seed=0):
    random = Random(seed)
    return [random.choices(range(97, 105), k=random.randint(1, 30)) for _ in range(count)]


def tokens_of(output):
    return [completion.token_ids for completion in output.outputs]


def wait_until(condition):
    """For a state that another thread reaches without telling."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


async def read_all(stream):
    return [output async for output in stream]


# Results


def test_outputs_grow_to_what_llm_generates(llm, start):
    prompts = prompts_of(6)
    params = [SamplingParams(seed=i, max_tokens=20, ignore_eos=True, n=1 + i % 2, logprobs=1) for i in range(6)]
    limits = {"bad_words": ("ab", "c", "!!"), "allowed_token_ids": range(90)}
    params[::3] = [dataclasses.replace(options, **limits) for options in params[::3]]
    expected = llm.generate(prompts, params)
    served = start()

    async def main():
        streams = [served.generate(p, q) for p, q in zip(prompts, params, strict=True)]
        return await asyncio.gather(*map(read_all, streams))

    for outputs, whole in zip(asyncio.run(main()), expected, strict=True):
        assert tokens_of(outputs[-1]) == tokens_of(whole)
        for before, after in itertools.pairwise(outputs):
            pairs = list(zip(tokens_of(before), tokens_of(after), strict=True))
            assert all(longer[: len(shorter)] == shorter for shorter, longer in pairs)
            assert any(len(shorter) < len(longer) for shorter, longer in pairs) or after is outputs[-1]
        assert len({output.request_id for output in outputs}) == 1
        for completion in (completion for output in outputs for completion in output.outputs):
            assert len(completion.logprobs) == len(completion.token_ids)
            assert completion.cumulative_logprob == pytest.approx(sum(t.logprob for t in completion.logprobs))
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_pieces_of_text_and_the_whole(llm, start):
    params = SamplingParams(temperature=0, max_tokens=30, stop=("zq",))
    (output,) = llm.generate("import os", params)
    whole = output.outputs[0].text
    chat = [{"role": "user", "content": "hi"}]
    answer = llm.chat(chat, SHORT)
    served = start()

    async def main():
        pieces = [piece async for piece in served.generate("import os", params).text()]
        assert "".join(pieces) == whole
        assert all(pieces)
        deltas = [delta async for delta in served.generate("import os", params).deltas()]
        assert "".join(delta.outputs[0].text for delta in deltas) == whole
        assert [t for delta in deltas for t in delta.outputs[0].token_ids] == tokens_of(output)[0]
        assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        assert (await served.generate("import os", params).final()).outputs[0].text == whole
        assert tokens_of(await served.chat(chat, SHORT).final()) == tokens_of(answer)
        stream = served.generate("import os", params)
        await anext(stream)
        assert (await stream.final()).outputs[0].text == whole
        assert (await stream.final()).outputs[0].text == whole
        with pytest.raises(ValueError, match=r"A stream of text needs SamplingParams\.n=1, got 2"):
            await anext(served.generate("a", SamplingParams(n=2, max_tokens=50)).text())
        closed = served.generate("a")
        await closed.aclose()
        with pytest.raises(RuntimeError, match="closed before its first output"):
            await closed.final()

    asyncio.run(main())


def test_what_the_caller_changes_before_it_reads_changes_nothing(llm, served):
    prompt, chat, texts = [1, 2, 3], [{"role": "user", "content": "hi"}], [[1, 2, 3]]
    expected, answer, vectors = llm.generate(prompt, SHORT)[0], llm.chat(chat, SHORT), llm.embed(texts)

    async def main():
        streams, embedded = (served.generate(prompt, SHORT), served.chat(chat, SHORT)), served.embed(texts)
        prompt[0], chat[0]["content"] = 9, "bye"
        assert [tokens_of(await stream.final()) for stream in streams] == [tokens_of(expected), tokens_of(answer)]
        embedding = asyncio.create_task(embedded)
        await asyncio.sleep(0)  # until it has taken the texts
        texts[0][0] = 9
        np.testing.assert_allclose(await embedding, vectors, atol=1e-6)
        with pytest.raises(ValueError, match="messages must be a list of messages"):
            served.chat([])

    asyncio.run(main())


def test_final_builds_no_other_output(served, monkeypatch):
    built = []
    original = view.RequestView.snapshot
    monkeypatch.setattr(view.RequestView, "snapshot", lambda self: built.append(self) or original(self))
    asyncio.run(served.generate("a", LONG).final())
    assert len(built) == 1
    served.submit("a", LONG).result()
    assert len(built) == 2


def test_embeddings(llm, start):
    texts = ["import os", [1, 2, 3], "x" * 40]
    expected = llm.embed(texts)
    served = start(max_requests=2)  # fewer than there are texts

    async def main():
        np.testing.assert_allclose(await served.embed(texts), expected, atol=1e-6)
        assert (await served.embed([])).shape == (0, 32)
        assert (await served.embed("x")).shape == (1, 32)
        with pytest.raises(ValueError, match="Text 1: The prompt is empty"):
            await served.embed(["a", ""])

    asyncio.run(main())
    np.testing.assert_allclose(served.submit(texts[0], PoolingParams()).result(), expected[0], atol=1e-6)


def test_an_encoder_embeds_only(tmp_path):
    convert(GOLDEN, tmp_path / "encoder")
    prompts = [[1, 2, 3], [4] * 20]
    embedder = Embedder(tmp_path / "encoder", max_batch=2)
    expected = embedder.embed(prompts)
    stats = embedder.stats()
    assert (stats.prompt_tokens, stats.generated_tokens, stats.ended) == (23, 0, {FinishReason.STOP: 2})
    assert (stats.running, stats.waiting, stats.num_pages) == (0, 0, 0)
    served = AsyncLLM(tmp_path / "encoder", max_batch=2)

    async def main():
        async with served:
            np.testing.assert_allclose(await served.embed(prompts), expected, atol=1e-6)
            with pytest.raises(ValueError, match="can only embed: it is an encoder"):
                await served.generate([1, 2]).final()
            with pytest.raises(ValueError, match="has no tokenizer, so it cannot chat"):
                await served.chat([{"role": "user", "content": "hi"}]).final()

    asyncio.run(main())
    assert not served.is_running


def test_what_is_refused(served, model_dir):
    request = served.prepare("a", LONG)

    async def main():
        with pytest.raises(ValueError, match="The prompt is empty"):
            await anext(served.generate(""))
        with pytest.raises(ValueError, match="A prepared request already has its params"):
            await anext(served.generate(request, LONG))
        first = served.generate(request)
        await anext(first)
        with pytest.raises(ValueError, match="is in flight already"):
            await anext(served.generate(request))
        assert (await first.final()).outputs[0].finish_reason is FinishReason.LENGTH
        await served.generate(request).final()  # again, after its end

    asyncio.run(main())
    with pytest.raises(ValueError, match="Token ids"):
        served.submit([300])
    for wrong in (0, 1.5, "8", True):
        with pytest.raises(ValueError, match=f"AsyncLLM.max_requests must be an integer >= 1, below .*, got {wrong!r}"):
            AsyncLLM(model_dir, max_requests=wrong)


def test_requests_have_the_names_that_callers_give(gate, served):
    async def main():
        mine = served.generate("a", LONG, "mine")
        gate.open(TO_FIRST_OUTPUT)
        assert (await anext(mine)).request_id == "mine"
        assert (served.stats().running, served.stats().waiting) == (1, 0)
        chat = [{"role": "user", "content": "hi"}]
        for other in (served.generate("b", SHORT, "mine"), served.chat(chat, SHORT, "mine")):
            with pytest.raises(ValueError, match="Request 'mine' is in flight already: give another id"):
                await other.final()
        with pytest.raises(ValueError, match="is in flight already"):
            served.submit("b", SHORT, "mine")
        served.abort("mine")
        gate.open()
        assert (await mine.final()).outputs[0].finish_reason is FinishReason.ABORT
        assert (await served.generate("b", SHORT, "mine").final()).request_id == "mine"

    asyncio.run(main())


def test_options_are_those_of_llm(model_dir):
    with pytest.raises(TypeError, match="LLM has no option page_sizes"):
        AsyncLLM(model_dir, page_sizes=8)


# Many at once


class FailingStep:
    """Makes one step fail; `requests` are those of its sequences."""

    def __init__(self, executor, number, monkeypatch):
        self.number, self.requests = number, set()
        self._collect = executor.collect
        monkeypatch.setattr(executor, "collect", self.collect)

    def collect(self, step):
        self.number -= 1
        if self.number == 0:
            self.requests = {sequence.request_id for sequence in step.batch.sequences if not sequence.finished}
            raise RuntimeError("injected")
        return self._collect(step)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_64_tasks_with_random_cancellations_and_a_failing_step(llm, start, gate, monkeypatch, seed):
    gate.open()
    random = Random(seed)
    prompts = prompts_of(64, seed)
    params = [SamplingParams(seed=i, max_tokens=random.randint(1, 30), ignore_eos=True) for i in range(64)]
    expected = [tokens_of(output) for output in llm.generate(prompts, params)]
    # Cancelled after so many outputs, if there are; 0: before any, while others run and some stand in line.
    doomed = {index: max(0, i - 7) for i, index in enumerate(random.sample(range(64), 20))}
    gate.close()
    served = start(max_requests=40)
    failing = FailingStep(llm.engine.executor, random.randint(10, 60), monkeypatch)
    requests = [served.prepare(p, q) for p, q in zip(prompts, params, strict=True)]

    async def task(index):
        read = []
        async for output in served.generate(requests[index]):
            read.append(output)
            if doomed.get(index) == len(read):
                asyncio.current_task().cancel()
        return tokens_of(read[-1])

    async def main():
        tasks = [asyncio.create_task(task(index)) for index in range(64)]
        while served.num_requests < 64:
            await asyncio.sleep(0)
        for index, count in doomed.items():
            if count == 0:
                tasks[index].cancel()
        gate.open()
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE)

    results = asyncio.run(main())
    assert failing.requests
    kinds = {"as expected": 0, "cancelled": 0, "failed": 0}
    for index, (request, result) in enumerate(zip(requests, results, strict=True)):
        if isinstance(result, asyncio.CancelledError):
            assert index in doomed
            kinds["cancelled"] += 1
        elif isinstance(result, FailedError):
            assert request.request_id in failing.requests
            assert str(result) == "RuntimeError: injected"
            (got,), (whole,) = tokens_of(result.output), expected[index]
            assert got == whole[: len(got)]
            kinds["failed"] += 1
        else:
            assert result == expected[index]
            kinds["as expected"] += 1
    assert kinds["failed"] >= len(failing.requests - {requests[index].request_id for index in doomed})
    assert kinds["cancelled"] >= 8
    assert kinds["as expected"] >= 64 - len(doomed) - len(failing.requests)
    wait_until(lambda: served.num_requests == 0)


def test_several_event_loops_and_threads(llm, start):
    prompts = prompts_of(24)
    expected = [tokens_of(output) for output in llm.generate(prompts, LONG)]
    served = start(max_requests=8)

    def with_tasks(share):
        async def one(prompt):
            return tokens_of((await read_all(served.generate(prompt, LONG)))[-1])

        async def main():
            return await asyncio.gather(*map(one, share))

        return asyncio.run(main())

    def with_futures(share):
        return [tokens_of(future.result(PATIENCE)) for future in [served.submit(prompt, LONG) for prompt in share]]

    with ThreadPoolExecutor(6) as pool:
        ways = [with_tasks, with_futures] * 3
        results = list(pool.map(lambda way, i: way(prompts[i::6]), ways, range(6)))
    for i, found in enumerate(results):
        assert found == expected[i::6]
    assert served.num_requests == 0


def test_grammars_are_compiled_in_many_threads_beside_the_engine(llm, start):
    served = start()
    grammars = [StructuredOutputsParams(regex=f"[ab]{{{3 + i % 5}}}c") for i in range(24)]

    def one(grammar):
        params = SamplingParams(temperature=0, max_tokens=20, structured_outputs=grammar)
        return served.submit("ab", params).result(PATIENCE).outputs[0].text

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(one, grammars))
    assert [len(text) for text in texts] == [4 + i % 5 for i in range(24)]
    assert all(text.strip("ab") == "c" for text in texts)


# Preparing requests

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HELLO = [{"role": "user", "content": "hi"}]


def test_a_template_of_a_request_is_refused_unless_its_owner_allows_it(llm, served, start):
    with pytest.raises(ValueError, match="chat_template is the text of a template, which is code: name one of the"):
        served.chat(HELLO, SHORT, chat_template="{{ messages }}")

    async def main(served, template):
        return await served.chat(HELLO, SHORT, chat_template=template).final()

    for template in ("{{ messages[0].content }}", "default"):
        expected = llm.chat(HELLO, SHORT, chat_template=template)
        found = asyncio.run(main(start(trust_request_chat_template=True), template))
        assert tokens_of(found) == tokens_of(expected)
    with pytest.raises(ValueError, match=r"chat_template='other' is no template of this model"):
        asyncio.run(main(served, "other"))


def test_what_takes_for_ever_to_prepare_holds_nobody_up(start, monkeypatch):
    """Far more of it than there are threads."""
    served, done = start(trust_request_chat_template=True), []
    patterns = [{"type": "string", "pattern": f".*{i}.*"} for i in range(30)]
    endless = dataclasses.replace(SHORT, structured_outputs=StructuredOutputsParams(json={"allOf": patterns}))
    quick = dataclasses.replace(SHORT, structured_outputs=StructuredOutputsParams(regex="a+"))

    async def hostile(stream):
        try:
            await stream.final()
        finally:
            done.append(stream)

    async def main():
        streams = [served.chat(HELLO, SHORT, chat_template=ENDLESS) for _ in range(20)]
        streams += [served.generate("a", endless) for _ in range(20)]
        tasks = [asyncio.create_task(hostile(stream)) for stream in streams]
        while not all(sandbox._process for sandbox in sandboxes):
            await asyncio.sleep(0.01)
        await served.generate("a", SHORT).final()
        await served.generate("a", quick).final()
        await served.chat(HELLO, SHORT).final()
        await served.embed(["a"])
        assert not done
        await asyncio.to_thread(served.close)
        return await asyncio.gather(*tasks, return_exceptions=True)

    sandboxes = served._preparation._templates[Kind.GIVEN_TEMPLATE], served._preparation._slow_grammars
    for sandbox in sandboxes:
        monkeypatch.setattr(sandbox, "_seconds", PATIENCE)
    errors = asyncio.run(main())
    assert {type(error) for error in errors} == {ClosedError}


@pytest.mark.slow
def test_a_text_far_longer_than_the_context_is_refused_before_it_is_encoded(served, monkeypatch):
    encoded = []
    encode = type(served.tokenizer)._encode
    monkeypatch.setattr(
        type(served.tokenizer), "_encode", lambda self, text, **o: encoded.append(len(text)) or encode(self, text, **o)
    )
    for size in (2**21, 10**8):
        with pytest.raises(ValueError, match=rf"The prompt has {size:,} characters, far more than the context of "):
            served.prepare("ab" * (size // 2))
    assert encoded == [2**20]
    with pytest.raises(ValueError, match=r"messages has 10,000,0\d\d characters as JSON, at most 8,388,608"):
        served.chat([{"role": "user", "content": "a" * 10**7}])
    vectors = asyncio.run(served.embed(["ab" * 2**21, "ab" * 100]))
    np.testing.assert_array_equal(vectors[0], vectors[1])  # cut alike
    assert max(encoded) == 2**20


def test_what_arrives_during_a_step_is_added_together(llm, served, gate, monkeypatch):
    add, added = llm.engine.add, []

    def watch(sequences):
        sequences = list(sequences)
        added.append(len(sequences))
        add(sequences)

    monkeypatch.setattr(llm.engine, "add", watch)
    futures = [served.submit("a", SHORT)]
    assert gate.entered.wait(PATIENCE)
    futures += [served.submit(prompt, SHORT) for prompt in ("b", "c", "d")]
    gate.open()
    done, _ = wait(futures, PATIENCE)
    assert done == set(futures)
    assert [count for count in added if count] == [1, 3]


# Readers


def test_a_slow_reader_finds_the_newest_output(short_outputs, start, gate):
    (prompt, *_), (expected, *_) = short_outputs
    served = start()

    async def main():
        slow = served.generate(prompt, SHORT)
        gate.open(TO_FIRST_OUTPUT)
        first = await anext(slow)
        gate.open()
        await served.generate("b", LONG).final()  # begins later and takes longer, so the slow one has ended
        rest = await read_all(slow)
        assert len(first.outputs[0].token_ids) < SHORT.max_tokens
        assert [tokens_of(output) for output in rest] == [expected]

    asyncio.run(main())


def test_an_event_loop_that_stands_still_holds_up_nobody(short_outputs, start, gate):
    """And is told of changes once, however many there are."""
    prompts, expected = short_outputs
    served = start()
    standing, go_on, told = threading.Event(), threading.Event(), []

    def stands_still():
        async def main():
            loop = asyncio.get_running_loop()
            stream = served.generate(prompts[0], SHORT)
            gate.open(TO_FIRST_OUTPUT)
            await anext(stream)
            call = loop.call_soon_threadsafe

            def count(callback, *args):
                told.append(callback)
                return call(callback, *args)

            loop.call_soon_threadsafe = count
            standing.set()
            assert go_on.wait(PATIENCE)
            loop.call_soon_threadsafe = call
            return tokens_of(await stream.final())

        return asyncio.run(main())

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(stands_still)
        assert standing.wait(PATIENCE)
        gate.open()
        others = [served.submit(prompt, SHORT) for prompt in prompts[1:]]
        assert [tokens_of(future.result(PATIENCE)) for future in others] == expected[1:]
        wait_until(lambda: served.num_requests == 0)
        assert len(told) <= 1
        go_on.set()
        assert found.result(PATIENCE) == expected[0]


def test_a_loop_is_told_once_a_step(served, gate, monkeypatch):
    told, wake = [], ticket._wake
    monkeypatch.setattr(ticket, "_wake", lambda readers: told.append(len(readers)) or wake(readers))

    async def main():
        tasks = [asyncio.create_task(read_all(served.generate(prompt, LONG))) for prompt in ("a", "b", "c", "d")]
        while served.num_requests < 4:
            await asyncio.sleep(0)
        gate.open()
        await asyncio.gather(*tasks)

    asyncio.run(main())
    assert max(told) > 1
    assert len(told) <= gate.steps


def test_a_reader_is_told_anew_once_it_looks():
    """A change is told if it comes when the task may have looked already; else it would wait for ever."""

    async def main():
        reader = ticket.Reader()
        reader.attach()
        waiting = asyncio.create_task(reader.wait())
        await asyncio.sleep(0)
        assert reader.must_tell()
        assert not reader.must_tell()
        reader.wake()
        await asyncio.wait_for(waiting, PATIENCE)
        assert reader.must_tell()

    asyncio.run(main())


def test_requests_of_a_closed_event_loop_are_given_up(llm, served, gate):
    loop = asyncio.new_event_loop()
    request = served.prepare("a", LONG)
    stream = served.generate(request)
    gate.open(TO_FIRST_OUTPUT)
    loop.run_until_complete(anext(stream))
    (sequence,) = served._loop.find(request.request_id).sequences
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    gate.open()
    wait_until(lambda: served.num_requests == 0)
    assert sequence.finish_reason is FinishReason.ABORT


# Giving up


async def cancel_a_reader(stream):
    read = asyncio.Event()

    async def reader():
        async for _ in stream:
            read.set()

    task = asyncio.create_task(reader())
    await read.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave(stream):
    async for _ in stream:
        break


async def close(stream):
    await anext(stream)
    await stream.aclose()


@pytest.mark.parametrize("give_up", [cancel_a_reader, leave, close])
def test_who_leaves_a_stream_gives_its_request_up(llm, served, gate, monkeypatch, give_up):
    aborted, abort = [], llm.engine.abort
    monkeypatch.setattr(llm.engine, "abort", lambda request_id: aborted.append(request_id) or abort(request_id))
    request = served.prepare("a", LONG)
    gate.open(TO_FIRST_OUTPUT)

    async def main(stream):
        await give_up(stream)

    asyncio.run(main(served.generate(request)))
    gate.open()
    wait_until(lambda: served.num_requests == 0)
    assert set(aborted) == {request.request_id}  # perhaps twice: the event loop is closed too


@pytest.mark.parametrize("what", ["final", "text", "deltas", "embed"])
def test_a_cancelled_task_gives_its_request_up(llm, served, gate, monkeypatch, what):
    aborted, abort = [], llm.engine.abort
    monkeypatch.setattr(llm.engine, "abort", lambda request_id: aborted.append(request_id) or abort(request_id))

    async def main():
        waiting = {
            "final": lambda: served.generate("a", LONG).final(),
            "text": lambda: read_all(served.generate("a", LONG).text()),
            "deltas": lambda: read_all(served.generate("a", LONG).deltas()),
            "embed": lambda: served.embed(["a", "b"]),
        }[what]
        task = asyncio.create_task(waiting())
        count = 2 if what == "embed" else 1
        while served.num_requests < count:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return count

    count = asyncio.run(main())
    gate.open()
    wait_until(lambda: served.num_requests == 0)
    assert len(set(aborted)) == count


def test_a_cancelled_future_gives_the_request_up(llm, served, gate):
    kept, cancelled = served.submit("a", SHORT), served.submit("b", LONG)
    assert gate.entered.wait(PATIENCE)
    assert cancelled.cancel()
    gate.open()
    assert kept.result(PATIENCE).outputs[0].finish_reason is FinishReason.LENGTH
    wait_until(lambda: served.num_requests == 0)
    done, _ = wait([cancelled], PATIENCE)
    assert done == {cancelled}
    with pytest.raises(CancelledError):
        cancelled.result()


def test_aborting_by_id_ends_a_request_as_it_is(llm, served, gate):
    request = served.prepare("a", LONG)
    future = served.submit(request)
    vector = served.prepare("a" * 40, PoolingParams())
    embedding = served.submit(vector)
    assert gate.entered.wait(PATIENCE)
    for request_id in (request.request_id, request.request_id, vector.request_id, "unknown"):
        served.abort(request_id)
    gate.open()
    output = future.result(PATIENCE).outputs[0]
    assert output.finish_reason is FinishReason.ABORT
    assert len(output.token_ids) < LONG.max_tokens
    with pytest.raises(FailedError, match="The request was aborted"):
        embedding.result(PATIENCE)
    served.abort(request.request_id)
    again = served.submit(request)
    assert again.result(PATIENCE).outputs[0].finish_reason is FinishReason.LENGTH


def test_an_abort_does_not_meet_the_same_request_when_it_runs_again(served, gate):
    """It comes while the step runs that ends the request, which is queued once more before the next step."""
    request = served.prepare("a", SamplingParams(max_tokens=1, ignore_eos=True))
    again = Future()
    first = served.submit(request)
    first.add_done_callback(lambda _: again.set_result(served.submit(request)))
    assert gate.entered.wait(PATIENCE)
    gate.entered.clear()
    gate.open(1)
    assert gate.entered.wait(PATIENCE)
    served.abort(request.request_id)
    gate.open()
    assert first.result(PATIENCE).outputs[0].finish_reason is FinishReason.LENGTH
    assert again.result(PATIENCE).result(PATIENCE).outputs[0].finish_reason is FinishReason.LENGTH


# A full inbox


def test_a_full_inbox_holds_callers_up_in_their_order(llm, short_outputs, start, gate, monkeypatch):
    prompts, expected = short_outputs
    aborted, abort = [], llm.engine.abort
    monkeypatch.setattr(llm.engine, "abort", lambda request_id: aborted.append(request_id) or abort(request_id))
    added, arrive = [], llm.engine._outputs.arrive
    monkeypatch.setattr(
        llm.engine._outputs, "arrive", lambda s: added.append(list(s.request.prompt_token_ids)) or arrive(s)
    )
    served = start(max_requests=2)
    accepted = [served.submit(prompt, SHORT) for prompt in prompts[:2]]
    assert gate.entered.wait(PATIENCE)
    with pytest.raises(OverloadedError, match=r"2 requests are in flight already, and the limit \(2\) allows no more"):
        served.submit(prompts[2], SHORT, block=False)

    async def task():
        return tokens_of(await served.generate(prompts[3], SHORT).final())

    async def given_up():
        await served.generate(prompts[4], SHORT).final()

    with ThreadPoolExecutor(3) as pool:
        thread = pool.submit(served.submit, prompts[2], SHORT)
        wait_until(lambda: served.num_requests == 3)
        in_task = pool.submit(asyncio.run, task())
        wait_until(lambda: served.num_requests == 4)

        async def cancelled():
            doomed = asyncio.create_task(given_up())
            while served.num_requests < 5:
                await asyncio.sleep(0)
            doomed.cancel()
            with pytest.raises(asyncio.CancelledError):
                await doomed

        pool.submit(asyncio.run, cancelled()).result(PATIENCE)
        assert not thread.done()
        assert not in_task.done()
        gate.open()
        assert tokens_of(thread.result(PATIENCE).result(PATIENCE)) == expected[2]
        assert in_task.result(PATIENCE) == expected[3]
    assert [tokens_of(future.result(PATIENCE)) for future in accepted] == expected[:2]
    assert tokens_of(served.submit(prompts[5], SHORT, block=False).result(PATIENCE)) == expected[5]
    assert len(set(aborted)) == 1
    assert [ids for ids in added if ids != prompts[4]] == [prompts[i] for i in (0, 1, 2, 3, 5)]


def test_a_deadline_ends_a_request_with_what_there_is(llm, short_outputs, start, gate):
    (prompt, other, *_), (expected, others, *_) = short_outputs
    served = start(max_requests=2)

    async def main():
        late, in_line = served.generate(prompt, SHORT, deadline=0.5), served.generate("c", SHORT, deadline=0.5)
        task = asyncio.create_task(late.final())
        future = await asyncio.to_thread(served.submit, other, SHORT, deadline=3600.0)
        while served.num_requests < 2:
            await asyncio.sleep(1e-3)
        waiting = asyncio.create_task(in_line.final())
        await asyncio.sleep(0.6)
        gate.open()
        with pytest.raises(DeadlineExceededError, match="before the request began"):
            await waiting
        with pytest.raises(DeadlineExceededError, match="before the request had ended") as error:
            await task
        (tokens,) = tokens_of(error.value.output)
        assert len(tokens) < SHORT.max_tokens
        assert tokens == expected[0][: len(tokens)]
        assert tokens_of(await future) == others

    asyncio.run(main())
    requests = served.stats().requests
    assert (requests.answered, requests.shed) == (1, 2)
    assert str(served.stats()).endswith("requests    1 answered (0 late), 2 shed, 0 cancelled, 0 failed")
    with pytest.raises(ValueError, match="deadline must be a finite number >= 0 or None, got nan"):
        served.generate("a", deadline=float("nan"))


def test_a_full_line_refuses_tasks_and_threads(short_outputs, start, gate):
    (prompt, *_), (expected, *_) = short_outputs
    served = start(max_requests=1, max_waiting=0)
    first = served.submit(prompt, SHORT)
    assert gate.entered.wait(PATIENCE)
    with pytest.raises(OverloadedError, match="1 requests are in flight already"):
        served.submit("b", SHORT)
    with pytest.raises(OverloadedError):
        asyncio.run(served.generate("b", SHORT).final())
    gate.open()
    assert tokens_of(first.result(PATIENCE)) == expected


def test_requests_wait_for_a_place_in_the_batch_no_longer_than_the_limit(short_outputs, start, gate):
    (prompt, *_), (expected, *_) = short_outputs
    served = start(max_queue_time=0.2)
    running = [served.submit(prompt, SHORT) for _ in range(4)]
    assert gate.entered.wait(PATIENCE)
    waiting = [served.submit("b", SHORT), served.submit("c", SHORT)]
    time.sleep(0.3)
    gate.open()
    for future in waiting:
        with pytest.raises(OverloadedError, match=r"waited for .* s, and max_queue_time is 0\.2 s") as error:
            future.result(PATIENCE)
        assert error.value.output.outputs[0].text == ""
    assert [tokens_of(future.result(PATIENCE)) for future in running] == [expected] * 4
    requests = served.stats().requests
    assert (requests.answered, requests.shed) == (4, 2)


def test_a_request_of_higher_priority_takes_the_place_of_a_lower_one(short_outputs, start, gate):
    (prompt, *_), (expected, *_) = short_outputs
    served = start(max_queue_time=60.0)
    urgent = dataclasses.replace(SHORT, priority=-1)
    served._queue._interval = 25.0  # one may wait
    running = [served.submit(prompt, SHORT)]
    assert gate.entered.wait(PATIENCE)
    running += [served.submit(prompt, SHORT) for _ in range(3)]
    low = served.submit("b", SHORT)
    with pytest.raises(OverloadedError, match=r"It would wait for about 37\.5 s"):
        served.submit("c", SHORT)
    high = served.submit(prompt, urgent)
    gate.open()
    with pytest.raises(OverloadedError, match="gave way to a request of higher priority"):
        low.result(PATIENCE)
    assert [tokens_of(future.result(PATIENCE)) for future in [*running, high]] == [expected] * 5


def test_all_that_wait_count(start, gate):
    served = start(max_requests=1)
    futures = [served.submit("a", SHORT)]
    assert gate.entered.wait(PATIENCE)
    with ThreadPoolExecutor(2) as pool:
        in_line = [pool.submit(served.submit, "b", dataclasses.replace(SHORT, n=2)) for _ in range(2)]
        wait_until(lambda: served.num_requests == 3)
        waiting = served.stats().waiting
        gate.open()
        futures += [each.result(PATIENCE) for each in in_line]
    for future in futures:
        future.result(PATIENCE)
    assert waiting == 1 + 2 * 2
    assert served.stats().waiting == 0


def test_the_engines_own_thread_never_waits_for_itself(start, gate):
    served = start(max_requests=1)
    refused = Future()

    def again(_):
        try:
            served.submit("c", SHORT)
        except OverloadedError as error:
            refused.set_result(error)

    first = served.submit("a", SHORT)
    assert gate.entered.wait(PATIENCE)
    first.add_done_callback(again)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(served.submit, "b", SHORT)
        wait_until(lambda: served.num_requests == 2)
        while not first.done():  # step by step: the second must not have ended, too, when the callback is called
            steps = gate.steps
            gate.open(1)
            wait_until(lambda before=steps: gate.steps > before or first.done())
        assert isinstance(refused.result(PATIENCE), OverloadedError)
        gate.open()
        second.result(PATIENCE).result(PATIENCE)


# The end


def test_a_close_ends_every_request_once(llm, start, gate):
    served = start(max_requests=2)
    ends = []
    futures = [served.submit("a", LONG), served.submit("b", LONG)]
    for future in futures:
        future.add_done_callback(ends.append)
    assert gate.entered.wait(PATIENCE)

    async def task():
        async for _ in served.generate("c", LONG):
            pass

    with ThreadPoolExecutor(3) as pool:
        waiting = pool.submit(served.submit, "d", LONG)
        wait_until(lambda: served.num_requests == 3)
        reading = pool.submit(asyncio.run, task())
        wait_until(lambda: served.num_requests == 4)
        closing = pool.submit(served.close)
        wait_until(lambda: not served.is_running)
        gate.open()
        closing.result(PATIENCE)
        for future in (*futures, waiting.result(PATIENCE), reading):
            with pytest.raises(ClosedError, match="This AsyncLLM is closed"):
                future.result(PATIENCE)
    assert sorted(map(id, ends)) == sorted(map(id, futures))
    served.close()
    with pytest.raises(ClosedError, match="This AsyncLLM is closed"):
        served.submit("a")
    with pytest.raises(ClosedError, match="This AsyncLLM is closed"):
        asyncio.run(served.embed("a"))


def test_a_close_can_wait_for_the_requests(llm, start):
    prompts = prompts_of(10)
    expected = [tokens_of(output) for output in llm.generate(prompts, LONG)]
    served = start()
    futures = [served.submit(prompt, LONG) for prompt in prompts]
    served.close(drain=True)
    assert all(future.done() for future in futures)
    assert [tokens_of(future.result()) for future in futures] == expected
    with pytest.raises(ClosedError):
        served.submit("a")


def test_a_close_gives_up_a_step_that_hangs(llm, start, gate, monkeypatch):
    monkeypatch.setattr(loop_module, "HANGING_SECONDS", 0.2)
    served = start()
    future = served.submit("a", LONG)
    assert gate.entered.wait(PATIENCE)
    with pytest.raises(DiedError, match=r"has died of TimeoutError: its work has not ended for 0.2 s"):
        served.close()
    assert isinstance(future.exception(PATIENCE), DiedError)
    with pytest.raises(DiedError, match="not ended") as raised:
        served.submit("a")
    assert isinstance(raised.value.__cause__, TimeoutError)
    assert served.num_requests == 0
    gate.open()
    served._loop._thread.join(PATIENCE)
    served.close()
    for allocation in [*llm.engine.scheduler.waiting, *llm.engine.scheduler.running]:
        llm.engine.abort(allocation.sequence.request_id)
    llm.engine.drain()


def test_leaving_the_context_closes(served, gate):
    async def open_gate():
        while served.is_running:
            await asyncio.sleep(0)
        gate.open()

    async def main():
        async with served:
            running = asyncio.create_task(served.generate("a", LONG).final())
            opening = asyncio.create_task(open_gate())
            assert await asyncio.to_thread(gate.entered.wait, PATIENCE)
        await opening
        with pytest.raises(ClosedError, match="This AsyncLLM is closed"):
            await running

    asyncio.run(main())


class Interrupt(BaseException):
    """What is no `Exception`, as Ctrl-C and `sys.exit` are."""


PHASES = {
    "schedule": lambda engine: (engine.scheduler, "schedule"),
    "launch": lambda engine: (engine.executor, "launch"),
    "collect": lambda engine: (engine.executor, "collect"),
    "process": lambda engine: (engine._outputs, "process"),
    "commit": lambda engine: (engine.scheduler, "commit"),
    "add": lambda engine: (engine.scheduler, "add"),
    "abort": lambda engine: (engine.scheduler, "remove"),
    "deliver": lambda engine: (engine_ticket.RequestTicket, "advance"),
    "result": lambda engine: (engine_ticket.RequestTicket, "result"),
}
HARMED = {("launch", LookupError), ("collect", LookupError), ("result", LookupError), ("result", Interrupt)}
"""Where requests are known that it is about: their error it is."""


@pytest.mark.parametrize("error", [Interrupt, LookupError])
@pytest.mark.parametrize("phase", PHASES)
def test_it_survives_what_is_raised_once(llm, served, short_outputs, monkeypatch, phase, error):
    owner, name = PHASES[phase](llm.engine)
    function, calls = getattr(owner, name), itertools.count(1)

    def raise_once(*args):
        if next(calls) == (1 if phase == "abort" else 2):
            raise error("injected")
        return function(*args)

    monkeypatch.setattr(owner, name, raise_once)
    prompts, outputs = short_outputs

    async def task(prompt):
        async with contextlib.aclosing(served.generate(prompt, SHORT)) as stream:
            outputs = [await anext(stream)]  # of the first prompt no more: it is given up
            if prompt is not prompts[0]:
                outputs += [output async for output in stream]
        return tokens_of(outputs[-1])

    async def main():
        # The first prompt comes last: a step that it had for itself alone would fail unseen, since it is given up.
        return await asyncio.gather(*map(task, reversed(prompts)), return_exceptions=True)

    found = asyncio.run(asyncio.wait_for(main(), PATIENCE))[::-1]
    failed = [one for one in found if isinstance(one, FailedError)]
    assert bool(failed) == ((phase, error) in HARMED)
    assert all(f"{error.__name__}: injected" in str(one) for one in failed)
    for got, want in zip(found[1:], outputs[1:], strict=True):
        assert got == want or got in failed
    assert served.is_running
    for prompt, want in zip(prompts, outputs, strict=True):
        assert tokens_of(served.submit(prompt, SHORT).result(PATIENCE)) == want
    assert next(calls) > 1


def test_a_callback_that_raises_harms_nobody(start, gate, short_outputs):
    served = start()

    def interrupt(future):
        raise Interrupt

    prompts, outputs = short_outputs
    futures = [served.submit(prompt, SHORT) for prompt in prompts]
    for future in futures[:2]:
        future.add_done_callback(interrupt)
    gate.open()
    assert [tokens_of(future.result(PATIENCE)) for future in futures] == outputs
    assert tokens_of(served.submit(prompts[0], SHORT).result(PATIENCE)) == outputs[0]


def test_a_thread_that_dies_ends_every_request_once(llm, start, monkeypatch):
    served = start(max_requests=4)
    schedule, left = llm.engine.scheduler.schedule, [6]

    def die(max_passes=None):
        left[0] -= 1
        if left[0] <= 0:  # what comes once, the engine survives
            raise Interrupt("a page that is not there")
        return schedule(max_passes)

    monkeypatch.setattr(llm.engine.scheduler, "schedule", die)
    ends = []

    def blocking(index):
        future = served.submit("a" * (index + 1), LONG)
        future.add_done_callback(ends.append)
        return future

    async def task(index):
        async for _ in served.generate("b" * (index + 1), LONG):
            pass

    async def tasks():
        return await asyncio.gather(*[task(index) for index in range(4)], return_exceptions=True)

    with ThreadPoolExecutor(5) as pool:
        reading = pool.submit(asyncio.run, tasks())
        futures = [pool.submit(blocking, index) for index in range(4)]
        errors = list(reading.result(PATIENCE))
        for future in futures:
            if isinstance(error := future.exception(PATIENCE), DiedError):
                errors.append(error)  # it came when the thread had died
            else:
                errors.append(future.result().exception(PATIENCE))
    assert len(errors) == 8
    assert len(ends) == len(set(ends))
    for error in errors:
        assert isinstance(error, DiedError)
        assert str(error) == "This AsyncLLM has died of Interrupt: a page that is not there. Make another one."
        assert isinstance(error.__cause__, Interrupt)
    assert not served.is_running
    assert served.num_requests == 0
    with pytest.raises(DiedError, match="a page that is not there"):
        served.submit("a")
    with pytest.raises(DiedError, match="a page that is not there"):
        asyncio.run(served.generate("a").final())
    served.close()
    for allocation in [*llm.engine.scheduler.waiting, *llm.engine.scheduler.running]:
        llm.engine.abort(allocation.sequence.request_id)
    llm.engine.drain()


def test_dropping_it_ends_its_thread_when_its_requests_have_ended(llm, model_dir, monkeypatch):
    monkeypatch.setattr(async_llm, "load_engine", lambda path, **options: llm._loaded)
    monkeypatch.setattr(llm.engine, "close", lambda: None)  # other tests use it
    served = AsyncLLM(model_dir)
    thread = served._loop._thread
    served.submit("a", SHORT).result(PATIENCE)
    del served
    gc.collect()
    thread.join(PATIENCE)
    assert not thread.is_alive()

    served = AsyncLLM(model_dir)
    thread = served._loop._thread
    future = served.submit("a", LONG)
    del served
    gc.collect()
    assert future.result(PATIENCE).outputs[0].finish_reason is FinishReason.LENGTH
    thread.join(PATIENCE)
    assert not thread.is_alive()


SCRIPT = """
import asyncio, sys
from jaxinfer import AsyncLLM, SamplingParams
def start():
    return AsyncLLM(sys.argv[1], cache_bytes=int(sys.argv[2]), **eval(sys.argv[3]))
served = start()
forever = SamplingParams(max_tokens=None, ignore_eos=True)
kept = []
async def main():
    for _ in range(3):
        kept.append(served.generate("a", forever))
        await anext(kept[-1])
        kept.append(served.generate("a", forever).text())
        await anext(kept[-1])
        kept.append(served.generate("a", forever).deltas())
        await anext(kept[-1])
    asyncio.create_task(served.embed(["a"] * 50))
    await asyncio.sleep(0)
asyncio.run(main())
served.submit("b", SamplingParams(max_tokens=1)).result()
served.close()
print(served.num_requests)
running = start()
futures = [running.submit("a", forever) for _ in range(200)]
print(futures[0].result().outputs[0].finish_reason)
"""


@pytest.mark.slow
def test_streams_left_half_read_end_in_silence_and_the_process_ends_its_thread(llm, model_dir):
    """With their event loop, which closes asynchronous generators in any order; the last requests never end."""
    command = [sys.executable, "-c", SCRIPT, str(model_dir), str(SMALL_BYTES), repr(SMALL)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "0\nlength\n", "")


# The engine beneath


def test_one_run_at_a_time(llm):
    first, second = llm.stream("a", LONG), llm.stream("b", LONG)
    next(first)
    with pytest.raises(RuntimeError, match="This model runs other requests, in another thread or for a stream"):
        next(second)
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="use AsyncLLM"):
        pool.submit(llm.generate, "c", SHORT).result()
    first.close()
    assert len(llm.generate("c", SHORT)) == 1
