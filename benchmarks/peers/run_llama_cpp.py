"""llama.cpp through llama-cpp-python's low-level API: `run_llama_cpp.py MODEL.gguf DTYPE THREADS`."""
# Runs in the peers' environment, whose packages ours lacks.
# pyright: reportMissingImports=false

import sys
from typing import ClassVar

import llama_cpp
from llama_family import BATCH_TOKENS, CONTEXT, MAX_SEQUENCES, BaseContext, LlamaFamily, probe, repacking_works
from worker import serve

ERROR = 4  # one of llama.cpp's log levels


@llama_cpp.llama_log_callback
def log_errors(level, text, _):
    """Forward only errors."""
    if level == ERROR:
        sys.stderr.write(text.decode())


class Context(BaseContext):
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
        context = llama_cpp.llama_init_from_model(model, params)
        if not context:
            raise RuntimeError(f"llama.cpp could not create a context of {tokens} tokens.")
        super().__init__(llama_cpp, context, llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model)))
        self.memory = llama_cpp.llama_get_memory(context)

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
        """The tokens to run next, at most `room`: the rest of the prompt, or the newest token."""
        ids = self.prompt[self.computed :][:room] or self.produced[-1:]
        first, self.computed = self.computed, self.computed + len(ids)
        last = len(self.prompt) - 1
        return [(token, at, sequence, at >= last) for at, token in enumerate(ids, first)]


class LlamaCpp(LlamaFamily):
    """llama.cpp with its own layout of the weights where that runs.

    On a CPU with AMX llama-cpp-python 0.3.36 crashes with it, unless it is built without (requirements.txt).
    """

    ways: ClassVar = [{"batch": batch} for batch in (64, 32, 16)]

    def __init__(self, file, threads, *, repack):
        llama_cpp.llama_log_set(log_errors, None)
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        options.use_extra_bufts = repack
        self.version = f"llama-cpp-python {llama_cpp.__version__}{'' if repack else ', weights as stored'}"
        self.model, self.threads = llama_cpp.llama_model_load_from_file(file.encode(), options), threads
        if not self.model:
            raise RuntimeError(f"llama.cpp could not load {file}.")
        tokens = MAX_SEQUENCES * CONTEXT
        super().__init__(Context(self.model, threads, sequences=MAX_SEQUENCES, tokens=tokens, unified=False))
        self.pools = {}

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
        """An empty context for `batch` sequences, kept from call to call."""
        if (batch, longest) not in self.pools:
            for pool in self.pools.values():
                pool.free()
            made = Context(self.model, self.threads, sequences=batch, tokens=batch * longest, unified=True)
            self.pools = {(batch, longest): made}
        self.pools[batch, longest].clear()
        return self.pools[batch, longest]


def main(file, dtype, threads, *probing):
    if probing:
        probe(LlamaCpp(file, int(threads), repack=True))
    else:
        repack = repacking_works(__file__, file, dtype, threads)
        serve(lambda: LlamaCpp(file, int(threads), repack=repack))


if __name__ == "__main__":
    main(*sys.argv[1:])
