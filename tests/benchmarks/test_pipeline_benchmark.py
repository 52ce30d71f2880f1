"""The benchmark of pipelines: steps by hand, what it counts, and what it makes of its measurements."""

import dataclasses
import json

import pytest

from benchmarks.pages.pipeline import pipeline_section
from benchmarks.pipeline import devices
from benchmarks.pipeline.families import are_divisible, compare, decoders, repeated, repeats_of
from benchmarks.pipeline.idle import FIG_8, FIG_10B, PER_STAGE, TOKENS, idle_row, planned
from benchmarks.pipeline.steps import STRIDES, decode, read_prompt
from benchmarks.report import ROOT, Report
from jaxinfer import LLM, MeshConfig
from jaxinfer.sharding import schedules
from jaxinfer.sharding.schedules import Job, Phase
from tests.tiny import CONFIG, save_tiny

SIZES = {"max_batch": 2, "context": 64, "page_size": 32, "chunk_size": 4, "max_decode_passes": 5}
SIZES |= {"overlap": False, "prefix_caching": False}
PROMPTS = [[3, 1, 4, 1], [5, 9]]


@pytest.fixture(scope="module")
def llms(tmp_path_factory):
    """One device, and two uneven stages, which read a prompt in steps of two chunks."""
    path = save_tiny(tmp_path_factory.mktemp("models") / "model", config=dataclasses.replace(CONFIG, layers=3))
    return [LLM(path, token_budget=8, mesh=mesh, **SIZES) for mesh in (None, MeshConfig(pipeline=2))]


@pytest.mark.slow
def test_both_strides_of_a_ring_give_the_tokens_of_one_device_in_the_ticks_of_their_closed_forms(llms):
    alone, staged = llms
    queued, drained = (decode(staged, PROMPTS, 5, stride) for stride in STRIDES.values())
    assert queued.tokens == drained.tokens == decode(alone, PROMPTS, 5, STRIDES["queued"]).tokens
    assert [len(tokens) for tokens in queued.tokens] == [5, 5]
    assert (queued.schedule.idle_slots, drained.schedule.idle_slots) == (2, 10)
    assert not staged.engine.stats().running


@pytest.mark.slow
def test_a_prompt_is_read_in_as_many_steps_as_it_takes(llms):
    alone, staged = (read_prompt(llm, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]) for llm in llms)
    assert alone.tokens == staged.tokens
    assert (alone.count, staged.count) == (2, 2)
    assert staged.schedule.ticks[0][0] == Job(0, Phase.PROMPT, 0)
    with pytest.raises(ValueError, match="in stages"):
        _ = alone.schedule


def test_planned_idle_slots_are_those_of_closed_forms():
    rows = list(planned())
    assert {row["schedule"] for row in rows} == {"queued", "drained", "hybrid", "chunks"}
    assert all(row["exact"] for row in rows)
    wrong = idle_row("queued", schedules.queued(3, 3, 2), schedules.drained_idle(3, 2), {"P": 3})
    assert (wrong["idle"], wrong["closed_form"], wrong["exact"]) == (6, 12, False)


@pytest.mark.parametrize("model", [FIG_8, FIG_10B], ids=["175B", "530B"])
def test_the_time_of_hybrid_scheduling_is_its_closed_form(model):
    row, units = model.gain(), model.prompt_seconds / model.decode_seconds
    stages, prompts = model.stages, PER_STAGE * model.stages
    length = units * (prompts + stages - 1) / prompts + stages * (TOKENS - 1) + stages - 1
    assert row["hybrid_s"] == pytest.approx(length * model.decode_seconds, abs=1e-3)
    assert row["gain"] == pytest.approx(row["drained_s"] / row["hybrid_s"], rel=1e-2)
    assert row["drained_s"] > row["queued_s"] > row["hybrid_s"]


def test_the_paper_model_takes_what_its_weights_and_prompts_do():
    model = dataclasses.replace(FIG_8, sequences=1)
    assert model.decode_seconds == pytest.approx(2 * 175e9 / 16 / 1.555e12 / 0.95)
    assert FIG_8.prompt_seconds == pytest.approx(FIG_8.sequences * model.prompt_seconds)


def test_chunks_in_stages_are_compared_with_the_best_way_of_one_device():
    seconds = {way: [2.0, 1.0 + number, 4.0] for number, way in enumerate(devices.WAYS)}
    seconds |= {devices.PIPELINE: [1.0, 1.1, 1.25], "queued": [1.0], "drained": [1.4]}
    report = Report()
    rows = devices.rows_of(seconds)
    devices.add_checks(report, rows, others=0.02)
    values = {check.name: (check.value, check.met) for check in report.checks}
    assert values["queued_vs_drained_measured"] == (pytest.approx(1.4, rel=1e-3), True)
    assert values["chunk_pipeline_measured"] == (pytest.approx(2 / 1.1, rel=1e-3), True)
    busy = Report()
    devices.add_checks(busy, rows, others=0.5)
    assert [check.verdict for check in busy.checks] == ["other processes took 50% of the cores"] * 2


def test_others_are_what_this_process_and_its_children_do_not_take():
    others = devices.Others()
    for _ in range(10**7):
        pass
    assert 0 <= others.share() <= 1


def test_layers_are_repeated_until_they_divide():
    every = {folder.name: config for folder, config in decoders(every=True).items()}
    refused = [name for name, config in every.items() if config.layer_inputs is not None]
    assert [name for name, config in every.items() if repeats_of(config) is None] == refused
    for name in ("gemma2_window", "dots1_plain", "gemma3_sees"):
        config = repeated(every[name], repeats_of(every[name]))
        assert are_divisible(config)
        assert [config.layer(x).mlp for x in range(every[name].layers)] == [
            every[name].layer(x).mlp for x in range(every[name].layers)
        ]
    first = {json.loads((folder / "config.json").read_text())["model_type"] for folder in decoders(every=False)}
    assert len(first) == len(decoders(every=False))
    assert first == {json.loads((folder / "config.json").read_text())["model_type"] for folder in decoders(every=True)}


@pytest.mark.slow
def test_a_family_is_compared_in_two_and_four_stages():
    (each,) = [item for item in decoders(every=True).items() if item[0].name == "gemma2_window"]
    rows = list(compare(*each))
    assert [(row["stages"], row["random"], row["equal"]) for row in rows] == [(2, True, True), (4, True, True)]


def test_the_page_and_the_figure_show_the_recorded_result():
    pytest.importorskip("matplotlib")
    from benchmarks.pipeline.plots import draw_rings

    result = json.loads((ROOT / "benchmarks/results/amd-avx512/pipeline.json").read_text())
    text = "\n".join(pipeline_section(result))
    assert "| queued | recorded | 2 of 202 | 6 of 456 | 12 of 812 | 20 of 1,270 |" in text
    assert devices.PIPELINE in text
    titles = [axes.get_title(loc="left") for axes in draw_rings(result).axes]
    assert [title.partition(":")[0] for title in titles] == [
        "drained after each token (Fig. 2a)",
        "queued tokens (Fig. 2b)",
        "chunks of one prompt",
    ]
