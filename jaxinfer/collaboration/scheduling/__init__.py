"""CoServe's decisions: plain values in, plain values out.

`experts.py` says what there is, `profile.py` what it costs, `policy.py` which rules are followed. `scheduler.py` joins
assignment, arranging and splitting (paper section 4.2, in `assignment.py` and `queue.py`) with the experts' memory
(section 4.3, in `pool.py` and `eviction.py`). `placement.py` and `memory_search.py` decide before the start
(sections 4.1 and 4.4), `bounds.py` says how few loads there could be.
"""
