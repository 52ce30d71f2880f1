"""The GPU benchmark, `python -m benchmarks.gpu`: kernels and generation against the limits of the device.

Start at `__main__.py`, then `cases.py` (every operation and shape with its bytes and FLOPs) and `timing.py` (how times
are measured). The parts: `numerics.py`, `ceilings.py`, `kernels.py`, `end_to_end.py`, `autotune.py`. `rendering.py`
makes the report.
"""
