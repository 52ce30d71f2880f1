"""Our own engine, with the same protocol: `run_jaxinfer.py MODEL_DIR DTYPE THREADS`."""

import functools
import sys
import time
from typing import ClassVar

from worker import serve

from jaxinfer import LLM, SamplingParams


class Jaxinfer:
    """`LLM`'s engine, driven step by step: scheduling, sampling and copying to the host are part of every figure."""

    version = "jaxinfer"
    ways: ClassVar = [{"batch": 64}]

    def __init__(self, folder, dtype, *, int8):
        def load(max_batch, context):
            # Rounds repeat their prompts: with prefix caching all but the first round would find them cached.
            options = {"max_batch": max_batch, "context": context, "prefix_caching": False}
            return LLM(folder, dtype=dtype, quantize="int8" if int8 else None, **options)

        self.load, self.wide = load, {}
        self.running = []

    @functools.cached_property
    def llm(self):
        """The model for all figures but throughput."""
        return self.load(8, 1024)

    @property
    def engine(self):
        return self.llm.engine

    def _start(self, prompts, limit):
        params = SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True)
        requests = [self.engine.prepare(prompt, params) for prompt in prompts]
        sequences = [sequence for request in requests for sequence in request.sequences()]
        self.engine.add(sequences)
        return sequences

    def _stop(self, sequences):
        for sequence in sequences:
            self.engine.abort(sequence.request_id)

    def prefill(self, prompt):
        self._stop(self.running)
        self.running = []
        sequences = self._start([prompt], 2)
        start = time.perf_counter()
        while len(sequences[0].token_ids) == len(prompt):
            self.engine.step()
        seconds = time.perf_counter() - start
        self._stop(sequences)
        return seconds

    def decode(self, prompts, steps):
        if len(self.running) != len(prompts):
            self._stop(self.running)
            self.running = self._start(prompts, 512)
            while any(len(s.token_ids) == s.num_prompt_tokens for s in self.running):
                self.engine.step()
        produced, start = len(self.running[0].token_ids), time.perf_counter()
        while len(self.running[0].token_ids) < produced + steps:
            self.engine.step(steps)
        return (time.perf_counter() - start) / (len(self.running[0].token_ids) - produced)

    def greedy(self, prompt, count):
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        return self.llm.generate([prompt], params)[0].outputs[0].token_ids

    def throughput(self, prompts, outputs, watch, *, batch):
        """Generate for all prompts at once. The only way is never stopped."""
        if batch not in self.wide:
            self.wide[batch] = self.load(batch, 512)
            self.wide[batch].engine.compile_ahead()
        params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in outputs]
        watch.start()
        return [output.outputs[0].token_ids for output in self.wide[batch].generate(prompts, params)]


if __name__ == "__main__":
    kind = sys.argv[2]
    serve(lambda: Jaxinfer(sys.argv[1], "float32" if kind == "int8" else kind, int8=kind == "int8"))
