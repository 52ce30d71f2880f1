"""Evaluation of both papers: traces, what is simulated, replayed or sent live, recorded runs, reports.

Nothing that serves imports it. `traces.py` has traces on disk, `simulation.py` the clock of both simulators.
`experts/` is for CoServe, `elastic/` for OTAS: start at `workloads.py` (what comes when), then `simulator.py`.
"""
