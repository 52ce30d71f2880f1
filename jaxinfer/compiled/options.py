"""What XLA is told when a program is compiled, per platform; the same for a GPU that is here and one that is not."""

import numpy as np

LARGE_WEIGHTS = 256 << 20
"""Bytes from which on faster products are worth compiling a program anew in every process."""


def compiler_options(
    platform: str, *, rows: int, dtype: np.dtype, weight_bytes: int = 0
) -> dict[str, str | bool | int]:
    """XLA's options for a generation program.

    Args:
      platform: as in `jax.Device.platform`.
      rows: tokens in one pass. dtype: what the matrices are held in, int8 included. weight_bytes: of all of them.
    """
    if platform == "cpu":
        return _cpu(rows, dtype, weight_bytes)
    if platform == "gpu":
        return _gpu(rows, dtype)
    return {}


def _cpu(rows: int, dtype: np.dtype, weight_bytes: int) -> dict[str, str | bool | int]:
    # 8 to 31 float32 rows are up to 1.5 times faster through oneDNN than through YNNPACK, which would take them first;
    # fewer are slower, up to three times, and so are other dtypes (docs/cpu-speed.md). Such a program cannot be kept in
    # JAX's persistent cache.
    if dtype == np.float32 and 8 <= rows < 32 and weight_bytes >= LARGE_WEIGHTS:
        return {
            "xla_cpu_use_onednn": True,
            "xla_cpu_experimental_onednn_custom_call": True,
            "xla_cpu_experimental_ynn_fusion_type": "",
        }
    return {}


def _gpu(rows: int, dtype: np.dtype) -> dict[str, str | bool | int]:
    # A whole program becomes one CUDA graph, loops and branches included: XLA captures no loop by default, and with
    # one it counts the loop as a single kernel, too few for its own minimum. The list is written in full because
    # compiler options, unlike XLA_FLAGS, do not take "+WHILE".
    options: dict[str, str | bool | int] = {
        "xla_gpu_enable_command_buffer": (
            "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE"
        ),
        "xla_gpu_graph_min_graph_size": 1,
    }
    if rows == 1 and dtype != np.int8:
        # The pass writes a product of one row as multiply and reduce. Attention at one row then takes three kernels
        # more, two of them on a single SM, and writes all products of weights and values to memory. From two rows on
        # XLA fuses these, and int8 weights need the pass: without it they are converted to int32 in memory.
        options["xla_disable_hlo_passes"] = "dot-strength-reduction"
    return options
