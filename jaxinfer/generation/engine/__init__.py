"""The loop: requests, queues, batches, and what comes of them; no arrays of JAX.

Start at `engine.py` (one step), then `scheduler.py` (what it runs) and `output.py` (what comes of it); `protocols.py`
says what the engine asks of its parts.
"""
