"""Descriptions of values: different for different values, and none where there is no telling what a value does."""

import dataclasses
import enum
import itertools
import json
import os
import subprocess
import sys
import typing
from types import ModuleType

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxinfer.disk_cache import keys
from jaxinfer.models.layers import norm
from jaxinfer.pallas_kernels import mosaic
from tests.tiny import CONFIG

DIFFERENT = [
    *(None, False, 0, 1, "1", 1.0, -0.0, 0.0, float("nan"), [1], (1,), {1}, {1: 1}, {"1": 1}, CONFIG),
    *(np.int64(16), np.int64(32), np.int32(16), np.float64(1.0), np.float32(1.0), np.bool_(False), np.str_("1")),
    *(np.zeros(2), np.zeros((2, 1)), np.ones(2), np.zeros(2, ">f8"), np.zeros(2, np.float16)),
    *(np.zeros(2, ml_dtypes.bfloat16), np.dtype("<f4"), np.dtype(">f4"), np.dtype(ml_dtypes.bfloat16)),
]


def test_different_values_have_different_descriptions():
    described = [json.dumps(keys.describe(value)) for value in DIFFERENT]
    same = [pair for pair in itertools.combinations(range(len(described)), 2) if len({described[i] for i in pair}) == 1]
    assert not [(DIFFERENT[i], DIFFERENT[j]) for i, j in same]
    assert described == [json.dumps(keys.describe(value)) for value in DIFFERENT]
    assert keys.describe(np.arange(6).reshape(2, 3).T) == keys.describe(np.arange(6).reshape(2, 3).T.copy())


@dataclasses.dataclass(frozen=True)
class Boost:
    token: int

    def __call__(self, scores, history, length):
        return scores.at[:, self.token].add(1000.0)


@dataclasses.dataclass(frozen=True)
class Plain:
    token: int


class Pair(typing.NamedTuple):
    one: int


class Choice(enum.Enum):
    ONE = 1


class Number(int):
    pass


@pytest.mark.parametrize(
    "value",
    [
        *(Boost(5), Plain(5), Pair(1), Choice.ONE, Number(1), object(), len, lambda: None, Plain, b"bytes"),
        *(np.array([object()]), np.zeros(2, [("a", "f4")]), np.dtype("O"), jnp.zeros(2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_code_or_objects_of_its_own_has_no_description(value):
    for whole in (value, [value], {"a": (value,)}):
        with pytest.raises(keys.NoKeyError, match="it depends on a"):
            keys.describe(whole)


def test_of_arguments_shapes_count_alone():
    assert keys.describe_tree((np.zeros(3), jnp.ones(2))) == keys.describe_tree((np.ones(3), jnp.zeros(2)))
    assert keys.describe_tree(np.zeros(3)) != keys.describe_tree(np.zeros(3, np.float32))


CHANGED = """
import os, pathlib, sys, time
import ours  # as it is before the change
file = pathlib.Path(ours.__file__)
before = file.stat()
time.sleep(0.05)
file.write_text("x = 2")
os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
from jaxinfer.disk_cache import keys  # after it
keys.PACKAGE = "ours"
try:
    print(keys.source_digest())
except keys.NoKeyError as error:
    print(error)
"""


def test_a_file_that_changed_before_keys_were_asked_for_is_seen_even_under_its_old_time(tmp_path):
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "__init__.py").write_text("x = 1")
    paths = os.pathsep.join([str(tmp_path), os.getcwd()])
    done = subprocess.run(
        [sys.executable, "-c", CHANGED], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert "__init__.py has changed since this process started" in done.stdout, done.stdout + done.stderr


class Lazy(ModuleType):
    """As of `pallas_kernels.mosaic`: half a second on a machine without a GPU."""

    def __getattr__(self, name):
        raise AssertionError(f"{name} was asked for")


def test_a_function_that_was_replaced_is_noticed(monkeypatch):
    monkeypatch.setattr(norm, "lazy", Lazy("lazy"), raising=False)
    assert isinstance(mosaic.plgpu, ModuleType)
    keys.check_not_replaced()
    for holder in (norm, norm.Norm):
        name = next(name for name, value in vars(holder).items() if isinstance(value, type(lambda: None)))
        with monkeypatch.context() as patch:
            patch.setattr(holder, name, lambda *arguments: arguments)
            with pytest.raises(keys.NoKeyError, match=rf"norm\..*{name} was replaced by a function of"):
                keys.check_not_replaced()
    keys.check_not_replaced()
