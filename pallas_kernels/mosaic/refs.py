"""The type of the references that a kernel's body takes."""

from typing import Any

type Ref = Any
"""An array in GMEM or SMEM, or a part of one (`ref.at[...]`), or a barrier. JAX has no public type for all of them."""
