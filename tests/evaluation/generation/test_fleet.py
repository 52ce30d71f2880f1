"""The size of a fleet, and which configurations it has."""

import pytest

from jaxinfer.evaluation.generation import fleet
from jaxinfer.evaluation.generation.fleet import (
    KEPT,
    PAGE,
    PlannedModel,
    Traffic,
    finalists,
    ranked,
    replicas,
    size_fleet,
    spares,
)
from jaxinfer.evaluation.serving.arrivals import TracedRequest
from jaxinfer.evaluation.serving.figures import Objective
from jaxinfer.sharding.planner import Catalogue, NothingFitsError, Workload
from jaxinfer.sharding.planner.search import FORMATS

WORK = Workload(batch=1, prompt=200, generate=20)
OBJECTIVE = Objective(ttft_ms=500, tpot_ms=50)


@pytest.fixture
def few_requests(monkeypatch):
    monkeypatch.setattr(fleet, "JUDGED", 60)
    monkeypatch.setattr(fleet, "IDLE", 2)


def target(model="llama-3.1-8b", device="h200", quantize=None):
    catalogue, form = Catalogue.read(), FORMATS[quantize]
    shape = catalogue.model(model)
    return PlannedModel(model=shape, device=catalogue.device(device), system=catalogue.system(shape, form), form=form)


def traffic(rate=100.0, count=500, **lengths):
    items = [TracedRequest(arrival=at / 10 + (at % 3) / 50, **lengths) for at in range(count)]
    return Traffic.from_trace(items, rate, prompt=200, generate=20)


def test_a_share_has_every_request_of_one_replica():
    made = traffic(rate=10.0, count=10)
    assert made.workload == WORK
    share = made.share(4, count=5)  # of the trace: 0, 4, 8, then 2 and 6 of its next round
    arrivals = [item.arrival for item in made.trace]
    expected = [arrivals[0], arrivals[4], arrivals[8], 1.0 + arrivals[2], 1.0 + arrivals[6]]
    assert [request.arrival for request in share] == pytest.approx(expected)
    assert len({tuple(request.prompt) for request in share}) == 5
    assert {(len(request.prompt), request.output_tokens) for request in share} == {(200, 20)}
    given = traffic(prompt_tokens=7, output_tokens=3)
    assert given.workload == Workload(batch=1, prompt=7, generate=3)


def test_configurations_fit_and_keep_the_objective():
    order = ranked(target(), 2, traffic(), OBJECTIVE)
    assert [each.device_seconds for each in order] == sorted(each.device_seconds for each in order)
    assert {each.made.plan.ways.data for each in order} == {1}  # lanes of dense models are replicas
    assert all(1e3 * each.made.each.total <= 50 for each in order)
    assert len({each.made.plan.ways for each in finalists(order)}) == len(finalists(order)) == 3
    pages = order[0].num_pages
    kv_bytes = 2 * 2 * 8 * 128 * 32 * PAGE
    assert 0.6 < pages * kv_bytes * order[0].devices / (141e9 * 0.9 * order[0].devices - 16e9) < 1


def test_mixtures_have_lanes():
    found = replicas(target("qwen3-30b-a3b"), 2, WORK)
    assert {each.made.plan.ways.data for each in found} == {1, 2}


def test_what_does_not_fit_or_is_too_slow_is_refused():
    with pytest.raises(
        NothingFitsError, match=r"lm-530b on up to 1 a100-40: no mesh has memory .* --devices a100-40:2"
    ):
        ranked(target("lm-530b", "a100-40"), 1, traffic(), OBJECTIVE)
    with pytest.raises(NothingFitsError, match=r"no mesh keeps the objective. .* shortest TPOT as \d"):
        ranked(target(), 1, traffic(), Objective(tpot_ms=1))
    with pytest.raises(NothingFitsError, match="of which one may have 9000001"):
        ranked(target(), 1, traffic(prompt_tokens=9_000_000, output_tokens=1), OBJECTIVE)


def test_a_fleet_has_as_many_replicas_as_it_needs(few_requests):
    replica = finalists(ranked(target(), 1, traffic(), OBJECTIVE))[0]
    replica = next(
        each for each in replicas(target(), 1, WORK) if each.batch == 16 and each.made.plan == replica.made.plan
    )
    slow, fast = (size_fleet(replica, traffic(rate), OBJECTIVE) for rate in (400.0, 1600.0))
    assert slow.kept >= KEPT
    assert slow.percentiles["tpot_ms"]["p99"] <= 50
    assert 2 < fast.count / slow.count < 8
    assert slow.count >= 400 / replica.requests_per_s(20)
    assert slow.devices == slow.count + slow.spares
    bill = slow.dollars(traffic(400.0), price=3.6)
    assert bill == pytest.approx(slow.devices * 3.6 / 3600 / (400 * 20) * 1e6)


def test_a_fleet_that_is_too_slow_however_large_is_refused(few_requests):
    replica = next(iter(replicas(target(), 1, WORK)))
    with pytest.raises(NothingFitsError, match="on idle replicas, 0% of the requests keep the objective; 99% must"):
        size_fleet(replica, traffic(), Objective(ttft_ms=1))


def test_spares_replace_what_fails():
    assert spares(1, 1) == 0  # a device is there 99.95% of the time
    assert spares(1000, 8) > spares(100, 8) > spares(10, 8) == 1
    assert 400 < spares(100_000, 8) < 500


def test_pipelines_and_lanes_are_simulated():
    for name, devices, ways in (("llama-3.1-8b", 2, {"pipeline": 2}), ("qwen3-30b-a3b", 2, {"data": 2})):
        found = (
            each
            for each in replicas(target(name), devices, WORK)
            if {axis: getattr(each.made.plan.ways, axis) for axis in ways} == ways
        )
        done = next(found).simulate(traffic(rate=20.0).share(1, 10), WORK)
        assert [record.output_tokens for record in done.records] == [20] * 10
