"""Our own engine, with the same protocol: `run_jaxinfer.py MODEL_DIR DTYPE THREADS [MAX_BATCH CONTEXT [remember]]`.

With `remember` it can take prompts for computed, which prefix caching is for.
"""

import functools
import sys
import time
from typing import ClassVar

import jax
from worker import serve

from jaxinfer import LLM, SamplingParams
from jaxinfer.generation.engine.scheduler import DecoderScheduler

QUANTISED = ("int8", "int4")
OUTPUT = 512  # tokens that a request may have
ROOT = ("root", None)  # what a prompt without an adapter begins with in the tree of cached prefixes


class Jaxinfer:
    """`LLM`'s engine, driven step by step: scheduling, sampling and copying to the host are part of every figure."""

    version = "jaxinfer"
    ways: ClassVar = [{"batch": 64}]

    def __init__(self, folder, dtype, max_batch=8, context=1024, *, prefix_caching=False):
        quantize, kv_dtype = (dtype, "bfloat16") if dtype in QUANTISED else (None, None)  # llama.cpp's has 16 bits, too

        def load(max_batch, context):
            # Rounds repeat their prompts: with prefix caching all but the first round would find them cached.
            options = {"max_batch": max_batch, "context": context, "prefix_caching": prefix_caching}
            return LLM(folder, dtype="float32" if quantize else dtype, quantize=quantize, kv_dtype=kv_dtype, **options)

        self.load, self.sizes, self.wide = load, (max_batch, context), {}
        self.running = []

    @functools.cached_property
    def llm(self):
        """The model for all figures but throughput."""
        return self.load(*self.sizes)

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

    def _step_until(self, sequences, length, passes=1):
        """Step until all have so many tokens. Raises RuntimeError if one ends before."""
        while short := [sequence for sequence in sequences if len(sequence.token_ids) < length]:
            if short[0].finish_reason is not None:
                ended = f"{len(short[0].token_ids)} of {length} tokens: {short[0].error or short[0].finish_reason}"
                raise RuntimeError(f"a request ended after {ended}; {OUTPUT} is the most it generates")
            self.engine.step(passes)

    def prefill(self, prompt):
        self._stop(self.running)
        self.running = []
        sequences = self._start([prompt], 2)
        start = time.perf_counter()
        self._step_until(sequences, len(prompt) + 1)
        seconds = time.perf_counter() - start
        self._stop(sequences)
        return seconds

    def decode(self, prompts, steps):
        length = len(prompts[0])
        if len(self.running) != len(prompts) or self.running[0].num_prompt_tokens != length:
            self._stop(self.running)
            self.running = self._start(prompts, OUTPUT)
            self._step_until(self.running, length + 1)
        self.engine.step(steps)  # collects the step that ended while others had their turn: its tokens took no time
        produced, start = len(self.running[0].token_ids), time.perf_counter()
        self._step_until(self.running[:1], produced + steps, steps)
        return (time.perf_counter() - start) / (len(self.running[0].token_ids) - produced)

    def trace(self, prompts, steps, folder):
        """Decode under JAX's profiler, which writes into the folder."""
        with jax.profiler.trace(folder):
            self.decode(prompts, steps)

    def remember(self, prompt):
        """Have the engine find the prompt in its cache, as if it were computed: its keys and values are all 0.

        Decoding after it reads as much as after a prefill.
        """
        scheduler = self.engine.scheduler
        assert isinstance(scheduler, DecoderScheduler)
        pool, node = scheduler.pages, ROOT
        size = pool.page_size
        pages = pool.allocate(len(prompt) // size)
        for index, page in enumerate(pages):
            node = pool.insert(node, prompt[index * size : (index + 1) * size], page)
        pool.release(pages)

    def greedy(self, prompt, count):
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        return self.llm.generate([prompt], params)[0].outputs[0].token_ids

    def close(self):
        """Wait for the step in flight: a process that ends meanwhile would abort."""
        for llm in (*self.wide.values(), *([self.llm] if "llm" in vars(self) else [])):
            llm.close()

    def throughput(self, prompts, outputs, watch, *, batch):
        """Generate for all prompts at once. The only way is never stopped."""
        if batch not in self.wide:
            self.wide[batch] = self.load(batch, 512)
            self.wide[batch].engine.compile_ahead()
        params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in outputs]
        watch.start()
        return [output.outputs[0].token_ids for output in self.wide[batch].generate(prompts, params)]


def main(folder, dtype, threads, max_batch="8", context="1024", *options):
    sizes = int(max_batch), int(context)
    engine = serve(lambda: Jaxinfer(folder, dtype, *sizes, prefix_caching="remember" in options))
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
