"""Pipelines measured, a part a file: `python -m benchmarks.pipeline`."""
