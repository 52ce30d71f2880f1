"""CoServe: the paper's evaluation on a simulated clock, and with real experts.

`machines.py` and `workload.py` are data: the costs of hardware, and the inputs. `simulated.py` makes the paper's
figures from them. `drift.py` compares evictions while popularity changes.
"""
