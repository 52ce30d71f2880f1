"""Evaluation of both papers: traces, what is simulated, replayed or sent live, recorded runs, reports.

Nothing that serves imports it. `simulation.py` is the simulated clock of both papers' simulators. `experts/` is for
CoServe, `elastic/` for OTAS: start at `workloads.py` (what comes when), then `simulator.py`.
"""
