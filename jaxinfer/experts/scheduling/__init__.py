"""CoServe's decisions: plain values in, plain values out.

`experts.py` says what there is, `profile.py` what it costs, `policy.py` which rules are followed. `scheduler.py`
assigns, arranges and splits requests (paper section 4.2; with `assignment.py` and `queue.py`), `expert_manager.py` has
the experts' memory (section 4.3; with `pool.py` and `eviction.py`). `placement.py` and `memory_search.py` decide before
the start (sections 4.1 and 4.4), `bounds.py` says how few loads there could be, `replay.py` does it all again.
"""
