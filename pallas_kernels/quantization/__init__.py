"""Rows that are quantised to int8, and their product with int8 weights (DeepSpeed Inference, section III-C)."""
