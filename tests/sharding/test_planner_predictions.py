"""The planner: sizes, rooflines, schedules, memory, and which plans fit."""

import ast
import dataclasses
import math
import sys
from pathlib import Path

import pytest

from jaxinfer.sharding import planner, schedules
from jaxinfer.sharding.planner import (
    Catalogue,
    Fetched,
    ModelShape,
    NothingFitsError,
    Plan,
    System,
    Ways,
    Workload,
    predict,
    rank,
)
from jaxinfer.sharding.planner.costs import Format, Runner, Tokens, imbalance
from jaxinfer.sharding.planner.exchanges import Exchange
from jaxinfer.sharding.planner.memory import kv_bytes
from jaxinfer.sharding.planner.plans import USABLE, missing
from jaxinfer.sharding.planner.search import FORMATS, meshes, plans
from jaxinfer.sharding.planner.tiers import restore

CATALOGUE = Catalogue.read()
A100 = CATALOGUE.device("a100-40")
IDEAL = System(name="ideal", bandwidth_share=1.0, flops_share=1.0, layer_s=0.0)
DEEPSPEED = CATALOGUE.systems["deepspeed-fp16"]
FAR = dataclasses.replace(A100, link=math.inf, network=math.inf)
"""Devices to which sending takes no time."""


def test_the_planner_is_plain_python():
    """Nothing of jaxinfer but the pipeline's schedules, and no other package."""
    names = set()
    for file in Path(planner.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {each.name for each in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module)
    rest = {name for name in names if name.partition(".")[0] not in sys.stdlib_module_names}
    assert {name for name in rest if not name.startswith("jaxinfer.sharding.planner")} == {
        "jaxinfer.sharding.schedules"
    }


def predicted(model, plan, workload, system=DEEPSPEED, device=A100, form=None):
    shape = CATALOGUE.model(model) if isinstance(model, str) else model
    return predict(shape, device, system, form or Format(), plan, workload)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("lm-175b", 174.6),
        ("lm-530b", 529.6),
        ("moe-52b", 52.4),
        ("moe-107b", 107.1),
        ("moe-349b", 349.2),
        ("moe-1t", 1065.4),
        ("moe-2t", 2024.4),
        ("llama-3.1-8b", 8.03),
        ("llama-3.3-70b", 70.6),
        ("llama-3.1-405b", 405.9),
        ("gpt-oss-20b", 20.9),
        ("gpt-oss-120b", 116.8),
        ("qwen3-30b-a3b", 30.5),
        ("qwen3-235b-a22b", 235.1),
        ("deepseek-v3", 671.0),
        ("qwen3-next-80b-a3b", 79.7),
    ],
)
def test_models_have_their_published_parameters(name, billions):
    assert CATALOGUE.model(name).params / 1e9 == pytest.approx(billions, rel=0.003)


def test_a_latent_cache_and_windows_are_small():
    latent = CATALOGUE.model("deepseek-v3")
    assert {layer.kv_values for layer in latent.layers} == {512 + 64}
    assert sum(layer.count for layer in latent.layers if layer.experts) == 58
    windowed = [layer for layer in CATALOGUE.model("gpt-oss-20b").layers if layer.window]
    assert (sum(layer.count for layer in windowed), windowed[0].seen(1000.0)) == (12, 128)


def test_a_recurrent_state_does_not_grow_with_the_context():
    """Qwen3-Next's, by the numbers of its config: 32 heads of 128 x 128, and three inputs of the convolution."""
    model = CATALOGUE.model("qwen3-next-80b-a3b")
    state = next(layer for layer in model.layers if layer.state_values)
    assert (state.count, state.state_values, state.conv_values, state.kv_values) == (36, 32 * 128 * 128, 3 * 8192, 0)
    runner = Runner(model=model, device=FAR, system=IDEAL, ways=Ways(tensor=2), format=Format())
    short, long = (Tokens(count=8, sequences=8, context=context) for context in (10, 100_000))
    assert runner.cache_bytes(state, [short]) == runner.cache_bytes(state, [long]) == 8 * (2**21 + 3 * 8192 * 2)
    assert runner.layer(state, (short,)) == runner.layer(state, (long,))
    assert kv_bytes(runner, 0, 3) == 36 * 3 * runner.state_bytes(state)
    plain = dataclasses.replace(state, state_flops=0)
    prompt = (Tokens(count=10_000, sequences=1, context=5000),)
    with_rule, without = (runner.layer(layer, prompt).compute for layer in (state, plain))
    assert with_rule - without == pytest.approx(10_000 * state.state_flops / 2 / FAR.flops)
    assert 1.3 < state.state_flops / (7 * state.state_values) < 1.6  # 7: of one token after the other
    assert {ways.slices for ways in meshes(model, 32)} == {1, 2, 4, 8, 16}


def test_an_unknown_field_or_name_is_named():
    with pytest.raises(ValueError, match=r"model 'x'.*'width'"):
        ModelShape.from_fields("x", {"width": 3})
    with pytest.raises(ValueError, match="device 'a100' is unknown; known: a100-40"):
        CATALOGUE.device("a100")


def test_a_step_reads_weights_and_a_large_batch_computes():
    """A stage's tick takes 16.6 ms for 175B in 16 devices, 20.0 ms for 530B in 40, at 0.85 of the bandwidth."""
    slower = dataclasses.replace(IDEAL, bandwidth_share=0.85)
    for name, stages, ms in (("lm-175b", 2, 16.6), ("lm-530b", 5, 20.0)):
        ways = Ways(tensor=8, pipeline=stages)
        runner = Runner(model=CATALOGUE.model(name), device=FAR, system=slower, ways=ways, format=Format())
        tick = runner.stage([Tokens(count=1, sequences=1, context=1)], rows=1)
        assert (1e3 * tick.total, tick.bound) == (pytest.approx(ms, rel=0.02), "memory")
        many = runner.stage([Tokens(count=8192, sequences=16, context=256)], rows=16)
        assert many.bound == "compute"


@pytest.mark.parametrize(
    ("name", "ways", "gigabytes", "sequences"),
    [
        ("lm-175b", Ways(tensor=8, pipeline=2), 21.9, 78),
        ("lm-175b", Ways(tensor=16), 21.9, 78),
        ("lm-530b", Ways(tensor=8, pipeline=5), 26.5, 69),
        ("moe-1t", Ways(data=32, expert=4, tensor=2), 12.3, None),
        ("moe-2t", Ways(data=32, expert=4, tensor=2), 23.4, None),
    ],
)
def test_weights_fit_where_the_paper_ran_them(name, ways, gigabytes, sequences):
    plan = Plan(ways=ways, prompt_micro_batches=8, micro_batches=ways.pipeline)
    made = predicted(name, plan, Workload(batch=8, prompt=512, generate=50))
    assert made.memory.weights / 1e9 == pytest.approx(gigabytes, rel=0.02)
    if sequences:
        fits = 8 * (USABLE * A100.memory - made.memory.weights - made.memory.work) / made.memory.cache
        assert fits == pytest.approx(sequences, rel=0.12)


def test_ticks_are_those_of_schedules():
    """A plan takes as many ticks as its schedule as data, each as long as its slowest stage."""
    stages, prompts, tokens = 4, 8, 6
    plan = Plan(ways=Ways(pipeline=stages), prompt_micro_batches=prompts, micro_batches=stages)
    made = predicted("gpt-13b", plan, Workload(batch=8, prompt=128, generate=tokens), device=FAR)
    tick = made.each.total / stages
    units = (made.first.total - made.first.bubble) / tick
    drawn = schedules.hybrid(stages, prompts, stages, tokens, prompt_units=units)
    assert made.seconds / tick == pytest.approx(drawn.length)
    drained = predicted(
        "gpt-13b",
        dataclasses.replace(plan, schedule="drained"),
        Workload(batch=8, prompt=128, generate=tokens),
        device=FAR,
    )
    gain = (drained.seconds - drained.first.total) / (made.seconds - made.first.total)
    assert gain == pytest.approx(schedules.queued_gain(stages, tokens - 1))


def test_chunks_fill_stages_as_the_closed_form_says():
    """Chunks that take equally long are c P / (c + P - 1) times as fast; without overheads, c chunks are one prompt."""
    workload = Workload(batch=1, prompt=8192, generate=1)
    wide = dataclasses.replace(CATALOGUE.model("lm-530b"), vocab=1)
    one = predicted(wide, Plan(ways=Ways()), workload, IDEAL, FAR).first.total
    four = predicted(wide, Plan(ways=Ways(pipeline=5), schedule="chunks", chunk=512), workload, IDEAL, FAR).first.total
    assert one / four == pytest.approx(schedules.chunk_speedup(5, 16), rel=0.01)


def test_cohorts_send_while_they_compute():
    plan = Plan(ways=Ways(pipeline=4), schedule="cohorts", chunk=512, micro_batches=4)
    workload = Workload(batch=32, prompt=512, generate=512)
    slow = dataclasses.replace(A100, node=1, network=0.5e9)
    near, far = (predicted("gpt-13b", plan, workload, device=device) for device in (FAR, slow))
    assert far.each.total == pytest.approx(near.each.total)
    assert predicted("gpt-13b", dataclasses.replace(plan, schedule="hybrid"), workload, device=slow).each.exchange > 0


def test_a_step_of_cohorts_has_so_many_prompt_tokens():
    """If prompts bring more, requests wait: as many as are there (Little), less those that generate."""
    workload = Workload(batch=64, prompt=4096, generate=8)
    plan = Plan(ways=Ways(), schedule="cohorts", chunk=2048)
    made = predicted("gpt-13b", plan, workload, device=FAR)
    assert made.tokens_per_s == pytest.approx(2048 * 8 / 4096 / made.each.total)
    in_system = made.tokens_per_s / 8 * (made.first.total + 8 * made.each.total)
    assert in_system == pytest.approx(64, rel=0.05)
    assert made.first.total > 10 * predicted("gpt-13b", plan, dataclasses.replace(workload, batch=2)).first.total


def test_streaming_reaches_what_the_link_allows():
    """With 16-bit weights, operations a second are at most those of tokens in a pass times the link's bytes."""
    device = CATALOGUE.device("a6000")
    model = CATALOGUE.model("lm-530b")
    for tier, rate in (("host", device.host_link), ("disk", device.disk)):
        for batch in (1, 4, 64):
            work = Workload(batch=batch, prompt=2048, generate=1)
            made = predicted("lm-530b", Plan(ways=Ways(), weights=tier), work, IDEAL, device)
            reached = 2 * batch * 2048 * (model.params - model.head_params) / made.first.total
            assert reached == pytest.approx(min(device.flops, batch * 2048 * rate), rel=0.08)
    assert made.memory.weights < 25e9
    assert not missing(device, made.plan, dataclasses.replace(made.memory, work=0.0, cache=0.0))


def streaming(**fetched):
    """A model of which a token takes a second to compute."""
    shape = ModelShape.from_fields("one", {"hidden": 1000, "layers": 1, "heads": 1, "vocab": 1, "mlp": 1000})
    peak = 2 * (shape.params - shape.head_params)
    device = dataclasses.replace(A100, flops=peak, bandwidth=math.inf)
    return Runner(model=shape, device=device, system=IDEAL, ways=Ways(), format=Format(), fetched=Fetched(**fetched))


def test_a_pass_takes_as_long_as_what_takes_longest():
    ahead, waits = (streaming(layers_s=4.0, ahead=ahead) for ahead in (True, False))
    assert [ahead.token(count, 0).total for count in (1, 4, 8)] == pytest.approx([4, 4, 8], rel=1e-3)
    assert ahead.balanced(0) == 4
    assert waits.token(1, 0).total == pytest.approx(5.0, rel=0.01)
    assert streaming().balanced(0) == 1


def test_of_experts_those_come_that_tokens_chose_and_that_are_not_held():
    model = CATALOGUE.model("qwen3-30b-a3b")
    (layer,) = model.layers
    runner = Runner(model=model, device=FAR, system=IDEAL, ways=Ways(), format=Format())
    for held in (0.0, 0.75):
        streamed = dataclasses.replace(runner, fetched=Fetched(experts=1e9, held=held))
        one = streamed.fetch_s((Tokens(count=1, sequences=1, context=1),))
        assert one == pytest.approx(layer.count * layer.chosen * (1 - held) * layer.expert_params * 2 / 1e9)


def test_every_node_has_the_weights_that_its_devices_stream():
    work = Workload(batch=16, prompt=128, generate=8)
    sizes = [
        predicted("lm-175b", Plan(ways=ways, weights="host"), work).memory.host / CATALOGUE.model("lm-175b").params
        for ways in (Ways(), Ways(data=8), Ways(data=2, tensor=8), Ways(tensor=16))
    ]
    assert sizes == [2, 2, 4, 2]


def test_a_cache_on_the_host_frees_memory_and_is_fetched():
    work = Workload(batch=64, prompt=2048, generate=64)
    plan = Plan(ways=Ways(tensor=8, pipeline=2), prompt_micro_batches=8, micro_batches=2)
    device, host = (predicted("lm-175b", dataclasses.replace(plan, cache=tier), work) for tier in ("device", "host"))
    assert host.memory.cache < device.memory.cache / 10
    assert host.memory.host == pytest.approx(16 * device.memory.cache)
    assert (host.each.bound, device.each.bound) == ("fetch", "memory")


def test_experts_are_read_if_chosen():
    model = CATALOGUE.model("qwen3-30b-a3b")
    (layer,) = model.layers
    runner = Runner(model=model, device=FAR, system=IDEAL, ways=Ways(), format=Format())
    one, many = (runner.layer(layer, (Tokens(count=n, sequences=n, context=1),)).memory for n in (1, 64))
    rest = runner.shared_bytes(layer) / FAR.bandwidth
    assert (one - rest) / (8 * layer.expert_params * 2 / FAR.bandwidth) == pytest.approx(1.0, rel=0.01)
    assert (many - rest) / (one - rest) == pytest.approx(128 / 8 * (1 - (1 - 8 / 128) ** 64), rel=0.01)
    idle = dataclasses.replace(runner, system=dataclasses.replace(IDEAL, idle_experts=True))
    all_of_them = idle.layer(layer, (Tokens(count=1, sequences=1, context=1),)).memory
    assert (all_of_them - rest) / (one - rest) == pytest.approx(16, rel=0.01)


def test_the_busiest_group_has_more():
    assert imbalance(8.0, 8) > imbalance(800.0, 8) > 1.0
    assert imbalance(0.01, 4) == 4


def test_a_coordinated_exchange_has_fewer_peers():
    """The paper's PCC: an all-to-all among p / L devices of what is 1 / L as large."""
    model, ways = CATALOGUE.model("moe-1t"), Ways(data=32, expert=4, tensor=2)
    system = dataclasses.replace(IDEAL, peer_s=1e-6)

    def seconds(exchange, device):
        runner = Runner(model=model, device=device, system=system, ways=ways, format=Format())
        rows = {"pcc": (("data",), 32, 1e6 / 4), "all_to_all": (("data", "expert"), 128, 1e6)}[exchange]
        return runner.exchanged([Exchange("all-to-all", *rows)]).total

    assert seconds("pcc", FAR) == pytest.approx(31e-6)
    assert seconds("all_to_all", FAR) == pytest.approx(127e-6)
    wire = [seconds(way, A100) - seconds(way, FAR) for way in ("pcc", "all_to_all")]
    assert wire[0] == pytest.approx(31 / 32 * 1e6 / 4 / A100.network)  # eight devices of a node are one lane
    assert wire[1] == pytest.approx(124 / 128 * 1e6 / A100.network)  # four groups of experts in a node


def test_meshes_divide_heads_and_experts():
    dense = list(meshes(CATALOGUE.model("lm-175b"), 16))
    assert {ways.size for ways in dense} == {16}
    assert {ways.expert for ways in dense} == {1}
    assert Ways(tensor=8, pipeline=2) in dense
    assert not [ways for ways in meshes(CATALOGUE.model("gpt-13b"), 16) if ways.tensor == 16]  # 40 heads
    for ways in meshes(CATALOGUE.model("gpt-oss-20b"), 16):
        assert 32 % ways.groups == 0


def test_plans_are_ranked_by_what_was_asked():
    work, model = Workload(batch=24, prompt=512, generate=50), CATALOGUE.model("lm-175b")
    made = {by: rank(model, A100, 16, DEEPSPEED, Format(), work, by=by) for by in ("throughput", "ttft", "tpot")}
    assert made["throughput"][0].tokens_per_s == max(each.tokens_per_s for each in made["ttft"])
    assert made["ttft"][0].first.total == min(each.first.total for each in made["tpot"])
    assert made["tpot"][0].each.total == min(each.each.total for each in made["throughput"])
    for each in made["ttft"]:
        assert not missing(A100, each.plan, each.memory)
    assert {each.plan.tiers for each in made["throughput"][:20]} == {("device", "device", "device")}
    assert not [each for each in made["tpot"] if each.plan.at_once]
    assert {each.plan.schedule for each in made["ttft"]} == {"hybrid", "cohorts"}  # no prompt is longer than a chunk


def test_too_large_a_model_streams_where_it_can():
    work, model = Workload(batch=8, prompt=512, generate=50), CATALOGUE.model("lm-175b")
    made = rank(model, A100, 4, DEEPSPEED, Format(), work)
    assert {each.plan.weights for each in made} == {"host", "disk"}
    assert {each.plan.cache for each in made} == {"device", "host"}
    assert {each.plan.ways.pipeline for each in made} == {1}
    assert (made[0].plan.weights, made[0].plan.cache, made[0].each.bound) == ("host", "device", "fetch")


def test_more_requests_than_have_room_run_in_slices_over_a_cache_on_the_host():
    """Each slice reads the layer's weights again; three slices of one layer's cache are on the device."""
    work, model = Workload(batch=256, prompt=512, generate=512), CATALOGUE.model("gpt-50b")
    made = rank(model, A100, 1, DEEPSPEED, Format(), work)
    assert all(each.memory.device <= USABLE * A100.memory for each in made)
    best, few = made[0], next(each for each in made if each.plan.cache == "device")
    assert best.plan.tiers == ("host", "host", "device")
    assert best.tokens_per_s > 1.5 * few.tokens_per_s
    assert 1 < few.plan.at_once < 256
    one, two = (
        Runner(model=model, device=FAR, system=IDEAL, ways=Ways(), format=Format(), fetched=Fetched(slices=count))
        for count in (1, 2)
    )
    rows = [Tokens(count=64, sequences=64, context=512)]
    layers = sum(layer.count * one.shared_bytes(layer) for layer in model.layers)
    read_again = two.stage(rows, rows=64).memory - one.stage(rows, rows=64).memory
    assert read_again == pytest.approx(layers / FAR.bandwidth)


def test_pages_of_unequal_layers_and_states_stay_on_devices():
    work = Workload(batch=2, prompt=64, generate=8, hit_rate=0.5)
    for name, tiers in (("qwen3-next-80b-a3b", {"device"}), ("gpt-oss-20b", {"device", "host", "disk"})):
        made = list(plans(CATALOGUE.model(name), 1, work))
        assert {plan.prefixes for plan in made} == tiers
    streamed = [plan.cache for plan in plans(CATALOGUE.model("qwen3-next-80b-a3b"), 1, work) if plan.weights == "host"]
    assert set(streamed) == {"device"}


def test_prompts_that_come_again_are_read_back():
    model, work = CATALOGUE.model("llama-3.1-8b"), Workload(batch=64, prompt=4096, generate=64, hit_rate=0.75)
    h200 = CATALOGUE.device("h200")
    plan = Plan(ways=Ways(), schedule="cohorts", chunk=2048)
    none, host, disk = (
        predicted(model, dataclasses.replace(plan, prefixes=tier), work, device=h200)
        for tier in ("device", "host", "disk")
    )
    assert none == dataclasses.replace(
        predicted(model, plan, dataclasses.replace(work, hit_rate=0.0), device=h200), plan=none.plan
    )
    assert host.tokens_per_s > 2 * none.tokens_per_s
    assert host.first.total < none.first.total / 2
    assert disk.tokens_per_s <= host.tokens_per_s
    assert host.memory.host == pytest.approx(64 * 0.75 * 4096 * 32 * 2 * 8 * 128 * 2)
    assert host.memory.device == none.memory.device
    slow = dataclasses.replace(h200, host_link=1e8, disk=1e8)
    for tier in ("host", "disk"):
        there = predicted(model, dataclasses.replace(plan, prefixes=tier), work, device=slow)
        assert there.tokens_per_s >= predicted(model, plan, work, device=slow).tokens_per_s  # it computes instead


@pytest.mark.parametrize("read", [0.0, 0.1, 1.0, 2.0, 30.0])
@pytest.mark.parametrize("write", [0.1, 5.0])
def test_no_prompt_waits_longer_than_computing_takes(read, write):
    back = restore(compute=2.0, read=read, write=write)
    assert back.wait <= min(2.0, read + write)
    assert (back.share == 0) == (back.wait == 0)
    if back.share not in (0, 1):  # computing and reading take equally long
        assert 2.0 * (1 - back.share) == pytest.approx(back.read)


def test_what_does_not_fit_says_what_would():
    work, model = Workload(batch=4096, prompt=512, generate=50), CATALOGUE.model("deepseek-v3")
    with pytest.raises(
        NothingFitsError, match=r"deepseek-v3 does not fit on 8 a100-40 .* It would fit .*on a100-40:\d+"
    ):
        rank(model, A100, 8, DEEPSPEED, Format(), work)
    with pytest.raises(NothingFitsError, match="It would fit with --quantize int8; on h200:4"):
        rank(CATALOGUE.model("qwen3-235b-a22b"), CATALOGUE.device("h200"), 2, DEEPSPEED, Format(), work)


def test_requests_that_have_no_room_wait():
    """As many run at once as have room; the others of the closed loop are in the time to the first token (Little)."""
    work, model = Workload(batch=512, prompt=1024, generate=256), CATALOGUE.model("gpt-13b")
    made = rank(model, A100, 1, DEEPSPEED, Format(), work)
    best = made[0]
    assert (best.plan.schedule, best.plan.weights) == ("cohorts", "device")
    assert not missing(A100, best.plan, best.memory)
    more = dataclasses.replace(best.plan, at_once=best.plan.at_once + 1)
    assert missing(A100, more, predicted(model, more, work).memory)
    in_system = best.tokens_per_s / 256 * (best.first.total + 256 * best.each.total)
    assert in_system == pytest.approx(512, rel=0.05)


def test_all_schedules_are_enumerated():
    made = list(plans(CATALOGUE.model("lm-175b"), 16, Workload(batch=24, prompt=4096, generate=50)))
    assert {plan.schedule for plan in made} == {"hybrid", "chunks", "cohorts"}
    assert {plan.cache for plan in made} == {"device", "host"}
    assert {plan.weights for plan in made} == {"device", "host", "disk"}


def test_int8_halves_what_is_read():
    plan, work = Plan(ways=Ways(tensor=8)), Workload(batch=1, prompt=128, generate=8)
    full, half = (predicted("gpt-50b", plan, work, IDEAL, FAR, FORMATS[name]) for name in (None, "int8"))
    assert full.memory.weights == pytest.approx(2 * half.memory.weights)
    assert 1.9 < full.each.total / half.each.total < 2


def test_workloads_are_checked():
    with pytest.raises(ValueError, match=r"Workload\.generate must be an integer >= 1, got 0"):
        Workload(batch=1, prompt=1, generate=0)
    with pytest.raises(ValueError, match=r"Workload\.hit_rate must be in \[0, 1\), got 1"):
        Workload(batch=1, prompt=1, generate=1, hit_rate=1)
