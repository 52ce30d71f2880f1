"""OTAS's evaluation: queries, serving them on a simulated clock or live, and showing the results.

`workloads.py` draws queries, `measurements.py` measures a service for simulations, `simulator.py` serves on a simulated
clock, `live.py` sends queries to a service. `runs.py` records both; `tables.py`, `plots.py` and `report.py`
(matplotlib, extra `bench`) show runs, `dashboard.py` shows a service while it serves.
"""
