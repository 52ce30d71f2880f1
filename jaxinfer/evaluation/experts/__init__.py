"""CoServe's evaluation: traces of inputs, a simulator, what it forecasts, and decisions that are replayed.

`workloads.py` draws traces, `simulator.py` runs the decisions of `jaxinfer.experts.scheduling` on a simulated clock,
`forecast.py` says what a system would do, with `memory_search.py` (paper section 4.4) how its memory should be divided,
`replay.py` does recorded decisions again.
"""

from jaxinfer.evaluation.experts.simulator import SimulatedRun, Simulator
from jaxinfer.evaluation.experts.workloads import TraceRequest, draw_trace, read_trace

__all__ = ["SimulatedRun", "Simulator", "TraceRequest", "draw_trace", "read_trace"]
