"""What a decode step costs the host: calls of our own functions, which do not depend on the machine."""

import sys

from jaxinfer import SamplingParams

MOST = 110
"""Calls in a decode step of one row. Those of `costs.py` do not count: a busy machine decides which times it keeps."""


def test_a_decode_step_makes_few_calls(llm):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    llm.generate([[1, 2, 3]], params)  # compiles
    engine = llm.engine
    (sequence,) = engine.prepare([1, 2, 3], params).sequences()
    engine.add([sequence])
    for _ in range(5):  # after the chunk, and after the first call of each program
        engine.step(1)
    before, calls = sequence.num_output_tokens, []

    def count(frame, event, _):
        name = frame.f_code.co_filename
        ours = ("/jaxinfer/" in name or "/pallas_kernels/" in name) and "site-packages" not in name
        if event == "call" and ours and not name.endswith("/costs.py"):
            calls.append(f"{name.rpartition('/')[2]}:{frame.f_code.co_qualname}")

    sys.setprofile(count)
    try:
        engine.step(1)
    finally:
        sys.setprofile(None)
        engine.abort(sequence.request_id)
        engine.drain()
    assert sequence.num_output_tokens == before + 1
    assert 50 < len(calls) <= MOST, sorted(calls)
