"""PyTorch and transformers on a GPU: `run_torch_gpu.py`. Its protocol is that of `Worker` in workers.py, in JSON lines.

  {"do": "prepare", "what": "linear" | "attention" | "decode", ...}  -> {"id": 1} or {"absent": "why"}
  {"do": "round", "id": 1}                                           -> {"seconds": s}: of one call or step
  {"do": "round", "id": 1, "generate": 8}                            -> the same, of a prompt and that many new tokens
  {"do": "forget"}                                                   -> {}: frees everything that was prepared

Without a GPU it runs on the CPU, so that a dry run executes every line.
"""
# Runs in the peers' environment, whose packages ours lacks.
# pyright: reportMissingImports=false

import gc
import json
import os
import sys
import time
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812, the usual name

GROUP = 128
ROUND_SECONDS, PROGRAM_SECONDS, SETS_BYTES = 15e-3, 1e-3, 512 << 20
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


def wait():
    if GPU:
        torch.cuda.synchronize()


class Repeated:
    """Calls of an operation as one CUDA graph, with sets of arguments in turn that together exceed the L2 cache."""

    def __init__(self, make, call):
        first = make()
        size = sum(x.nbytes for x in first)
        copies = max(1, min(64, -(-SETS_BYTES // size))) if GPU else 1
        sets = [first, *(make() for _ in range(copies - 1))]
        call(*first)
        self.calls = copies

        def launch():
            for args in sets:
                call(*args)

        self.launch = self._graph(launch) if GPU else launch
        self.launches = 1
        self.launches = max(1, round(ROUND_SECONDS / (self.round() * self.calls)))

    @staticmethod
    def _graph(launch):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            launch()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        graph.replay()
        return graph.replay

    def round(self):
        wait()
        start = time.perf_counter()
        for _ in range(self.launches):
            self.launch()
        wait()
        return (time.perf_counter() - start) / (self.launches * self.calls)


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device=DEVICE).to(dtype)


def linear(weights, rows, outputs, inputs):
    """Time `x W^T` by PyTorch's implementation for the format: cuBLAS, or its own kernels for int8 and int4 weights."""

    def make():
        x = random(rows, inputs)
        if weights == "bfloat16":
            return x, random(outputs, inputs)
        w = torch.randint(-128, 128, (outputs, inputs), device=DEVICE, dtype=torch.int8)
        if weights == "int8" and rows > 16:
            return x.to(torch.int8), w
        if weights == "int8":
            return x, w, random(outputs)
        scales = random(inputs // GROUP, outputs, 2)
        packed = torch.randint(0, 256, (outputs, inputs // 2), device=DEVICE, dtype=torch.uint8)
        if GPU:
            return x, torch.ops.aten._convert_weight_to_int4pack(packed, 8), scales
        wide = torch.randint(0, 16, (outputs, inputs), dtype=torch.int32)
        return x, torch.ops.aten._convert_weight_to_int4pack_for_cpu(wide, 8), scales

    def int4(x, w, scales):
        if GPU:
            return torch.ops.aten._weight_int4pack_mm(x, w, GROUP, scales)
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, w, GROUP, scales)

    if weights == "int8":
        call = (lambda x, w: torch._int_mm(x, w.t())) if rows > 16 else torch.ops.aten._weight_int8pack_mm
    else:
        call = F.linear if weights == "bfloat16" else int4
    return Repeated(make, call)


def attention(batch, tokens, keys, q_heads, kv_heads, head_dim):
    """Time `scaled_dot_product_attention` over contiguous keys and values, by the backend that PyTorch chooses."""

    def make():
        q = random(batch, q_heads, tokens, head_dim)
        return q, random(batch, kv_heads, keys, head_dim), random(batch, kv_heads, keys, head_dim)

    def call(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=tokens > 1, enable_gqa=q_heads != kv_heads)

    return Repeated(make, call)


class Decoding:
    """A transformers model of random weights with a static cache; a step is compiled with mode="reduce-overhead"."""

    models: ClassVar = {}  # only the last one: {its architecture and config: the model}

    def __init__(self, architecture, config, batch, prompt, steps, context):
        from transformers import StaticCache

        self.model, self.steps = self._model(architecture, config), steps
        self.ids = torch.randint(0, config["vocab_size"], (batch, prompt), device=DEVICE)
        self.cache = StaticCache(config=self.model.config, max_cache_len=context)
        self.step = torch.compile(self._step, mode="reduce-overhead", fullgraph=True, dynamic=False)
        for _ in range(3):
            self.round()

    @classmethod
    def _model(cls, architecture, config):
        import transformers

        key = json.dumps([architecture, config])
        if key not in cls.models:
            cls.models.clear()
            gc.collect()
            made = getattr(transformers, f"{architecture}Config")(**config)
            with torch.device(DEVICE):
                model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
            cls.models[key] = model.eval()
        return cls.models[key]

    def _step(self, ids, position):
        out = self.model(input_ids=ids, position_ids=position, past_key_values=self.cache, use_cache=True)
        return out.logits[:, -1].argmax(-1, keepdim=True)

    def _prefill(self):
        positions = torch.arange(self.ids.shape[1], device=DEVICE)[None]
        out = self.model(
            input_ids=self.ids, position_ids=positions, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )
        return out.logits[:, -1].argmax(-1, keepdim=True)

    def _decode(self, last, steps):
        position = torch.full((1, 1), self.ids.shape[1], device=DEVICE)
        for _ in range(steps):
            torch.compiler.cudagraph_mark_step_begin()
            last = self.step(last, position).clone()  # the graph will overwrite its result
            position = position + 1
        return last

    def round(self, generate=0):
        self.cache.reset()
        wait()
        start = time.perf_counter()
        last = self._prefill()
        if not generate:
            wait()
            start = time.perf_counter()
        self._decode(last, generate - 1 if generate else self.steps)
        wait()
        return (time.perf_counter() - start) / (1 if generate else self.steps)


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries' prints must not end up in the protocol
    torch.set_grad_enabled(False)
    torch._dynamo.config.cache_size_limit = 64

    def answer(**fields):
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    try:
        import transformers

        version = f"torch {torch.__version__}, transformers {transformers.__version__}"
    except ImportError:
        version = f"torch {torch.__version__}, no transformers"
    answer(version=version, ways=[])
    prepared = {}
    makers = {"linear": linear, "attention": attention, "decode": Decoding}
    for line in sys.stdin:
        request = json.loads(line)
        do = request.pop("do")
        try:
            if do == "prepare":
                what = request.pop("what")
                prepared[len(prepared) + 1] = makers[what](**request)
                answer(id=len(prepared))
            elif do == "round":
                answer(seconds=prepared[request.pop("id")].round(**request))
            else:
                prepared.clear()
                gc.collect()
                if GPU:
                    torch.cuda.empty_cache()
                answer()
        except Exception as error:  # of any library; the caller reports that this peer is absent, and why
            answer(absent=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


if __name__ == "__main__":
    main()
