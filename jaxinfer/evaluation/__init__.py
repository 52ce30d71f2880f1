"""Evaluation of the papers and of servers: traces, simulations, live runs, recorded runs, reports and charts.

Nothing that serves imports it. `traces.py` reads and writes traces; `gantt.py` draws the schedules of a pipeline.
`serving/` sends loads to HTTP servers; `generation/` runs them on engines of this process, real or simulated.
`experts/` is for CoServe, `elastic/` for OTAS: start at `workloads.py` (requests and their arrivals), then
`simulator.py`.
"""
