"""llama.cpp on a model larger than memory: `run_llama_cpp_mmap.py MODEL.gguf THREADS BATCH PROMPT PASSES`.

Prints the same fields as `run_accelerate.py`.
"""
# Runs in the peers' environment, whose packages ours lacks.
# pyright: reportMissingImports=false

import json
import sys
import time

import llama_cpp
import run_llama_cpp
from streaming_prompts import prompts


def main(file, threads, batch, length, passes):
    llama_cpp.llama_log_set(run_llama_cpp.log_errors, None)
    llama_cpp.llama_backend_init()
    options = llama_cpp.llama_model_default_params()
    options.use_mmap = True
    options.use_extra_bufts = False  # other layouts of the weights would have to be in memory
    model = llama_cpp.llama_model_load_from_file(file.encode(), options)
    context = run_llama_cpp.Context(model, threads, sequences=batch, tokens=batch * (length + passes), unified=True)
    given, tokens, seconds = prompts(batch, length), [], []
    for at in range(passes):
        start = time.perf_counter()
        if at == 0:
            entries = [(t, i, s, i == length - 1) for s, prompt in enumerate(given) for i, t in enumerate(prompt)]
        else:
            entries = [(t, length + at - 1, s, True) for s, t in enumerate(tokens[-1])]
        tokens.append(context.run(entries))
        seconds.append(time.perf_counter() - start)
    version = f"llama-cpp-python {llama_cpp.__version__}"
    print(
        json.dumps({"version": version, "seconds": seconds, "tokens": [list(row) for row in zip(*tokens, strict=True)]})
    )


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
