"""llama.cpp through llama-cpp-python's low-level API: `run_llama_cpp.py MODEL.gguf DTYPE THREADS`."""
# Runs in the peers' environment, whose packages ours lacks.
# pyright: reportMissingImports=false

import sys
import time
from typing import ClassVar

import llama_cpp
import numpy as np
from worker import serve

MAX_SEQUENCES, CONTEXT = 8, 1024
BATCH_TOKENS = 512  # per llama_decode
ERROR = 4  # one of llama.cpp's log levels


@llama_cpp.llama_log_callback
def log_errors(level, text, _):
    """Forward only errors."""
    if level == ERROR:
        sys.stderr.write(text.decode())


class Context:
    """A llama_context and its batch.

    `unified`: whether the sequences share one cache of `tokens`; otherwise each has an equal part of it.
    """

    def __init__(self, model, threads, *, sequences, tokens, unified):
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = tokens, sequences, unified
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_threads = params.n_threads_batch = threads
        # The cache of every engine has the type of its activations.
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
        self.context = llama_cpp.llama_init_from_model(model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp could not create a context of {tokens} tokens.")
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        self.memory = llama_cpp.llama_get_memory(self.context)

    def decode(self, entries):
        """Decode entries of (token, position, sequence, wants logits)."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, logits) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, logits
            batch.seq_id[i][0] = sequence
        if code := llama_cpp.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode failed with {code}.")

    def run(self, entries):
        """Decode entries, and return the greedy tokens of those that want logits."""
        self.decode(entries)
        rows = [i for i, entry in enumerate(entries) if entry[3]]
        return [
            int(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.context, i), (self.vocab,)).argmax())
            for i in rows
        ]

    def start(self, prompt, sequence):
        """Run a prompt and return its first new token."""
        last = len(prompt) - 1
        return self.run([(token, i, sequence, i == last) for i, token in enumerate(prompt)])[0]

    def clear(self):
        llama_cpp.llama_memory_clear(self.memory, True)

    def forget(self, sequence):
        """Free the cache of one sequence."""
        llama_cpp.llama_memory_seq_rm(self.memory, sequence, -1, -1)

    def free(self):
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)


class Request:
    """A prompt in a sequence of the context, its number of computed tokens, and its output."""

    def __init__(self, prompt, count, produced):
        self.prompt, self.count, self.produced, self.computed = prompt, count, produced, 0

    def entries(self, sequence, room):
        """Return the tokens to run next, at most `room`: the rest of the prompt, or the newest token."""
        ids = self.prompt[self.computed :][:room] or self.produced[-1:]
        first, self.computed = self.computed, self.computed + len(ids)
        last = len(self.prompt) - 1
        return [(token, at, sequence, at >= last) for at, token in enumerate(ids, first)]


class LlamaCpp:
    """One context with eight sequences, each with its own cache; greedy from the logits."""

    version = f"llama-cpp-python {llama_cpp.__version__}"
    ways: ClassVar = [{"batch": batch} for batch in (64, 32, 16)]

    def __init__(self, file, dtype, threads):
        llama_cpp.llama_log_set(log_errors, None)
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        # llama-cpp-python 0.3.36 crashes on a CPU with AMX when it repacks q8_0 weights: leave them as they are.
        options.use_extra_bufts = dtype != "int8"
        self.model, self.threads = llama_cpp.llama_model_load_from_file(file.encode(), options), threads
        if not self.model:
            raise RuntimeError(f"llama.cpp could not load {file}.")
        self.context = Context(
            self.model, threads, sequences=MAX_SEQUENCES, tokens=MAX_SEQUENCES * CONTEXT, unified=False
        )
        self.running, self.length, self.last = 0, 0, []
        self.pools = {}

    def _clear(self):
        self.context.clear()
        self.running = 0

    def prefill(self, prompt):
        self._clear()
        start = time.perf_counter()
        self.context.start(prompt, 0)
        return time.perf_counter() - start

    def decode(self, prompts, steps):
        if self.running != len(prompts):
            self._clear()
            self.last = [self.context.start(prompt, sequence) for sequence, prompt in enumerate(prompts)]
            self.running, self.length = len(prompts), len(prompts[0])
        start = time.perf_counter()
        for _ in range(steps):
            self.last = self.context.run([(token, self.length, s, True) for s, token in enumerate(self.last)])
            self.length += 1
        return (time.perf_counter() - start) / steps

    def greedy(self, prompt, count):
        self._clear()
        tokens = [self.context.start(prompt, 0)]
        while len(tokens) < count:
            tokens += self.context.run([(tokens[-1], len(prompt) + len(tokens) - 1, 0, True)])
        return tokens

    def throughput(self, prompts, outputs, watch, *, batch):
        """Batch continuously as llama-server does: newest tokens first, then prompts while the batch has room.

        The sequences share one cache: with separate caches, llama.cpp runs sequences with different numbers of new
        tokens in separate passes, each of which reads all weights.
        """
        longest = max(len(prompt) + count for prompt, count in zip(prompts, outputs, strict=True))
        context = self._pool(batch, longest)
        tokens = [[] for _ in prompts]
        waiting = [Request(*request) for request in zip(prompts, outputs, tokens, strict=True)][::-1]
        running = {}  # sequence -> Request
        watch.start()
        while waiting or running:
            watch.check()
            for sequence in range(batch):
                if sequence not in running and waiting:
                    running[sequence] = waiting.pop()
            self._advance(context, running)
        return tokens

    def _advance(self, context, running):
        """Run one batch, and remove the requests that are finished."""
        order = sorted(running, key=lambda sequence: not running[sequence].produced)  # those with output first
        entries = []
        for sequence in order:
            entries += running[sequence].entries(sequence, BATCH_TOKENS - len(entries))
        for sequence, token in zip([entry[2] for entry in entries if entry[3]], context.run(entries), strict=True):
            request = running[sequence]
            request.produced.append(token)
            if len(request.produced) == request.count:
                context.forget(sequence)
                del running[sequence]

    def _pool(self, batch, longest):
        """Return an empty context for `batch` sequences, kept from call to call."""
        if (batch, longest) not in self.pools:
            for pool in self.pools.values():
                pool.free()
            made = Context(self.model, self.threads, sequences=batch, tokens=batch * longest, unified=True)
            self.pools = {(batch, longest): made}
        self.pools[batch, longest].clear()
        return self.pools[batch, longest]


if __name__ == "__main__":
    serve(lambda: LlamaCpp(sys.argv[1], sys.argv[2], int(sys.argv[3])))
