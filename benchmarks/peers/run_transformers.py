"""Hugging Face transformers on torch: `run_transformers.py MODEL_DIR DTYPE THREADS [EXPERTS]`.

EXPERTS: its way to compute a mixture of experts while it decodes, "eager", "batched_mm" or "grouped_mm".
"""
# Runs in the peers' environment, whose packages ours lacks.
# pyright: reportMissingImports=false

import sys
import time
from typing import ClassVar

import torch
import transformers
from worker import serve


class Transformers:
    """Eager forward passes over a dynamic cache, greedy."""

    version = f"transformers {transformers.__version__}, torch {torch.__version__}"
    ways: ClassVar = [{"batch": batch, "order": order} for batch in (64, 32, 16, 8) for order in ("output", "prompt")]

    def __init__(self, folder, dtype, threads, experts=None):
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self.model, self.experts = model.eval(), experts
        self.batch, self.cache, self.last = 0, None, None

    def _step(self, ids, cache):
        if self.experts:  # batched_mm copies a matrix for each choice: 71 GB for eight prompts
            self.model.set_experts_implementation("eager" if cache is None else self.experts)
        out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values

    def prefill(self, prompt):
        start = time.perf_counter()
        self._step(torch.tensor([prompt]), None)
        return time.perf_counter() - start

    def decode(self, prompts, steps):
        if self.batch != len(prompts):
            self.batch, (self.last, self.cache) = len(prompts), self._step(torch.tensor(prompts), None)
        start = time.perf_counter()
        for _ in range(steps):
            self.last, self.cache = self._step(self.last, self.cache)
        return (time.perf_counter() - start) / steps

    def greedy(self, prompt, count):
        last, cache = self._step(torch.tensor([prompt]), None)
        tokens = [int(last)]
        while len(tokens) < count:
            last, cache = self._step(last, cache)
            tokens.append(int(last))
        return tokens

    def throughput(self, prompts, outputs, watch, *, batch, order):
        """Call `generate` in fixed batches of similar lengths; each runs until its longest output ends."""
        lengths = outputs if order == "output" else [len(prompt) for prompt in prompts]
        rows = sorted(range(len(prompts)), key=lengths.__getitem__)
        tokens = [[] for _ in prompts]

        def check(*_, **__):
            watch.check()
            return False

        watch.start()
        for group in (rows[at : at + batch] for at in range(0, len(rows), batch)):
            generated = self._generate([prompts[row] for row in group], max(outputs[row] for row in group), check)
            for row, produced in zip(group, generated, strict=True):
                tokens[row] = produced[: outputs[row]]
        return tokens

    def _generate(self, prompts, count, after_step):
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        produced = self.model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
            pad_token_id=0,
            stopping_criteria=transformers.StoppingCriteriaList([after_step]),
        )
        return produced[:, width:].tolist()


if __name__ == "__main__":
    serve(lambda: Transformers(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:]))
