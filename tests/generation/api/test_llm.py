"""Generation against the model run without a cache, token by token."""

import dataclasses
import inspect
import itertools
from collections import Counter

import jax
import numpy as np
import pytest
from flax import nnx
from scipy.special import log_softmax

from jaxinfer.compiled import Costs
from jaxinfer.generation import LLM, FinishReason, SamplingParams
from jaxinfer.generation.api.build import LoadOptions, ModelOptions, build_engine
from jaxinfer.generation.engine.view import RequestView
from jaxinfer.generation.execution.plan import Plan
from jaxinfer.models.files.loading import load_model
from jaxinfer.pallas_kernels.dispatch import Operation
from tests.generation.conftest import PAGE_BYTES, SMALL, SMALL_BYTES, SMALL_CONFIG, SMALL_PAGES

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def logits_of(llm):
    """Every position's logits, from one pass over the whole text without any cache."""
    model = nnx.merge(llm.model.graphdef, llm.model.state)
    graphdef, state = nnx.split(model)

    @jax.jit
    def forward(state, tokens, positions):
        model = nnx.merge(graphdef, state)
        return model.logits(model(tokens, positions)[0])[0]

    def run(ids):
        tokens, positions = np.zeros((1, 128), np.int32), np.full((1, 128), -1, np.int32)
        tokens[0, : len(ids)], positions[0, : len(ids)] = ids, np.arange(len(ids))
        return np.asarray(forward(state, tokens, positions))[: len(ids)]

    return run


def continue_greedily(logits_of, ids, count):
    ids = list(ids)
    for _ in range(count):
        ids.append(int(logits_of(ids)[-1].argmax()))
    return ids[-count:]


def prompts_of(*lengths):
    return [np.random.default_rng(n).integers(0, 256, n).tolist() for n in lengths]


def completions(outputs):
    return [c.token_ids for output in outputs for c in output.outputs]


def test_typed_options_are_those_of_the_signature():
    named = inspect.signature(LLM.__init__).parameters.keys() - {"self", "path", "progress", "options"}
    assert LoadOptions.__annotations__.keys() == named | ModelOptions.__annotations__.keys()


def test_prompts_of_different_lengths_continue_as_without_a_cache(small_llm, logits_of):
    prompts = prompts_of(3, 21, 1, 40)
    outputs = small_llm.generate(prompts, GREEDY)
    assert completions(outputs) == [continue_greedily(logits_of, p, 12) for p in prompts]
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert all(o.outputs[0].finish_reason is FinishReason.LENGTH for o in outputs)


def test_long_prompts_run_in_chunks(llm, logits_of):
    engine = build_engine(llm.model, None, SMALL_CONFIG, Plan.of_model(llm.model, SMALL_CONFIG, num_pages=SMALL_PAGES))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0, prompt_logprobs=1)
    prompts = prompts_of(40, 33)
    requests = [engine.prepare(p, params).sequences() for p in prompts]
    for request in requests:
        engine.add(request)
    while not all(s.finished for request in requests for s in request):
        engine.step()
    for prompt, (sequence,) in zip(prompts, requests, strict=True):
        assert sequence.token_ids[len(prompt) :] == continue_greedily(logits_of, prompt, 12)
        expected = log_softmax(logits_of(sequence.token_ids), axis=-1)
        chosen = expected[np.arange(len(sequence.token_ids) - 1), sequence.token_ids[1:]]
        found = [p.logprob for p in (*sequence.prompt_logprobs[1:], *sequence.logprobs)]
        assert sequence.prompt_logprobs[0] is None
        np.testing.assert_allclose(found, chosen, atol=1e-4)
        best = [next(iter(p.top)) for p in sequence.prompt_logprobs[1:]]
        assert best == expected.argmax(-1)[: len(prompt) - 1].tolist()
    assert engine.scheduler.pages.free == SMALL_PAGES


def test_times_are_the_clocks(llm):
    """A virtual clock, which ticks when it is asked, is the only time that an engine has."""
    ticks = itertools.count()
    plan = Plan.of_model(llm.model, SMALL_CONFIG, num_pages=SMALL_PAGES)
    engine = build_engine(llm.model, None, SMALL_CONFIG, plan, clock=lambda: float(next(ticks)))
    (sequence,) = engine.prepare([1, 2, 3], GREEDY).sequences()
    for _ in engine.run([[sequence]]):
        pass
    timings = RequestView([sequence]).output().outputs[0].timings
    assert timings.first_token_s == int(timings.first_token_s) >= 1
    assert timings.first_token_s < timings.total_s == int(timings.total_s) < next(ticks)


def test_prepared_requests_run_as_their_prompts_do(llm):
    prompts = prompts_of(5, 9)
    requests = [llm.prepare(prompt, GREEDY) for prompt in prompts]
    expected = completions(llm.generate(prompts, GREEDY))
    assert completions(llm.generate(requests)) == expected
    assert completions(llm.generate(requests[0])) == expected[:1]
    with pytest.raises(ValueError, match="already has SamplingParams: do not pass others"):
        llm.generate(requests, GREEDY)
    with pytest.raises(ValueError, match="is passed twice"):
        llm.generate([requests[0], requests[0]])
    mine = [llm.prepare([3], GREEDY, request_id=name) for name in ("a", "b", "a")]
    assert [output.request_id for output in llm.generate(mine[:2])] == ["a", "b"]
    with pytest.raises(ValueError, match="a request_id is passed twice"):
        llm.generate(mine)
    for wrong in ("", 5):
        with pytest.raises(ValueError, match=f"request_id must be a non-empty string, got {wrong!r}"):
            llm.prepare([3], GREEDY, request_id=wrong)


def test_sampling_is_the_same_alone_and_in_a_batch(small_llm):
    llm = small_llm
    prompts = prompts_of(5, 9, 30)
    params = [SamplingParams(seed=i, temperature=0.9, top_p=0.95, max_tokens=20, ignore_eos=True) for i in range(3)]
    together = completions(llm.generate(prompts, params))
    alone = [completions(llm.generate([p], q))[0] for p, q in zip(prompts, params, strict=True)]
    assert together == alone
    assert completions(llm.generate(prompts, params)) == together
    other_seeds = [SamplingParams(seed=i + 9, temperature=0.9, max_tokens=20, ignore_eos=True) for i in range(3)]
    assert completions(llm.generate(prompts, other_seeds)) != together


def spell(tokens):
    """Tokens 0 to 93 are the characters from "!" to "~"."""
    return "".join(chr(33 + token) for token in tokens)


def continue_without(logits_of, ids, count, allowed, words):
    """Greedily, by the definition of `allowed_token_ids` and `bad_words`."""
    ids, out = list(ids), []
    for _ in range(count):
        banned = {word[-1] for word in words if out[len(out) - len(word) + 1 :] == word[:-1] or len(word) == 1}
        scores = logits_of([*ids, *out])[-1]
        out.append(max(set(allowed) - banned, key=lambda token: scores[token]))
    return out


def test_bad_words_and_allowed_tokens_are_as_defined(llm, logits_of):
    allowed, prompts, options = range(94), [[7, 7, 3], [20] * 40], []
    for prompt in prompts:
        words = []
        for size in (1, 2, 3, 2, 1, 4):  # each a piece of what would come without it
            out = continue_without(logits_of, prompt, 20, allowed, words)
            words.append(out[size : 2 * size])
        words.append([prompt[-1], continue_without(logits_of, prompt, 1, allowed, words)[0]])  # begins in the prompt
        options.append((allowed, words))
    expected = [continue_without(logits_of, p, 20, *given) for p, given in zip(prompts, options, strict=True)]
    assert [out[0] for out in expected] == [words[-1][-1] for _, words in options]
    sampling = {"max_tokens": 20, "ignore_eos": True, "allowed_token_ids": allowed}
    params = [
        SamplingParams(temperature=0, bad_words=[spell(word) for word in words], **sampling) for _, words in options
    ]
    assert completions(llm.generate(prompts, params)) == expected
    *_, streamed = llm.stream(prompts[0], params[0], max_passes=1)
    assert streamed.outputs[0].token_ids == expected[0]
    words = [spell([a, b]) for a in range(3) for b in range(3)]
    few = sampling | {"max_tokens": 60, "allowed_token_ids": (0, 1, 2, 50)}
    for output in llm.generate([[1], [2]], SamplingParams(n=2, seed=1, bad_words=[*words, spell([50, 50])], **few)):
        for completion in output.outputs:
            text = completion.text
            assert set(text) <= set(spell([0, 1, 2, 50]))
            assert {x == spell([50]) for x in text[::2]} != {x == spell([50]) for x in text[1::2]}  # by turns
            assert len(set(text)) > 2
    (only,) = llm.generate([[1]], SamplingParams(max_tokens=4, bad_words=[spell([a]) for a in range(94)], seed=1))
    assert min(only.outputs[0].token_ids) >= 94


def test_n_completions_differ_and_repeat(llm):
    params = SamplingParams(seed=1, n=3, max_tokens=10, ignore_eos=True)
    first, second = (completions(llm.generate([[1, 2, 3]], params)) for _ in range(2))
    assert first == second
    assert len({tuple(ids) for ids in first}) == 3


def test_stop_ids_end_the_text(llm):
    (free,) = completions(llm.generate([[7, 7]], GREEDY))
    stop = free[5]
    out = llm.generate([[7, 7]], SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(stop,), ignore_eos=True))
    completion = out[0].outputs[0]
    assert completion.token_ids == free[: free.index(stop) + 1]
    assert completion.finish_reason is FinishReason.STOP
    assert completion.stop_reason == stop


def test_the_end_of_text_token_stops_unless_ignored(llm):
    wants_end = {256: 1000.0}
    out = llm.generate([[7, 7]], SamplingParams(temperature=0, max_tokens=9, min_tokens=3, logit_bias=wants_end))
    completion = out[0].outputs[0]
    assert completion.token_ids[-1] == 256
    assert 256 not in completion.token_ids[:-1]
    assert len(completion.token_ids) == 4
    assert (completion.finish_reason, completion.stop_reason) == (FinishReason.STOP, None)
    also = SamplingParams(temperature=0, ignore_eos=True, stop_token_ids=[256], logit_bias=wants_end)
    assert llm.generate([[7, 7]], also)[0].outputs[0].stop_reason == 256
    out = llm.generate([[7]], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logit_bias=wants_end))
    assert out[0].outputs[0].token_ids == [256] * 9
    assert (out[0].outputs[0].text, out[0].outputs[0].stop_reason) == ("", None)


def test_special_and_stop_tokens_are_part_of_the_text_if_asked(llm):
    ends = {"temperature": 0, "logit_bias": {256: 1000.0}, "skip_special_tokens": False, "max_tokens": 3}
    kept = {"include_stop_str_in_output": True}
    texts = ["<end>" * 3, "", "<end>"]
    for more, text in zip(({"ignore_eos": True}, {}, kept), texts, strict=True):
        assert llm.generate("a", SamplingParams(**ends, **more))[0].outputs[0].text == text
    wants = {"temperature": 0, "logit_bias": {5: 1000.0}, "stop_token_ids": [5]}
    assert llm.generate("a", SamplingParams(**wants))[0].outputs[0].text == ""
    assert llm.generate("a", SamplingParams(**wants, **kept))[0].outputs[0].text == spell([5])


def test_stop_strings_are_cut_off_even_across_tokens(llm):
    everything = SamplingParams(temperature=1.0, seed=4, max_tokens=40, logit_bias=dict.fromkeys([256], -np.inf))
    text = llm.generate("hello", everything)[0].outputs[0].text
    stop = text[6:9]
    params = SamplingParams(
        temperature=1.0, seed=4, max_tokens=40, stop=(stop,), logit_bias=dict.fromkeys([256], -np.inf)
    )
    out = llm.generate("hello", params)[0].outputs[0]
    assert out.text == text[: text.index(stop)]
    assert (out.finish_reason, out.stop_reason) == (FinishReason.STOP, stop)
    kept = dataclasses.replace(params, stop=("nowhere", stop), include_stop_str_in_output=True)
    for each, end in ((params, out.text), (kept, out.text + stop)):
        streamed = list(llm.stream("hello", each, max_passes=1))
        assert streamed[-1].outputs[0].text == end
        assert all(end.startswith(piece.outputs[0].text) for piece in streamed)
        assert [piece.finished for piece in streamed] == [False] * (len(streamed) - 1) + [True]


def test_a_stop_string_may_be_a_special_token(llm):
    """No text has it, so that it would never be found there."""
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logit_bias={256: 1000.0}, stop="<end>")
    completion = llm.generate([[7, 7]], params)[0].outputs[0]
    assert (completion.token_ids, completion.text) == ([256], "")
    assert (completion.finish_reason, completion.stop_reason) == (FinishReason.STOP, "<end>")
    as_text = dataclasses.replace(params, skip_special_tokens=False, include_stop_str_in_output=True)
    assert llm.generate([[7, 7]], as_text)[0].outputs[0].text == "<end>"


def test_stop_strings_do_not_end_a_text_before_its_least_length(llm):
    stop = spell([5])
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logit_bias={5: 1000.0}, stop=stop)
    for least, most in ((0, 1), (20, 20)):
        completion = llm.generate([[7, 7]], dataclasses.replace(params, min_tokens=least))[0].outputs[0]
        assert (len(completion.token_ids), completion.stop_reason) == (most, stop)
        assert completion.text == stop * (most - 1)


def test_streaming_grows_to_what_generate_returns(llm):
    prompts = ["one", "another"]
    params = SamplingParams(temperature=0, max_tokens=15, ignore_eos=True)
    seen: dict[str, list] = {}
    for output in llm.stream(prompts, params, max_passes=2):
        seen.setdefault(output.request_id, []).append(output)
    whole = llm.generate(prompts, params)
    for outputs, expected in zip(seen.values(), whole, strict=True):
        lengths = [len(o.outputs[0].token_ids) for o in outputs]
        assert lengths == sorted(set(lengths))
        assert lengths[0] == 1
        assert outputs[-1].outputs[0].token_ids == expected.outputs[0].token_ids
        assert outputs[-1].outputs[0].text == expected.outputs[0].text


def test_stats_count_what_was_done(llm):
    def sums(stats):
        ended = {f"ended by {reason}": count for reason, count in stats.ended.items()}
        return Counter({name: value for name, value in vars(stats).items() if isinstance(value, int)} | ended)

    before = llm.stats()
    outputs = llm.generate([[9] * 40, [8] * 3], SamplingParams(n=2, seed=1, max_tokens=9, ignore_eos=True))
    stream = llm.stream(["a", "b"], GREEDY, max_passes=1)
    next(stream)
    middle = llm.stats()
    assert (middle.running, middle.waiting, middle.used_pages) == (2, 0, 2)
    stream.close()
    after = sums(llm.stats())
    after.subtract(sums(before))
    done = [completion for output in outputs for completion in output.outputs]
    assert after["ended by length"] == len(done) == 4
    assert after["ended by abort"] == 2
    assert after["prompt_tokens"] == 2 * 43 + 2
    cached = after["cached_tokens"]
    assert 0 <= cached <= 86
    assert after["generated_tokens"] >= sum(len(completion.token_ids) for completion in done) + 2
    assert after["steps"] > 3
    assert after["running"] == after["waiting"] == after["used_pages"] == 0
    again = llm.generate([[9] * 40], GREEDY)[0]
    found = llm.stats().cached_tokens - middle.cached_tokens
    assert found == again.num_cached_tokens > 30
    assert max(map(len, str(llm.stats()).splitlines())) <= 80
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.steps = 0


def test_closing_a_stream_frees_its_pages(llm):
    stream = llm.stream(["a", "b"], GREEDY, max_passes=1)
    next(stream)
    assert llm.engine.scheduler.pages.free < llm.engine.scheduler.pages.count
    stream.close()
    assert llm.engine.scheduler.pages.free == llm.engine.scheduler.pages.count
    assert not llm.engine.scheduler.running


def test_options_do_not_recompile(llm):
    llm.generate([[1, 2, 3]], GREEDY)
    every_option = SamplingParams(
        max_tokens=12, min_tokens=2, temperature=0.7, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.1,
        presence_penalty=0.1, frequency_penalty=0.1, logit_bias={4: 1.0}, seed=5, stop=("zz",), stop_token_ids=(9,),
        logprobs=5, prompt_logprobs=2, bad_words=("ab", "c"), allowed_token_ids=range(200), skip_special_tokens=False,
    )  # fmt: skip
    with llm.engine.executor.programs.forbid_compile():
        llm.generate([[3, 2, 1]], every_option)


@pytest.mark.slow
def test_without_kernels_no_operation_has_any(model_dir, monkeypatch, tmp_path):
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path))  # what is loaded from disk is not traced, and asks nothing
    disabled, recorded = Operation.disabled, []
    monkeypatch.setattr(
        Operation, "disabled", property(lambda self: recorded.append(disabled.fget(self)) or recorded[-1])
    )
    one = {"max_batch": 1, "token_budget": 8, "chunk_size": 8}
    params = SamplingParams(max_tokens=1)  # few programs
    LLM(model_dir, kernels=False, **one).generate([[1, 2, 3]], params)  # compiled by several threads
    assert recorded
    assert all(recorded)
    recorded.clear()
    LLM(model_dir, **one).engine.executor.calls()  # traces every program
    assert recorded
    assert not any(recorded)


def test_generation_ahead_compiles_all_it_needs(model_dir):
    llm = LLM(model_dir, cache_bytes=SMALL_BYTES, **SMALL)
    llm.generate(prompts_of(3, 20, 9), SamplingParams(temperature=0, max_tokens=30))
    assert llm.engine.executor.programs.misses == 0


def test_caches_are_written_in_place_and_costs_recorded(llm):
    llm.generate([[1, 2, 3]], GREEDY)
    executor = llm.engine.executor
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(executor.state.arrays))
    for name in ("prefill", "decode"):
        program = next(p for p in executor.programs if p.name == name)
        assert program.memory.alias_bytes == state_bytes
        assert "input_output_alias" in program.executable.as_text()
    llm.generate([[1, 2, 3]], GREEDY)  # a program's first call does not count
    decoded = executor.costs.for_sizes("decode", batch=4, speculative=0, pages=8)
    assert 0 < decoded.p50 <= decoded.p95
    assert decoded.passes >= decoded.calls >= 1


def test_max_tokens_none_fills_the_context(llm):
    out = llm.generate([[1] * 100], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert len(out[0].outputs[0].token_ids) == 28


def test_a_cache_smaller_than_the_batch_queues(small_llm, logits_of):
    prompts = prompts_of(40, 39, 38)  # of 7 of the 14 pages each with what follows
    assert completions(small_llm.generate(prompts, GREEDY)) == [continue_greedily(logits_of, p, 12) for p in prompts]


def test_a_decode_step_on_a_cpu_has_the_passes_of_40_ms(model_dir, monkeypatch):
    costs = Costs.fixed({("decode", (("batch", 1), ("speculative", 0))): 0.0101})
    model = load_model(model_dir)
    plan = Plan.of_model(model, SMALL_CONFIG, num_pages=SMALL_PAGES)
    engine = build_engine(model, None, SMALL_CONFIG, plan, costs=costs)
    launch, launched = engine.executor.launch, []
    monkeypatch.setattr(engine.executor, "launch", lambda batch: launched.append(batch) or launch(batch))
    (sequence,) = engine.prepare([1, 2, 3], GREEDY).sequences()
    engine.add([sequence])
    while not sequence.finished:
        engine.step()
    engine.close()
    assert [batch.passes for batch in launched if not batch.chunks][:2] == [3, 3]


def test_chat_uses_the_template(llm):
    out = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(temperature=0, max_tokens=3))
    assert llm.tokenizer.decode(out.prompt_token_ids) == "user:hi;assistant:"


@pytest.mark.slow
def test_int8_and_bfloat16_stay_close(llm, model_dir, logits_of):
    prompt = prompts_of(30)[0]
    exact = log_softmax(logits_of(prompt), axis=-1)
    for options in ({"quantize": "int8"}, {"dtype": "bfloat16"}):
        other = LLM(model_dir, max_batch=1, context=64, **options)
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        found = other.generate([prompt], params)[0].prompt_logprobs[1:]
        chosen = exact[np.arange(len(prompt) - 1), prompt[1:]]
        error = np.abs(np.array([p.logprob for p in found]) - chosen)
        assert 0 < error.mean() < 0.15


def test_chat_with_tools_and_arguments_of_the_template(llm):
    template = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ messages[0].content }}{{ mood }}"
    options = {"tools": [{"name": "<f>"}], "chat_template": template, "chat_template_kwargs": {"mood": "!"}}
    out = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(temperature=0, max_tokens=1), **options)
    assert llm.tokenizer.decode(out.prompt_token_ids) == '{"name": "<f>"}hi!'


@pytest.mark.parametrize("part", [{"type": "image", "image": "a.png"}, {"type": "input_audio"}, {"video": "a.mp4"}])
def test_chat_refuses_what_is_no_text(llm, part):
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}, part]}]
    with pytest.raises(ValueError, match=r"messages\[0\]\.content\[1\] is {.*models here take text alone"):
        llm.chat(messages)


def test_extremes_run_and_harm_nobody(llm):
    (alone,) = completions(llm.generate([[7, 7]], GREEDY))
    largest = float(np.finfo(np.float32).max)
    extremes = [
        {"max_tokens": 2**62, "top_k": 2**30, "top_p": 1e-37, "min_p": 1.0, "temperature": largest},
        {"max_tokens": None, "min_tokens": 2**30, "repetition_penalty": 1e-37, "seed": 2**32 - 1, "logprobs": 20},
        {
            "logit_bias": {1: largest, 2: -largest, 3: -np.inf},
            "presence_penalty": largest,
            "frequency_penalty": -largest,
        },
    ]
    params = [SamplingParams(**options) for options in extremes]
    outputs = llm.generate([[7, 7]] * (len(params) + 1), [GREEDY, *params])
    assert completions(outputs[:1]) == [alone]
    assert all(completion.finish_reason is not None for output in outputs for completion in output.outputs)
    assert not llm.engine.scheduler.running


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "Prompt 1: The prompt is empty"),
        ("", {}, "Prompt 1: The prompt is empty"),
        ([300], {}, r"Prompt 1: Token ids \[300\] of the prompt are outside the vocabulary \[0, 257\)"),
        ([1] * 128, {}, "Prompt 1: The prompt has 128 tokens; the context of 128 leaves no room"),
        ([1], {"stop_token_ids": (300,)}, r"SamplingParams.stop_token_ids holds \[300\]"),
        ([1], {"logit_bias": {-1: 1.0}}, r"SamplingParams.logit_bias holds \[-1\]"),
        ([1], {"allowed_token_ids": (3, 257)}, r"SamplingParams.allowed_token_ids holds \[257\]"),
        ([1], {"allowed_token_ids": (0,), "bad_words": ["!"]}, "SamplingParams.bad_words leave none of the tokens"),
        ([1], {"bad_words": ["abcdefgh" * 65]}, "SamplingParams.bad_words of several tokens have 520 tokens, at most"),
    ],
)
def test_bad_requests_fail_at_the_call(llm, prompt, params, message):
    with pytest.raises(ValueError, match=message):
        llm.generate([[1, 2], prompt], [GREEDY, SamplingParams(**params)])
    assert not llm.engine.scheduler.waiting


def test_bad_arguments(llm, model_dir):
    with pytest.raises(ValueError, match="2 prompts but 1 SamplingParams"):
        llm.generate([[1], [2]], [GREEDY])
    with pytest.raises(ValueError, match=r"mesh must be a MeshConfig, .* got \{'data': 2\}"):
        LLM(model_dir, mesh={"data": 2})
    with pytest.raises(ValueError, match=r"LLM.context must be in \[2, 128\] for this model, got 129"):
        LLM(model_dir, context=129)
    for value in (0, -1, 2**30, 10**30, True, "1", None, 0.5, 1e30, np.nan, [1]):
        with pytest.raises(ValueError, match=r"LLM.max_batch must be an integer >= 1, below 2\*\*30, got "):
            LLM(model_dir, max_batch=value)
        if value is not None:
            with pytest.raises(ValueError, match=r"LLM\.context must be "):
                LLM(model_dir, context=value)
        for name in ("page_size", "chunk_size", "max_decode_passes", "max_adapters", "num_speculative_tokens"):
            if (name, value) not in (("max_adapters", 0), ("num_speculative_tokens", 0)):
                with pytest.raises(ValueError, match=rf"EngineConfig.{name} must be "):
                    LLM(model_dir, **{name: value})
    for value in (-1, 2**63, 1e30, np.inf, "1", True, [1]):
        with pytest.raises(ValueError, match=r"LLM.cache_bytes must be an integer >= 0, below 2\*\*63 or None, got "):
            LLM(model_dir, cache_bytes=value)
    with pytest.raises(ValueError, match=r"one page of 8 tokens takes 2.0 kB \(2048 bytes\): raise cache_bytes"):
        LLM(model_dir, cache_bytes=100, **SMALL)
    small = LLM(model_dir, cache_bytes=6 * PAGE_BYTES // 2, **SMALL)
    with pytest.raises(ValueError, match="the cache has 6"):
        small.generate([[1] * 20], SamplingParams(max_tokens=40))
