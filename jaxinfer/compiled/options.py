"""What XLA is told when a program is compiled, per platform; the same for a GPU that is here and one that is not."""


def compiler_options(platform: str, *, rows: int, int8: bool) -> dict[str, str | bool | int]:
    """XLA's options for a generation program of `rows` rows; `platform` as in `jax.Device.platform`.

    On a GPU a whole program becomes one CUDA graph, loops and branches included: XLA captures no loop by default,
    and with one it counts the loop as a single kernel, too few for its own minimum. The list is written in full
    because compiler options, unlike XLA_FLAGS, do not take "+WHILE".
    """
    if platform != "gpu":
        return {}
    options: dict[str, str | bool | int] = {
        "xla_gpu_enable_command_buffer": (
            "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE"
        ),
        "xla_gpu_graph_min_graph_size": 1,
    }
    if rows == 1 and not int8:
        # The pass writes a product of one row as multiply and reduce. Attention at one row then takes three kernels
        # more, two of them on a single SM, and writes all products of weights and values to memory. From two rows on
        # XLA fuses these, and int8 weights need the pass: without it they are converted to int32 in memory.
        options["xla_disable_hlo_passes"] = "dot-strength-reduction"
    return options
