"""llama.cpp through llama-cpp-python's low-level API: `run_llama_cpp.py MODEL.gguf DTYPE THREADS`."""
# Runs in the peers' environment, which ours does not have.
# pyright: reportMissingImports=false

import sys
import time

import llama_cpp
import numpy as np
from worker import VOCAB, serve

MOST_SEQUENCES, CONTEXT = 8, 1024
ERROR = 4  # of llama.cpp's levels of messages


@llama_cpp.llama_log_callback
def log_errors(level, text, _):
    """Pass on errors alone."""
    if level == ERROR:
        sys.stderr.write(text.decode())


class LlamaCpp:
    """One context with eight sequences, each with a cache of its own; greedy from the logits."""

    version = f"llama-cpp-python {llama_cpp.__version__}"

    def __init__(self, file, dtype, threads):
        llama_cpp.llama_log_set(log_errors, None)
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        # llama-cpp-python 0.3.36 crashes on a CPU with AMX when it repacks q8_0 weights: leave them as they are.
        options.use_extra_bufts = dtype != "int8"
        model = llama_cpp.llama_model_load_from_file(file.encode(), options)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = MOST_SEQUENCES * CONTEXT, MOST_SEQUENCES, False
        params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = threads
        # The cache of every engine has the type of its activations.
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
        self.context = llama_cpp.llama_init_from_model(model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp made no context for {file}.")
        self.batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.running, self.length, self.last = 0, 0, []

    def _run(self, entries):
        """Decode (token, position, sequence, wants logits) entries; the greedy token of those that want logits."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, logits) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, logits
            batch.seq_id[i][0] = sequence
        if code := llama_cpp.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode failed with {code}.")
        rows = [i for i, entry in enumerate(entries) if entry[3]]
        return [
            int(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.context, i), (VOCAB,)).argmax()) for i in rows
        ]

    def _start(self, prompt, sequence):
        last = len(prompt) - 1
        return self._run([(token, i, sequence, i == last) for i, token in enumerate(prompt)])[0]

    def _clear(self):
        llama_cpp.llama_memory_clear(self.memory, True)
        self.running = 0

    def prefill(self, prompt):
        self._clear()
        start = time.perf_counter()
        self._start(prompt, 0)
        return time.perf_counter() - start

    def decode(self, prompts, steps):
        if self.running != len(prompts):
            self._clear()
            self.last = [self._start(prompt, sequence) for sequence, prompt in enumerate(prompts)]
            self.running, self.length = len(prompts), len(prompts[0])
        start = time.perf_counter()
        for _ in range(steps):
            self.last = self._run([(token, self.length, s, True) for s, token in enumerate(self.last)])
            self.length += 1
        return (time.perf_counter() - start) / steps

    def greedy(self, prompt, count):
        self._clear()
        tokens = [self._start(prompt, 0)]
        while len(tokens) < count:
            tokens += self._run([(tokens[-1], len(prompt) + len(tokens) - 1, 0, True)])
        return tokens


if __name__ == "__main__":
    serve(lambda: LlamaCpp(sys.argv[1], sys.argv[2], int(sys.argv[3])))
