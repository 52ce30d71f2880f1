"""CoServe's decisions: plain values in, plain values out.

`experts.py` says what there is, `profile.py` what it costs, `policy.py` which rules are followed. `scheduler.py`
assigns, arranges and splits requests (paper section 4.2; with `assignment.py` and `queue.py`), `expert_manager.py` has
the experts' memory (section 4.3; with `pool.py` and `eviction.py`). `placement.py` decides before
the start (section 4.1).
"""
