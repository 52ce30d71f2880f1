"""The GPU benchmark, `python -m benchmarks.gpu`: kernels and generation against what the device can do.

Start at `__main__.py`, then `cases.py` (every operation and shape with its bytes and FLOPs) and `timing.py` (how a time
is taken). The parts: `numerics.py`, `ceilings.py`, `kernels.py`, `end_to_end.py`, `autotune.py`; `rendering.py` draws.
"""
