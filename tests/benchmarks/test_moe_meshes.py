"""The benchmark of mixtures on meshes: what it reads from compiled layers, and what it makes of it."""

import json

import pytest

from benchmarks.moe import meshes
from benchmarks.moe.meshes import DENSE, EXCHANGES, Layout, compared, exchanged, ratios, split_of_experts
from benchmarks.pages.mixtures import moe_section
from benchmarks.report import ROOT
from jaxinfer.models.presets import preset
from jaxinfer.sharding import MeshConfig


@pytest.mark.parametrize("exchange", ["pcc", *(pytest.param(name, marks=pytest.mark.slow) for name in EXCHANGES)])
def test_exchanges_are_those_of_the_paper(exchange):
    layout = Layout(p=4, column=2, tokens=3)
    row = exchanged(layout, exchange)
    assert row["exact"]
    assert row["table_bytes"] == 16 * 3 * 64 * 4


def test_a_layer_that_exchanges_otherwise_is_not_exact(monkeypatch):
    monkeypatch.setattr(meshes, "_compiled", lambda layout, rules, mesh: plain)
    plain = (
        "ENTRY %main (x: f32[]) -> f32[] {\n  %a = f32[4,96,64]{2,1,0} all-to-all(%x), replica_groups={{0,1,2,3}}\n}"
    )
    row = exchanged(Layout(p=4, column=2, tokens=3), "pcc")
    assert (row["exact"], row["participants"]) == (False, {"all-to-all": [4]})


def test_pcc_halves_what_two_devices_with_the_same_tokens_send():
    shape = {"figure": "exchange", "p": 16, "L": 2, "tensor": 1, "tokens": 8, "experts": 16, "capacity_factor": None}
    layout = Layout(p=16, column=2, tokens=8)
    rows = [shape | {"exchange": name, "wire_bytes": layout.expected_bytes(name)} for name in EXCHANGES]
    (row,) = ratios(rows)
    assert (row["L"], row["ratio"]) == (2, 0.5)


def test_every_family_with_experts_is_compared_and_two_dense_ones():
    configs = {folder.name: config for folder, config in compared().items()}
    assert {name for name, config in configs.items() if not config.moe_layers} == set(DENSE)
    assert {name.rsplit("_", 1)[0] for name in configs if name not in DENSE} == {
        *("dots1", "glm4_moe", "granitemoe", "granitemoeshared", "minimax_m2"),
        *("mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "exaone_moe", "hy_v3", "ernie4_5_moe", "mellum", "solar_open"),
        *("hunyuan_v1_moe", "afmoe", "qwen3_5_moe", "qwen3_next", "gemma4"),
    }


@pytest.mark.parametrize(
    ("axes", "split"),
    [
        ({"data": 2, "expert": 4}, ("data", "expert")),
        ({"data": 3, "expert": 4}, ("expert",)),
        ({"data": 3, "expert": 3}, None),
    ],
    ids=str,
)
def test_experts_are_split_over_the_axes_that_divide_them(axes, split):
    assert split_of_experts(preset("mixtral-8x7b"), MeshConfig(**axes)) == split


def test_the_page_has_tables_of_the_recorded_exchanges():
    result = json.loads((ROOT / "benchmarks/results/intel-amx/moe.json").read_text())
    text = "\n".join(moe_section(result))
    assert "| 8 |  | 2 | 8 | 61.4 | 30.7 |" in text
    assert "two lanes, one thread each" in text
