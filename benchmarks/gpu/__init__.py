"""The GPU benchmark, `python -m benchmarks.gpu`: kernels and generation against the limits of the device.

Start at `__main__.py`, then `supervisor.py`: a parent without JAX runs every stage of `stages.py` in a worker
(`worker.py`). A stage is a module that lists its items: `machine.py`, `numerics.py`, `demo.py`, `ceilings.py`,
`kernels.py`, `autotune.py`, `end_to_end.py`, `peers.py`, `streaming.py`. `../kernel_cases.py` has every operation with
its arguments, bytes and FLOPs, `cases.py` the shapes that are timed and checked, and `timing.py` measures times. All
write rows (`rows.py`), from which `verdicts.py` and `rendering.py` make the report.
"""
