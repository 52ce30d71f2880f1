"""The gated delta rule of single tokens as a Mosaic GPU kernel: a decode step reads and writes each state once."""

from jaxinfer.pallas_kernels.delta_rule.mosaic.step import delta_rule_step

__all__ = ["delta_rule_step"]
