"""The settings of `benchmarks.kv_tier`."""

import math

import pytest

from benchmarks.kv_tier.__main__ import PARTS
from benchmarks.kv_tier.settings import PAGE, Settings, make_config
from benchmarks.workers import part_parser
from jaxinfer.models import WeightFormat
from jaxinfer.models.leaves import canonical_leaves


def test_the_model_is_what_the_figures_say():
    leaves = canonical_leaves(make_config(16, 1024), WeightFormat()).values()
    assert sum(math.prod(leaf.shape) for leaf in leaves) == pytest.approx(246e6, rel=0.01)


def test_parts_are_known_by_name(capsys):
    parser = part_parser("kv_tier", PARTS, "", quick="little")
    assert parser.parse_args(["--only", "chat,idle"]).only == ["chat", "idle"]
    with pytest.raises(SystemExit):
        parser.parse_args(["--only", "chat,ssd"])
    assert "unknown ssd; there are resume, chat" in capsys.readouterr().err
    assert list(PARTS) == ["resume", "chat", "idle", "restart", "both_ends", "sliced"]


@pytest.mark.slow
def test_sessions_go_on_after_a_kill(tmp_path):
    from benchmarks.kv_tier.restart import restart

    found = {}

    class Checks:
        def row(self, **fields):
            assert fields["stored"] == 2 * 8  # pages of 16 tokens that two sessions of 128 fill
            assert fields["read_back_bytes"] > 0

        def check(self, name, value, *_, invalid, **__):
            found[name] = value, invalid

    restart(Checks(), Settings(quick=True, folder=tmp_path))
    assert found["restart_tokens_equal"] == (1, "")
    assert found["resume_after_restart_gain"][1] == ""


@pytest.mark.slow
def test_all_ways_of_a_slow_tier_give_the_same_token(tmp_path):
    from benchmarks.kv_tier.both_ends import RATIOS, both_ends

    rows, found = [], {}

    class Checks:
        def row(self, **fields):
            rows.append(fields)

        def check(self, name, value, *_, **__):
            found[name] = value

    both_ends(Checks(), Settings(quick=True, folder=tmp_path))
    assert [row["ratio"] for row in rows] == list(RATIOS)
    assert all(row["equal"] for row in rows)
    assert found["both_ends_vs_best"] > 0


@pytest.mark.slow
def test_a_sequence_that_gave_way_gets_its_next_token(tmp_path):
    from benchmarks.kv_tier.resume import resumption
    from benchmarks.kv_tier.settings import HOST_KV, Tokens

    settings = Settings(quick=True, folder=tmp_path)
    llm = settings.engine(settings.tokens // PAGE + 13, host_kv=HOST_KV, max_batch=2)
    prompt = Tokens(llm, seed=1).draw(settings.tokens)
    for restores in (True, False):
        done = resumption(llm, prompt, Tokens(llm), restores=restores)
        assert done.seconds > 0
        assert (done.read_back_bytes > 0) == restores


@pytest.mark.slow
def test_rows_in_slices_are_measured(tmp_path):
    from benchmarks.kv_tier.sliced import sliced

    class Checks:
        def row(self, **fields):
            assert (fields["read_back_bytes"] > 0) == (fields["engine"] == "host pages")

        def check(self, name, value, *_, invalid, **__):
            assert (name, invalid) == ("sliced_batch_gain", "")
            assert value > 0

    sliced(Checks(), Settings(quick=True, folder=tmp_path))
