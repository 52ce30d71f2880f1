"""Hugging Face accelerate with all layers on disk: `run_accelerate.py HF_DIR OFFLOAD_DIR THREADS BATCH PROMPT PASSES`.

Prints one JSON object: the greedy tokens of each sequence, and the seconds of each pass through the model, the first of
them over the prompts.
"""
# Runs in the peers' environment, whose packages ours lacks.
# pyright: reportMissingImports=false

import json
import pathlib
import sys
import time

import accelerate
import torch
import transformers
from streaming_prompts import prompts


def main(hf, offload, threads, batch, length, passes):
    torch.set_num_threads(threads)
    layers = json.loads((pathlib.Path(hf) / "config.json").read_text())["num_hidden_layers"]
    devices = {f"model.layers.{i}": "disk" for i in range(layers)}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        hf,
        dtype=torch.float32,
        device_map={"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
        | devices,
        offload_folder=offload,
    )
    ids = torch.tensor(prompts(batch, length))
    cache, tokens, seconds = None, [], []
    with torch.inference_mode():
        for _ in range(passes):
            start = time.perf_counter()
            out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
            tokens.append(ids[:, 0].tolist())
            seconds.append(time.perf_counter() - start)
    version = f"accelerate {accelerate.__version__}, transformers {transformers.__version__}"
    print(
        json.dumps({"version": version, "seconds": seconds, "tokens": [list(row) for row in zip(*tokens, strict=True)]})
    )


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
