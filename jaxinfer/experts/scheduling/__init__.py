"""CoServe's decisions: plain values in, plain values out.

`experts.py` has the experts and rules, `profile.py` their costs, `policy.py` the policies. `scheduler.py` assigns,
arranges and splits requests (paper section 4.2; with `assignment.py` and `queue.py`), `expert_manager.py` manages the
experts' memory (section 4.3; with `pool.py` and `eviction.py`). `placement.py` decides before the start (section 4.1).
"""
