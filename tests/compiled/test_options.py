"""Which programs are compiled with which options."""

import numpy as np
import pytest

from jaxinfer.compiled import compiler_options
from jaxinfer.pallas_kernels.cpu.library import Library, use_library

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


def test_other_platforms_take_none_beside_the_common_ones():
    assert compiler_options("tpu", rows=1, dtype=np.dtype(np.float32)) == {}
