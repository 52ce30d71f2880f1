"""The GPU benchmark, `python -m benchmarks.gpu`: kernels and generation against the limits of the device.

Start at `__main__.py`, then `../kernel_cases.py` (every operation with its arguments, bytes and FLOPs), `cases.py`
(which shapes are timed and checked) and `timing.py` (how times are measured). The parts: `numerics.py`, `ceilings.py`,
`kernels.py`, `end_to_end.py`, `autotune.py`. `rendering.py` makes the report.
"""
