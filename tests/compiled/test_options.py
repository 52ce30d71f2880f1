"""Which programs are compiled with which options."""

import jax
import numpy as np
import pytest

from jaxinfer.compiled import compiler_options
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.execution.layout import DeviceLayout
from jaxinfer.models import WeightFormat
from jaxinfer.pallas_kernels.cpu.library import Library, use_library
from jaxinfer.sharding import MeshConfig
from tests.tiny import CONFIG

LARGE = 1 << 30


@pytest.mark.parametrize(
    ("rows", "dtype", "weight_bytes", "onednn"),
    [
        (8, np.float32, LARGE, True),
        (7, np.float32, LARGE, False),  # three times slower than without
        (32, np.float32, LARGE, False),
        (1, np.float32, LARGE, False),  # bound by memory either way
        (512, np.float32, LARGE, False),  # a prefill
        (8, np.int8, LARGE, False),
        (8, np.float32, 1 << 20, False),  # not worth compiling in every process
    ],
)
def test_a_few_float32_rows_of_a_large_model_go_to_onednn_on_a_cpu(rows, dtype, weight_bytes, onednn):
    options = compiler_options("cpu", rows=rows, dtype=np.dtype(dtype), weight_bytes=weight_bytes)
    assert options.get("xla_cpu_use_onednn", False) is onednn


def test_products_of_a_library_are_none_of_onednn():
    def onednn(rows):
        options = compiler_options("cpu", rows=rows, dtype=np.dtype(np.float32), weight_bytes=LARGE)
        return options.get("xla_cpu_use_onednn", False)

    with use_library(Library(digest="0" * 64, level="generic", functions=(), limits=(("float32", 8),))):
        assert [rows for rows in range(40) if onednn(rows)] == list(range(9, 32))
    with use_library(Library(digest="0" * 64, level="generic", functions=())):
        assert not any(map(onednn, range(40)))


@pytest.mark.parametrize(
    ("rows", "dtype", "disabled"), [(1, np.float32, True), (2, np.float32, False), (1, np.int8, False)]
)
def test_one_float_row_on_a_gpu_stays_a_product(rows, dtype, disabled):
    options = compiler_options("gpu", rows=rows, dtype=np.dtype(dtype))
    assert ("xla_disable_hlo_passes" in options) is disabled
    assert "WHILE" in str(options["xla_gpu_enable_command_buffer"])


def test_graphs_of_one_gpu_capture_no_collectives():
    def captured(devices):
        options = compiler_options("gpu", rows=8, dtype=np.dtype(np.float32), devices=devices)
        return str(options["xla_gpu_enable_command_buffer"]).split(",")

    assert "COLLECTIVES" not in captured(1)
    assert captured(2) == [*captured(1), "COLLECTIVES"]


def test_generation_captures_collectives_only_on_a_mesh():
    def captures(mesh):
        engine = EngineConfig(max_batch=1, context=16)
        layout = DeviceLayout(CONFIG, WeightFormat(), engine, num_pages=1, platform="gpu", mesh=mesh)
        return "COLLECTIVES" in str(layout.compiler_options(tokens=1)["xla_gpu_enable_command_buffer"])

    assert not captures(None)
    assert captures(MeshConfig(data=2).build(jax.devices()[:2]))


def test_other_platforms_take_none_beside_the_common_ones():
    assert compiler_options("tpu", rows=1, dtype=np.dtype(np.float32)) == {}
