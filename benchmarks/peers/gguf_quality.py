"""Quantisation by llama.cpp, and the bits that it needs for texts: `gguf_quality.py F32.gguf WINDOWS.json TYPE...`.

Writes TYPE.gguf beside the first file. WINDOWS.json has token ids and how many of them are context alone, for each
window; a line is printed for each type: its bits.
"""
# Runs in the peers' environment, whose packages ours lacks.
# pyright: reportMissingImports=false

import json
import math
import pathlib
import sys

import llama_cpp
import numpy as np
from quantise_gguf import quantise
from run_llama_cpp import Context, log_errors

TYPES = {"F32": "ALL_F32", "Q8_0": "MOSTLY_Q8_0", "Q4_K": "MOSTLY_Q4_K_M"}
THREADS = 2


def write(source, target, type_):
    """Write a file of a type. Rows that have no whole blocks of Q4_K are in Q8_0."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = getattr(llama_cpp, f"LLAMA_FTYPE_{TYPES[type_]}"), THREADS
    if type_ == "Q4_K":
        rows = llama_cpp.llama_model_tensor_override(b"ffn_down", llama_cpp.GGML_TYPE_Q8_0)
        params.tt_overrides = (llama_cpp.llama_model_tensor_override * 2)(rows, (None, 0))
    quantise(pathlib.Path(source), target, params)


def bits(file, windows):
    options = llama_cpp.llama_model_default_params()
    options.use_extra_bufts = False  # llama-cpp-python 0.3.36 crashes when it repacks q8_0 weights on a CPU with AMX
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), options)
    size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    context = Context(model, THREADS, sequences=1, tokens=1024, unified=False)
    return sum(nats(context, size, ids, skip) for ids, skip in windows) / math.log(2)


def nats(context, size, ids, skip):
    """The negative log probability of the tokens from `skip` on."""
    context.clear()
    total = 0.0
    for start in range(0, len(ids), llama_cpp.llama_n_batch(context.context)):
        part = ids[start : start + llama_cpp.llama_n_batch(context.context)]
        context.decode([(token, at, 0, True) for at, token in enumerate(part, start)])
        rows = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context.context), (len(part), size))
        for at, row in enumerate(rows[: len(ids) - 1 - start], start):
            if at + 1 >= skip:
                total += np.logaddexp.reduce(row.astype(np.float64)) - row[ids[at + 1]]
    return total


def main(source, windows, types):
    llama_cpp.llama_log_set(log_errors, None)
    llama_cpp.llama_backend_init()
    windows = json.loads(pathlib.Path(windows).read_text())
    for type_ in types:
        target = pathlib.Path(source).with_name(f"{type_}.gguf")
        write(source, target, type_)
        version = f"llama-cpp-python {llama_cpp.__version__}"
        print(json.dumps({"type": type_, "bits": float(bits(target, windows)), "version": version}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
