"""CoServe: the paper's evaluation on a simulated clock, and with real experts.

`machines.py` and `workload.py` are data: what hardware costs, and what comes to it. `simulated.py` makes the paper's
figures from them.
"""
