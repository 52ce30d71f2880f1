"""Quantisation by llama.cpp: `quantise_gguf.py F32.gguf TYPE...` writes TYPE.gguf beside the first file.

All matrices have the type, the head and the embeddings too, unless their rows have no whole blocks of it.
"""
# Runs in the peers' environment, whose packages ours lacks.
# pyright: reportMissingImports=false

import ctypes
import os
import pathlib
import sys

import llama_cpp
from run_llama_cpp import log_errors

TYPES = {"q4_0": "MOSTLY_Q4_0", "q4_K": "MOSTLY_Q4_K_S"}


def quantise(source, target, params):
    """Write `target`; nothing is left of an interrupted run."""
    part = target.with_suffix(".part")
    if code := llama_cpp.llama_model_quantize(str(source).encode(), str(part).encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp could not quantise {source} to {target.name}: {code}.")
    part.rename(target)


def main(source, types):
    llama_cpp.llama_log_set(log_errors, None)
    llama_cpp.llama_backend_init()
    for type_ in types:
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{TYPES[type_]}")
        params.nthread, params.pure = os.cpu_count(), True
        quantise(source, source.with_name(f"{type_}.gguf"), params)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2:])
