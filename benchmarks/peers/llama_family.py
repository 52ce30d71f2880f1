"""The interface that llama.cpp and ik_llama.cpp share: a context, its batch, and what a worker does with them."""

import subprocess
import sys
import time

import numpy as np

MAX_SEQUENCES, CONTEXT = 8, 1024
BATCH_TOKENS = 512  # per llama_decode
PROBE = "--probe"
PROBED = list(range(100, 140))  # tokens


class BaseContext:
    """A llama_context and its batch, of either library.

    Args:
      api: the module with the functions of llama.h.
      context: the llama_context.
      vocab: how many logits there are.
    """

    def __init__(self, api, context, vocab):
        self.api, self.context, self.vocab = api, context, vocab
        self.batch = api.llama_batch_init(BATCH_TOKENS, 0, 1)

    def decode(self, entries):
        """Decode entries of (token, position, sequence, wants logits)."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, logits) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, logits
            batch.seq_id[i][0] = sequence
        if code := self.api.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode failed with {code}.")

    def run(self, entries):
        """Decode entries, and return the greedy tokens of those that want logits."""
        self.decode(entries)
        rows = [i for i, entry in enumerate(entries) if entry[3]]
        return [
            int(np.ctypeslib.as_array(self.api.llama_get_logits_ith(self.context, i), (self.vocab,)).argmax())
            for i in rows
        ]

    def start(self, prompt, sequence):
        """Run a prompt and return its first new token."""
        last = len(prompt) - 1
        return self.run([(token, i, sequence, i == last) for i, token in enumerate(prompt)])[0]

    def clear(self):
        raise NotImplementedError


class LlamaFamily:
    """A context with eight sequences, each with its own cache; greedy from the logits."""

    def __init__(self, context):
        self.context = context
        self.running, self.length, self.last = 0, 0, []

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


def repacking_works(script, file, dtype, threads):
    """Check whether a model runs with weights in the library's own layout, in a process that may crash.

    It runs the script with `PROBE`, which must call `probe`. float32 has one layout only.
    """
    if dtype == "float32":
        return True
    command = [sys.executable, script, file, dtype, str(threads), PROBE]
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def probe(engine):
    """Run a prompt, one row and eight."""
    engine.greedy(PROBED, 2)
    engine.decode([PROBED] * MAX_SEQUENCES, 1)
