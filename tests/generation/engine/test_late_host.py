"""A host that comes late for a step's results, as a slow reader of a stream does."""

import time

from jaxinfer.generation.params import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
SECONDS = 1.0  # far more than a step takes on the slowest machine


def test_passes_do_not_become_dear(llm):
    engine, costs = llm.engine, llm.engine.executor.costs
    (sequence,) = engine.prepare([5, 6, 7], PARAMS).sequences()
    engine.add([sequence])
    while costs.mean("decode", batch=4) is None:
        engine.step(1)
    known = costs.mean("decode", batch=4)
    for _ in range(3):
        engine.step(1)
        time.sleep(SECONDS)
    engine.step(1)  # launches a step, and collects the one before
    assert costs.mean("decode", batch=4) < known + SECONDS / 4
    engine.abort(sequence.request_id)
    engine.drain()
