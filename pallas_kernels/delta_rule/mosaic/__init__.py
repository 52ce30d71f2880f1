"""The gated delta rule as Mosaic GPU kernels: decode steps (`step.py`), and prompts (`prompt.py`)."""

from jaxinfer.pallas_kernels.delta_rule.mosaic.prompt import gated_delta_rule
from jaxinfer.pallas_kernels.delta_rule.mosaic.step import delta_rule_step

__all__ = ["delta_rule_step", "gated_delta_rule"]
