"""An MLP of experts for few rows each on a CPU, in C++ (`expert_mlp.h`).

Gate and up are one product, all of whose experts and outputs are one list of tasks; so are those of down. An expert's
matrices are read where they are, once for all of its rows, and those of experts without rows are not read.
"""

import jax
import numpy as np

from jaxinfer.pallas_kernels.cpu.arguments import activation_number, check_product, or_empty
from jaxinfer.pallas_kernels.cpu.library import ffi_call, most_rows
from jaxinfer.pallas_kernels.moe.routing import Routing
from jaxinfer.pallas_kernels.target import UnsupportedError
from jaxinfer.pallas_kernels.weights import Weights


def expert_mlp(
    x: jax.Array,
    routing: Routing,
    gate_up: Weights,
    down: Weights,
    gate_up_bias: jax.Array | None,
    down_bias: jax.Array | None,
    *,
    activation: str,
    gated: bool,
) -> jax.Array:
    """Multiply the rows of each expert, and sum those of each token. Arguments as of `api`. Raises UnsupportedError."""
    check_product(x, gate_up, gate_up_bias)
    check_product(x, down, down_bias)
    experts, most = gate_up.shape[0], most_rows(gate_up.weight.dtype)
    if (choices := routing.experts.size) > most * min(experts, choices):
        raise UnsupportedError(f"XLA multiplies more than {most} rows of an expert, got {choices} of {experts}")
    return ffi_call(
        "jaxinfer_expert_mlp",
        jax.ShapeDtypeStruct((len(x), down.shape[1]), x.dtype),
        x,
        routing.weights,
        routing.rows,
        routing.tokens,
        routing.offsets,
        routing.sizes,
        *map(or_empty, gate_up),
        *map(or_empty, down),
        or_empty(gate_up_bias),
        or_empty(down_bias),
        activation=activation_number(activation),
        gated=np.int32(gated),
    )
