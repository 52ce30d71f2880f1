"""CoServe's evaluation: traces of inputs, a simulator, forecasts, and replayed decisions.

`workloads.py` draws traces, `simulator.py` runs the decisions of `jaxinfer.experts.scheduling` on a simulated clock,
`forecast.py` predicts what a system would do and, with `memory_search.py` (paper section 4.4), how to divide its
memory, `replay.py` replays recorded decisions.
"""

from jaxinfer.evaluation.experts.simulator import SimulatedRun, Simulator
from jaxinfer.evaluation.experts.workloads import TraceRequest, draw_trace, read_trace

__all__ = ["SimulatedRun", "Simulator", "TraceRequest", "draw_trace", "read_trace"]
