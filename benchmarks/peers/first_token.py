"""A fresh process of a peer until its first token: `first_token.py llama.cpp|transformers MODEL TOKENIZER PROMPT`.

It prints the version and the greedy token. Imports are inside: each engine pays for its own alone.
"""
# Runs in the peers' environment, whose packages ours lacks.
# pyright: reportMissingImports=false

import json
import sys


def llama_cpp(model, tokenizer, prompt):
    import llama_cpp
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(tokenizer).encode(prompt).ids  # the GGUF file has no vocabulary
    llama = llama_cpp.Llama(model_path=model, n_ctx=1024, verbose=False)
    return f"llama-cpp-python {llama_cpp.__version__}", next(llama.generate(ids, temp=0.0))


def transformers(model, tokenizer, prompt):
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    ids = transformers.PreTrainedTokenizerFast(tokenizer_file=tokenizer)(prompt, return_tensors="pt").input_ids
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens = loaded.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
    return f"transformers {transformers.__version__}, torch {torch.__version__}", int(tokens[0, -1])


if __name__ == "__main__":
    engines = {"llama.cpp": llama_cpp, "transformers": transformers}
    version, token = engines[sys.argv[1]](*sys.argv[2:])
    print(json.dumps({"version": version, "token": token}), flush=True)
