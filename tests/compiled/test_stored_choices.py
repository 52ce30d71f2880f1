"""Choices on disk: what is measured once is used by later processes, and is part of every key."""

import contextlib

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.compiled import choices
from jaxinfer.compiled.target import Target
from jaxinfer.disk_cache import keys
from jaxinfer.generation.api import loading
from jaxinfer.pallas_kernels import dispatch
from jaxinfer.pallas_kernels.choices import Choices, recorded_calls, use_choices
from jaxinfer.pallas_kernels.dispatch import Operation
from jaxinfer.pallas_kernels.implementation import reference, xla
from jaxinfer.pallas_kernels.target import targeting


def plus_one(x):
    return x + 1.0


def plus_two(x):
    return x + 2.0


operation = Operation("op", xla(plus_one, platform="cpu"), reference(plus_two))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path))
    choices.stored_choices.cache_clear()
    yield tmp_path
    choices.stored_choices.cache_clear()


@pytest.fixture
def call():
    with recorded_calls() as calls:
        jax.eval_shape(lambda x: operation(x), jnp.zeros(3))
    return calls[0]


def test_what_was_measured_is_there_for_the_next_process(call, monkeypatch):
    assert choices.stored_choices() == Choices()
    monkeypatch.setattr(choices, "measure", lambda call: {"xla": 2.0, "reference": 1.0})
    assert [seconds for _, seconds in choices.measure_choices([call])] == [{"xla": 2.0, "reference": 1.0}]
    choices.stored_choices.cache_clear()  # as in another process
    assert choices.stored_choices() == Choices((("op", "float32[3]", "reference"),))
    choices.forget_choices()
    choices.stored_choices.cache_clear()
    assert choices.stored_choices() == Choices()


def test_an_interrupted_measurement_keeps_what_it_has(call, monkeypatch):
    def interrupted(measured):
        if measured is call:
            return {"xla": 2.0, "reference": 1.0}
        raise KeyboardInterrupt

    monkeypatch.setattr(choices, "measure", interrupted)
    with recorded_calls() as others:
        jax.eval_shape(lambda x: operation(x), jnp.zeros(4))
    with pytest.raises(KeyboardInterrupt):
        list(choices.measure_choices([call, *others]))
    choices.stored_choices.cache_clear()
    assert [shapes for _, shapes, _ in choices.stored_choices().entries] == ["float32[3]"]


def test_a_measurement_is_kept_before_it_is_shown_and_beside_those_of_others(call, monkeypatch):
    monkeypatch.setattr(choices, "measure", lambda call: {"xla": 2.0, "reference": 1.0})
    with recorded_calls() as others:
        jax.eval_shape(lambda x: operation(x), jnp.zeros(4))
    first, second = choices.measure_choices([call]), choices.measure_choices(others)  # as of two processes
    next(first), next(second)
    assert [shapes for _, shapes, _ in choices.stored_choices().entries] == ["float32[3]", "float32[4]"]


def test_nothing_is_measured_that_cannot_be_kept(call, folder, monkeypatch):
    (folder / "choices").write_text("a file is in the way")
    monkeypatch.setattr(choices, "measure", lambda call: pytest.fail("it was measured"))
    with pytest.raises(OSError, match="choices"):
        next(choices.measure_choices([call]))


def test_choices_are_part_of_every_key():
    def key():
        return keys.digest(keys.environment_key())

    plain = key()
    with use_choices(Choices((("op", "float32[3]", "reference"),))):
        assert key() != plain
    with use_choices(Choices()):
        assert key() == plain


def test_kernels_that_were_not_measured_are_said_once(call, monkeypatch, caplog):
    choices._warn_once.cache_clear()
    choices.warn_of_unmeasured_kernels()
    assert not caplog.messages  # a CPU has none
    monkeypatch.setattr(dispatch, "_jax_lowers_kernels", lambda: True)  # which the newest JAX does not
    with targeting(Target.load("h100-pcie").gpu):
        for _ in range(2):
            choices.warn_of_unmeasured_kernels()
        (message,) = caplog.messages
        assert "`jaxinfer tune DIR` measures them" in message
        assert "\n" not in message
        choices._warn_once.cache_clear()
        monkeypatch.setattr(choices, "measure", lambda call: {"xla": 2.0, "reference": 1.0})
        list(choices.measure_choices([call]))
        choices.stored_choices.cache_clear()  # as in another process
        choices.warn_of_unmeasured_kernels()
        assert len(caplog.messages) == 1


@pytest.mark.parametrize(("options", "warns"), [({}, True), ({"kernels": True}, False), ({"kernels": False}, False)])
def test_kernels_that_were_asked_for_are_not_warned_of(model_dir, monkeypatch, options, warns):
    class WarnedError(Exception):
        pass

    def warn():
        raise WarnedError

    monkeypatch.setattr(loading, "warn_of_unmeasured_kernels", warn)
    with pytest.raises(WarnedError) if warns else contextlib.nullcontext():
        loading.load_decoder(model_dir, max_batch=1, context=16, **options)
