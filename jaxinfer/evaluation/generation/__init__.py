"""A load on an engine, replayed in this process: on a real engine, or on a simulated one under a virtual clock.

The simulated engine is the real one, with its scheduler, its prefix cache and its preemption. Only its device side
differs: it tells how long a step takes. Start at `replay.py`, which runs a load; `simulator.py` builds the simulated
engine, `step_times.py` has the times of its steps, and `fleet.py` sizes a fleet.
"""
