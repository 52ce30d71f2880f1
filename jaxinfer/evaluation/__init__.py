"""Evaluation of the papers: traces, simulations, replays, live runs, recorded runs, reports and charts.

Nothing that serves imports it. `traces.py` reads and writes traces; `gantt.py` draws the schedules of a pipeline.
`experts/` is for CoServe, `elastic/` for OTAS: start at `workloads.py` (requests and their arrivals), then
`simulator.py`.
"""
