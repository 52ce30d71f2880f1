"""XLA's compiler options per platform, the same whether a GPU is here or only compiled for."""

import numpy as np

from jaxinfer.pallas_kernels.cpu.library import most_rows

COMMON: dict[str, str | bool | int] = {"xla_allow_excess_precision": False}
"""Options of every program. Each result is rounded to its dtype, as the model says. Otherwise XLA keeps float32 between
bfloat16 operations within a program: a model compiled as one program would give other numbers than layer by layer,
without being more precise (docs/streaming.md)."""

LARGE_WEIGHTS = 256 << 20
"""Bytes from which faster products are worth recompiling a program in every process."""


def compiler_options(
    platform: str, *, rows: int, dtype: np.dtype, weight_bytes: int = 0, devices: int = 1
) -> dict[str, str | bool | int]:
    """Return XLA's options for a generation program.

    Args:
      platform: as in `jax.Device.platform`.
      rows: tokens per pass.
      dtype: the dtype of the stored matrices, int8 included.
      weight_bytes: bytes of all matrices.
      devices: number of devices that run the program together.

    On a CPU they also depend on the library of kernels in use (`pallas_kernels/cpu/library.py`).
    """
    if platform == "cpu":
        return _cpu(rows, dtype, weight_bytes)
    if platform == "gpu":
        return _gpu(rows, dtype, devices)
    return {}


def _cpu(rows: int, dtype: np.dtype, weight_bytes: int) -> dict[str, str | bool | int]:
    # With 8 to 31 float32 rows, oneDNN is up to 1.5 times faster than YNNPACK, which XLA prefers; with fewer rows it is
    # up to three times slower, and slower with other dtypes (docs/cpu-speed.md). jaxlib cannot serialise such a
    # program, so that it is compiled in every process. Products of a library in use are none of XLA's.
    if dtype == np.float32 and max(7, most_rows(dtype)) < rows < 32 and weight_bytes >= LARGE_WEIGHTS:
        return {
            "xla_cpu_use_onednn": True,
            "xla_cpu_experimental_onednn_custom_call": True,
            "xla_cpu_experimental_ynn_fusion_type": "",
        }
    return {}


def _gpu(rows: int, dtype: np.dtype, devices: int) -> dict[str, str | bool | int]:
    # A whole program becomes one CUDA graph, loops and branches included. By default XLA captures no loops; when it
    # does, a loop counts as one kernel, fewer than the default minimum of a graph. The list is complete because
    # compiler options, unlike XLA_FLAGS, do not accept "+WHILE". One device has no collectives to capture.
    captured = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE"
    options: dict[str, str | bool | int] = {
        "xla_gpu_enable_command_buffer": captured if devices == 1 else f"{captured},COLLECTIVES",
        "xla_gpu_graph_min_graph_size": 1,
    }
    if rows == 1 and dtype != np.int8:
        # The pass rewrites a product of one row as multiply and reduce. Attention at one row then needs three more
        # kernels, two of them on a single SM, and writes all products of weights and values to memory. From two rows
        # XLA fuses these. int8 weights need the pass: without it they are converted to int32 in memory.
        options["xla_disable_hlo_passes"] = "dot-strength-reduction"
    return options
