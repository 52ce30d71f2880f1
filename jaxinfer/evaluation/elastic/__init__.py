"""OTAS's evaluation: queries, serving them on a simulated clock or live, and what is shown of it.

`workloads.py` draws queries, `measurements.py` has what a simulation needs, `simulator.py` serves on a simulated clock,
`live.py` sends queries to a service. `runs.py` records both; `tables.py`, `plots.py` and `report.py` (matplotlib, extra
`bench`) show runs, `dashboard.py` a service while it serves.
"""
