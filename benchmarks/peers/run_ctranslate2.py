"""CTranslate2: `run_ctranslate2.py MODEL_DIR COMPUTE_TYPE THREADS`."""
# Runs in the peers' environment, which ours does not have.
# pyright: reportMissingImports=false

import sys
import time

import ctranslate2
from worker import serve


class CTranslate2:
    """`Generator.generate_batch`, greedy; a callback notes the time of every step."""

    version = f"ctranslate2 {ctranslate2.__version__}"

    def __init__(self, folder, compute_type, threads):
        self.generator = ctranslate2.Generator(
            folder, device="cpu", compute_type=compute_type, inter_threads=1, intra_threads=threads
        )

    def _generate(self, prompts, count, callback=None, static=None):
        results = self.generator.generate_batch(
            [[f"t{i}" for i in prompt] for prompt in prompts],
            max_length=count,
            min_length=count,
            sampling_topk=1,
            include_prompt_in_result=False,
            static_prompt=static,
            callback=callback,
        )
        return [[int(token[1:]) for token in result.sequences[0]] for result in results]

    def prefill(self, prompt):
        start = time.perf_counter()
        self._generate([prompt], 1)
        return time.perf_counter() - start

    def decode(self, prompts, steps):
        # Every call begins anew, so the prompt that all rows share is computed once, kept, and not timed.
        shared, times = [f"t{i}" for i in prompts[0][:-1]], []

        def note(result):
            if result.batch_id == 0:
                times.append(time.perf_counter())
            return False

        self._generate([prompt[-1:] for prompt in prompts], steps + 1, note, shared)
        return (times[-1] - times[0]) / (len(times) - 1)

    def greedy(self, prompt, count):
        return self._generate([prompt], count)[0]


if __name__ == "__main__":
    serve(lambda: CTranslate2(sys.argv[1], sys.argv[2], int(sys.argv[3])))
