"""The metrics of a server."""

import contextlib
import dataclasses
import time
from importlib.util import find_spec

import pytest

pytest.importorskip("prometheus_client")
if find_spec("starlette") is None:  # `jaxinfer.http` needs it
    pytest.skip("starlette is not installed", allow_module_level=True)

from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from jaxinfer import AsyncLLM, SamplingParams
from jaxinfer.generation.engine.page_tier import TierStats
from jaxinfer.http.metrics import ALIAS_LABELS, ALIASES, Metrics
from jaxinfer.http.served_model import ServedModel
from tests.generation.conftest import PLAIN
from tests.generation.few_programs import few_programs

PROMPT = [5] * 40
TOKENS = 4


@pytest.fixture(scope="module")
def llm(model_dir):
    with few_programs(), contextlib.closing(AsyncLLM(model_dir, **PLAIN)) as llm:
        yield llm


@pytest.fixture(scope="module")
def output(llm):
    """The second output of a prompt: the first one leaves its pages in the prefix cache."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    return [llm.submit(PROMPT, params).result() for _ in range(2)][1]


def metrics_of(llm):
    model = ServedModel("tiny", lambda asleep: llm)
    model.load()
    return Metrics([model])


def scrape(metrics):
    """The families by name, and each sample's value by its name and the values of its labels, without the model."""
    text, _ = metrics.expose()
    families = {family.name: family for family in text_string_to_metric_families(text.decode())}
    values = {}
    for family in families.values():
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key not in ("model", "model_name")}
            values[sample.name, *labels.values()] = sample.value
    return families, values


def test_the_engine_is_read_at_each_scrape(llm, output):
    metrics = metrics_of(llm)
    families, values = scrape(metrics)
    stats = llm.stats()
    assert values["jaxinfer_requests_running",] == values["jaxinfer_requests_waiting",] == 0
    assert values["jaxinfer_kv_pages_used",] == values["jaxinfer_kv_cache_usage",] == 0
    assert values["jaxinfer_kv_pages",] == stats.num_pages > 0
    assert values["jaxinfer_prompt_tokens_total",] == 2 * len(PROMPT)
    assert values["jaxinfer_cached_prompt_tokens_total",] == output.num_cached_tokens > 0
    assert values["jaxinfer_generated_tokens_total",] == 2 * TOKENS
    assert values["jaxinfer_draft_tokens_total",] == values["jaxinfer_accepted_tokens_total",] == 0
    assert values["jaxinfer_preemptions_total",] == 0
    assert values["jaxinfer_engine_steps_total",] == stats.steps > 0
    assert values["jaxinfer_compile_misses_total",] == stats.compile_misses
    assert values["jaxinfer_completions_ended_total", "length"] == 2
    assert values["jaxinfer_completions_ended_total", "error"] == 0
    assert values["jaxinfer_requests_ended_total", "answered"] == 2
    assert values["jaxinfer_requests_ended_total", "failed"] == 0
    assert {sample.labels["model"] for sample in families["jaxinfer_prompt_tokens"].samples} == {"tiny"}

    llm.submit(PROMPT, SamplingParams(max_tokens=1)).result()
    _, later = scrape(metrics)
    assert later["jaxinfer_prompt_tokens_total",] == 3 * len(PROMPT)
    assert later["jaxinfer_generated_tokens_total",] == 2 * TOKENS + 1


def test_a_running_completion_counts(llm, output, monkeypatch):
    busy = dataclasses.replace(llm.stats(), running=3, waiting=2, used_pages=5, num_pages=20)
    monkeypatch.setattr(llm, "stats", lambda: busy)
    _, values = scrape(metrics_of(llm))
    assert values["vllm:num_requests_running",] == 3
    assert values["vllm:num_requests_waiting",] == 2
    assert values["vllm:kv_cache_usage_perc",] == 0.25


def test_pages_of_host_and_disk_count(llm, output, monkeypatch):
    _, without = scrape(metrics_of(llm))
    assert not [name for name, *_ in without if "host_kv" in name or "disk_kv" in name]
    kept = TierStats(pages=7, num_pages=9, page_bytes=100, stored=8, read_back=4, from_back=1, hits=2, waited=0.5)
    stats = dataclasses.replace(llm.stats(), host_kv=kept, disk_kv=dataclasses.replace(kept, stored=9))
    monkeypatch.setattr(llm, "stats", lambda: stats)
    _, values = scrape(metrics_of(llm))
    assert values["jaxinfer_host_kv_pages_kept",] == 7
    assert values["jaxinfer_host_kv_pages_total", "stored"] == 8
    assert values["jaxinfer_host_kv_bytes_total", "read_back"] == 400
    assert [values["jaxinfer_host_kv_restored_pages_total", end] for end in ("front", "back")] == [3, 1]
    assert values["jaxinfer_host_kv_hits_total",] == 2
    assert values["jaxinfer_host_kv_wait_seconds_total",] == 0.5
    assert values["jaxinfer_disk_kv_pages_total", "stored"] == 9


def with_timings(output, count=1, **changes):
    """The output with so many completions, of other timings."""
    completion = output.outputs[0]
    changed = dataclasses.replace(completion, timings=dataclasses.replace(completion.timings, **changes))
    return dataclasses.replace(output, outputs=[changed] * count)


def test_ended_requests_are_in_the_histograms(llm, output):
    metrics = metrics_of(llm)
    metrics.ended("tiny", output)
    timings = output.outputs[0].timings
    _, values = scrape(metrics)
    assert values["jaxinfer_time_to_first_token_seconds_sum",] == pytest.approx(timings.first_token_s)
    assert values["jaxinfer_request_seconds_sum",] == pytest.approx(timings.total_s)


def test_histograms_have_each_completion_in_its_bucket(llm, output):
    metrics = metrics_of(llm)
    metrics.ended("tiny", with_timings(output, 2, first_token_s=0.2, total_s=3.0, tokens_per_s=50.0))
    _, values = scrape(metrics)
    for name, seconds, below, above in (
        ("jaxinfer_time_to_first_token_seconds", 0.2, "0.1", "0.25"),
        ("vllm:time_to_first_token_seconds", 0.2, "0.1", "0.25"),
        ("jaxinfer_request_seconds", 3.0, "2.5", "5.0"),
        ("jaxinfer_time_per_output_token_seconds", 0.02, "0.01", "0.025"),
    ):
        assert values[f"{name}_bucket", below] == 0
        assert values[f"{name}_bucket", above] == values[f"{name}_count",] == 2
        assert values[f"{name}_sum",] == pytest.approx(2 * seconds)


def test_a_completion_without_tokens_has_no_rate(llm, output):
    metrics = metrics_of(llm)
    metrics.ended("tiny", with_timings(output, 2, first_token_s=None, tokens_per_s=None))
    _, values = scrape(metrics)
    assert values["jaxinfer_request_seconds_count",] == 2
    assert values["jaxinfer_time_to_first_token_seconds_count",] == 0
    assert values["jaxinfer_time_per_output_token_seconds_count",] == 0


def test_responses_and_rejections_are_counted(llm):
    metrics = metrics_of(llm)
    _, values = scrape(metrics)
    assert values["jaxinfer_admission_rejections_total",] == 0
    for status in (200, 429, 200, 429, 429):
        metrics.responded("tiny", "/v1/completions", status)
    _, values = scrape(metrics)
    assert values["jaxinfer_http_responses_total", "/v1/completions", "200"] == 2
    assert values["jaxinfer_http_responses_total", "/v1/completions", "429"] == 3
    assert values["jaxinfer_admission_rejections_total",] == values["vllm:admission_rejections_total",] == 3


def test_aliases_have_the_values_of_our_names(llm, output):
    metrics = metrics_of(llm)
    metrics.ended("tiny", output)
    metrics.responded("tiny", "/v1/completions", 429)
    families, _ = scrape(metrics)
    for alias, own in ALIASES.items() - {("vllm:lora_requests_info", "jaxinfer_lora_requests_info")}:
        assert families[alias].type == families[own].type
        expected = [
            (
                alias + sample.name.removeprefix(own),
                {ALIAS_LABELS.get(k, k): v for k, v in sample.labels.items()},
                sample.value,
            )
            for sample in families[own].samples
        ]
        assert [(sample.name, sample.labels, sample.value) for sample in families[alias].samples] == expected
    (cache,) = families["vllm:cache_config_info"].samples
    sizes = {"block_size": str(llm.engine.config.page_size), "num_gpu_blocks": str(llm.stats().num_pages)}
    assert (cache.name, cache.labels, cache.value) == ("vllm:cache_config_info", {"model_name": "tiny", **sizes}, 1)


def test_adapters_of_requests_are_shown_where_there_may_be_any(llm, output, monkeypatch):
    assert "vllm:lora_requests_info" not in scrape(metrics_of(llm))[0]
    busy = dataclasses.replace(llm.stats(), running_adapters={"b": 2, "a": 1}, waiting_adapters={"c": 1})
    monkeypatch.setattr(llm, "stats", lambda: busy)
    monkeypatch.setattr(llm.engine, "_config", dataclasses.replace(llm.engine.config, max_adapters=2))
    (sample,) = scrape(metrics_of(llm))[0]["vllm:lora_requests_info"].samples
    names = {"max_lora": "2", "running_lora_adapters": "a,b", "waiting_lora_adapters": "c"}
    assert sample.labels == {"model_name": "tiny", **names}
    assert sample.value == pytest.approx(time.time(), abs=60)


def test_servers_share_nothing(llm):
    one, other = metrics_of(llm), metrics_of(llm)
    one.responded("tiny", "/v1/completions", 429)
    assert scrape(other)[1]["jaxinfer_admission_rejections_total",] == 0
    assert not [family.name for family in REGISTRY.collect() if "jaxinfer" in family.name]


def test_a_closed_model_can_be_scraped(model_dir):
    with few_programs():
        llm = AsyncLLM(model_dir, **PLAIN)
    metrics = metrics_of(llm)
    llm.close()
    metrics.responded("tiny", "/v1/completions", 503)
    text, content_type = metrics.expose()
    families, values = scrape(metrics)
    assert content_type.startswith("text/plain")
    assert b"process_cpu_seconds_total" in text
    assert values["jaxinfer_http_responses_total", "/v1/completions", "503"] == 1
    assert "jaxinfer_time_to_first_token_seconds" in families
    assert "jaxinfer_requests_running" not in families
    assert "vllm:num_requests_running" not in families
