"""The speed of models with recurrent states: bytes of a step, the dense model, rounds, a quick run and its page."""

import json
import sys
from typing import Any, cast

import pytest

from benchmarks import families_speed
from benchmarks.cpu_decode.step_bytes import kv_bytes, state_bytes, step_bytes, weight_bytes
from benchmarks.families_speed import CONTEXT, dense, hybrid, in_turn
from benchmarks.pages.language_models import families_speed_section


def test_states_are_read_and_written_and_only_layers_with_attention_have_pages():
    config = hybrid(quick=False)
    state, inputs = 16 * 128 * 128 * 4, 3 * 16 * 384 * 2
    assert state_bytes(config, "bfloat16") == 2 * 18 * (state + inputs)
    assert kv_bytes(config, "bfloat16", CONTEXT) == 6 * 2 * 2 * 256 * CONTEXT * 2
    assert 0.7e9 < weight_bytes(config, "bfloat16") / 2 < 0.85e9


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_step_of_the_dense_model_has_as_many_bytes(dtype):
    config = hybrid(quick=False)
    other = dense(config, dtype)
    assert step_bytes(other, dtype, CONTEXT) == pytest.approx(step_bytes(config, dtype, CONTEXT), rel=0.005)
    assert not other.state_layers
    assert other.layer(0).attention.output_gate is False


def test_models_take_turns_and_the_first_round_is_not_counted(monkeypatch):
    monkeypatch.setattr(families_speed.time, "sleep", lambda seconds: None)
    asked = []

    class Worker:
        def __init__(self, engine):
            self.engine = engine

        def ask(self, **request):
            asked.append(self.engine)
            return {"seconds": len(asked)}

    times = in_turn(cast(Any, [Worker("a"), Worker("b")]), 2, do="decode")
    assert asked == ["a", "b", "b", "a", "a", "b"]
    assert times == {"a": [4000, 5000], "b": [3000, 6000]}


@pytest.mark.slow
def test_a_quick_run_and_its_page(tmp_path, monkeypatch):
    file = tmp_path / "result.json"
    options = ["--quick", "--work-dir", str(tmp_path), "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["families_speed", *options])
    families_speed.main()
    result = json.loads(file.read_text())
    assert [check["name"] for check in result["checks"]] == ["hybrid_bandwidth_share"]
    text = "\n".join(families_speed_section(result))
    assert "| hybrid | " in text
    assert "share of the read bandwidth, relative to the dense model's" in text
