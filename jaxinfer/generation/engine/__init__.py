"""The loop: requests, queues, batches and results; no arrays of JAX.

Start at `engine.py` (one step), then `scheduler.py` (what it runs) and `output.py` (its results); `protocols.py`
says what the engine asks of its parts.
"""
