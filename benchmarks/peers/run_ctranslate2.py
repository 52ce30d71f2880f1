"""CTranslate2: `run_ctranslate2.py MODEL_DIR COMPUTE_TYPE THREADS`."""
# Runs in the peers' environment, whose packages ours lacks.
# pyright: reportMissingImports=false

import sys
import time

import ctranslate2
from worker import serve


def words(prompts):
    return [[f"t{i}" for i in prompt] for prompt in prompts]


def token_ids(result):
    return [int(token[1:]) for token in result.sequences[0]]


class CTranslate2:
    """`Generator.generate_batch`, greedy; a callback records the time of every step."""

    version = f"ctranslate2 {ctranslate2.__version__}"

    def __init__(self, folder, compute_type, threads):
        def load(workers):
            return ctranslate2.Generator(
                folder,
                device="cpu",
                compute_type=compute_type,
                inter_threads=workers,
                intra_threads=threads // workers,
            )

        self.load, self.generators = load, {1: load(1)}
        # One batch at a time on all threads, or one batch per thread.
        self.ways = [{"batch": batch, "workers": workers} for batch in (32, 16) for workers in sorted({1, threads})]

    def _generate(self, prompts, count, callback=None, static=None):
        results = self.generators[1].generate_batch(
            words(prompts),
            max_length=count,
            min_length=count,
            sampling_topk=1,
            include_prompt_in_result=False,
            static_prompt=static,
            callback=callback,
        )
        return [token_ids(result) for result in results]

    def prefill(self, prompt):
        start = time.perf_counter()
        self._generate([prompt], 1)
        return time.perf_counter() - start

    def decode(self, prompts, steps):
        # Calls keep no state, so the prompt that all rows share is a static prompt: computed once, not timed.
        shared, times = [f"t{i}" for i in prompts[0][:-1]], []

        def record(result):
            if result.batch_id == 0:
                times.append(time.perf_counter())
            return False

        self._generate([prompt[-1:] for prompt in prompts], steps + 1, record, shared)
        return (times[-1] - times[0]) / (len(times) - 1)

    def greedy(self, prompt, count):
        return self._generate([prompt], count)[0]

    def throughput(self, prompts, outputs, watch, *, batch, workers):
        """Generate in batches of prompts of similar length, all queued at once, the longest first.

        A batch runs its prompts together up to the length of the shortest, and the rest of them token by token.
        """
        if workers not in self.generators:
            self.generators[workers] = self.load(workers)
        rows = sorted(range(len(prompts)), key=lambda row: -len(prompts[row]))
        groups = [rows[at : at + batch] for at in range(0, len(rows), batch)]
        watch.start()
        queued = [
            self._queue(
                self.generators[workers], [prompts[row] for row in group], [outputs[row] for row in group], watch
            )
            for group in groups
        ]
        tokens = [[] for _ in prompts]
        for group, results in zip(groups, queued, strict=True):
            for row, result in zip(group, results, strict=True):
                tokens[row] = token_ids(result.result())
        watch.check()
        return tokens

    @staticmethod
    def _queue(generator, prompts, outputs, watch):
        """Queue one batch asynchronously; each row leaves it after its own number of tokens, or over the limit."""
        left = list(outputs)

        def complete(step):
            left[step.batch_id] -= 1
            return left[step.batch_id] == 0 or watch.is_over()

        return generator.generate_batch(
            words(prompts),
            max_length=max(outputs),
            min_length=max(outputs),
            sampling_topk=1,
            include_prompt_in_result=False,
            callback=complete,
            asynchronous=True,
        )


if __name__ == "__main__":
    serve(lambda: CTranslate2(sys.argv[1], sys.argv[2], int(sys.argv[3])))
