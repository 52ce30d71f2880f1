"""Mixtures of experts measured, a part a file: `python -m benchmarks.moe`."""
