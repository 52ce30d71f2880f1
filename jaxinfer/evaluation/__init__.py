"""Evaluation of both papers: traces, simulations, replays, live runs, recorded runs and reports.

Nothing that serves imports it. `traces.py` reads and writes traces. `experts/` is for CoServe, `elastic/` for OTAS:
start at `workloads.py` (requests and their arrivals), then `simulator.py`.
"""
