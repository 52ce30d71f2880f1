"""Decisions on the next batch and its level: no thread, clock or array of JAX.

Start at `planner.py` (which levels earn the most), then `batching.py` (which queries share a batch).
"""
