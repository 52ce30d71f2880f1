"""ik_llama.cpp through ik-llama-cpp-python's low-level API: `run_ik_llama_cpp.py MODEL.gguf DTYPE THREADS`."""
# Runs in the peers' environment, whose packages ours lacks.
# pyright: reportMissingImports=false

import contextlib
import os
import sys
from typing import ClassVar

import ik_llama_cpp
from ik_llama_cpp import _ctypes_api as api
from llama_family import BATCH_TOKENS, CONTEXT, MAX_SEQUENCES, BaseContext, LlamaFamily, probe, repacking_works
from worker import serve


@contextlib.contextmanager
def quiet():
    """Drop what the library prints: a description of the model."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        for file in (kept, nothing):
            os.close(file)


class Context(BaseContext):
    """A llama_context of eight sequences, which share one cache, and its batch.

    The cache is float16, the library's default. Its flash attention aborts on batches of several sequences.
    """

    def __init__(self, model, threads):
        params = api.llama_context_default_params()
        params.n_ctx, params.n_seq_max = MAX_SEQUENCES * CONTEXT, MAX_SEQUENCES
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn = False
        context = api.llama_init_from_model(model, params)
        if not context:
            raise RuntimeError("ik_llama.cpp could not create a context.")
        super().__init__(api, context, api.llama_vocab_n_tokens(api.llama_model_get_vocab(model)))

    def clear(self):
        api.llama_kv_cache_clear(self.context)


class IkLlamaCpp(LlamaFamily):
    """ik_llama.cpp with its own layout of the weights where that runs."""

    ways: ClassVar = []  # not compared under many requests

    def __init__(self, file, dtype, threads, *, repack):
        options = api.llama_model_default_params()
        options.repack_tensors = repack and dtype != "float32"  # which would copy the file into memory all the same
        self.version = f"ik-llama-cpp-python {ik_llama_cpp.__version__}{'' if repack else ', weights as stored'}"
        with quiet():
            api.llama_backend_init()
            model = api.llama_model_load_from_file(file.encode(), options)
            context = Context(model, threads) if model else None
        if context is None:
            raise RuntimeError(f"ik_llama.cpp could not load {file}.")
        super().__init__(context)


def main(file, dtype, threads, *probing):
    if probing:
        probe(IkLlamaCpp(file, dtype, int(threads), repack=True))
    else:
        repack = repacking_works(__file__, file, dtype, threads)
        serve(lambda: IkLlamaCpp(file, dtype, int(threads), repack=repack))


if __name__ == "__main__":
    main(*sys.argv[1:])
