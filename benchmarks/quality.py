"""The cost of lower precision: bits per byte of the demo model on held-out source, in every format.

    python -m benchmarks.quality [--quick] [--json FILE]

The text is the held-out set of `examples/train_demo_model.py`: modules of Python's standard library that the model was
not trained on. `xz -9` compresses the same bytes, all files as one.
"""

import argparse
import math
import sysconfig
from pathlib import Path

from benchmarks.report import Report
from examples.train_demo_model import read_corpus, xz_bits
from jaxinfer import LLM, SamplingParams

FORMATS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantize": "int8"},
    "fp8": {"dtype": "float32", "quantize": "fp8"},
    "int4": {"dtype": "float32", "quantize": "int4"},
    "bfloat16 cache": {"dtype": "float32", "kv_dtype": "bfloat16"},
    "int8 cache": {"dtype": "float32", "kv_dtype": "int8"},
}
OVERLAP = 0.5  # fraction of a window that is only context for the rest


def windows(llm: LLM, texts: list[str]) -> list[tuple[list[int], int]]:
    """Cut the texts into windows of a model's context: token ids, and how many of them are context for the rest.

    Tokens have at least OVERLAP of a window as context, if it exists.
    """
    assert llm.tokenizer is not None
    window = llm.engine.config.context - 1
    stride = round(window * (1 - OVERLAP))
    cut = []
    separator = llm.model.eos_ids[0]  # as before every document in training
    for text in texts:
        ids = [separator, *llm.tokenizer.encode(text)]
        for start in range(0, max(len(ids) - (window - stride), 1), stride):
            cut.append((ids[start : start + window], window - stride if start else 1))
    return cut


def bits(llm: LLM, cut: list[tuple[list[int], int]]) -> float:
    """Count the bits that the model needs for windows of texts."""
    prompts, skipped = zip(*cut, strict=True)
    outputs = llm.generate(list(prompts), SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
    nats = 0.0
    for output, skip in zip(outputs, skipped, strict=True):
        assert output.prompt_logprobs is not None
        nats -= sum(p.logprob for p in output.prompt_logprobs[skip:] if p is not None)
    return nats / math.log(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="examples/demo_model")
    parser.add_argument("--quick", action="store_true", help="the four smallest modules only")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    texts = sorted(read_corpus(Path(sysconfig.get_path("stdlib"))).held_out.values(), key=len)
    texts = texts[:4] if args.quick else texts
    size = sum(len(text.encode()) for text in texts)
    report = Report()
    report.print_header()
    xz = xz_bits("".join(texts).encode()) / size
    report.row(name="xz -9", bytes=size, bits_per_byte=round(xz, 4))
    per_byte = {}
    pages: dict[str, int] = {}
    for name, options in FORMATS.items():
        llm = LLM(args.model, max_batch=4, **options)  # type: ignore[arg-type]
        per_byte[name], pages[name] = bits(llm, windows(llm, texts)) / size, llm.memory.page_bytes
        report.row(name=name, bytes=size, bits_per_byte=round(per_byte[name], 4), page_bytes=pages[name])
        print(f"{name:10} {per_byte[name]:.4f} bits/byte, {pages[name]} bytes in a page of the cache")
    report.check("bits_per_byte_vs_xz", per_byte["float32"] / xz, "of xz -9", target=1.0, better="lower")
    for name, target in {"int8": 0.01, "bfloat16": 0.01, "int8 cache": 0.01, "fp8": 0.02, "int4": 0.05}.items():
        loss = per_byte[name] / per_byte["float32"] - 1
        report.check(f"{name.replace(' ', '_')}_bits_per_byte_loss", loss, "of float32", target=target, better="lower")
    memory = pages["int8 cache"] / pages["float32"]
    report.check("int8_cache_memory", memory, "of float32", target=0.5, better="lower")
    report.finish(args.json)


if __name__ == "__main__":
    main()
