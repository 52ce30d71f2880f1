"""Families against transformers on random models that no test has: 64 greedy tokens each, token for token.

    python -m benchmarks.held_out [--family NAME]... [--models 2] [--json FILE]

Sizes, biases, windows, tied heads and positions are drawn at random, every second config is spelt as transformers 4
wrote it, and prompts have 1, 13 and 30 tokens (`benchmarks/peers/make_held_out.py`).
"""

import argparse
import json
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Report
from benchmarks.workers import PEERS, find_peers
from jaxinfer import LLM, SamplingParams
from jaxinfer.models.files.conversion import convert

FAMILIES = (
    *("llama", "mistral", "mistral3", "qwen2", "qwen3", "gemma2", "gemma3", "gemma3_text", "phi", "phi3", "olmo2"),
    *("olmo3", "granite", "smollm3", "cohere", "cohere2", "stablelm", "starcoder2", "glm", "glm4", "falcon"),
    *("gemma", "seed_oss", "ernie4_5", "exaone4", "ministral", "qwen3_vl", "minimax_m2", "exaone_moe", "hy_v3"),
    *("ernie4_5_moe", "vaultgemma", "cwm", "mellum", "solar_open", "internlm3", "qwen2_5_vl"),
    *("arcee", "afmoe", "nemotron", "apertus", "ministral3", "hunyuan_v1_dense", "hunyuan_v1_moe"),
)
TOLERANCE = 1e-4
"""Of log probabilities in float32. Tokens may differ where two are nearly as likely; none did."""


def compare(folder: Path, work: Path) -> tuple[bool, float]:
    """Return whether all greedy tokens of a model are transformers', and the largest error of a log probability."""
    rows = json.loads((folder / "greedy.json").read_text())
    convert(folder, work / folder.name)
    greedy = SamplingParams(temperature=0, max_tokens=len(rows[0]["tokens"]), ignore_eos=True, frequency_penalty=2.0)
    options: dict[str, Any] = {
        "max_batch": 1,
        "token_budget": 16,
        "chunk_size": 16,
        "max_decode_passes": 4,
        "context": 128,
    }
    with LLM(work / folder.name, **options) as llm:
        outputs = llm.generate([row["prompt"] for row in rows], greedy)
        scored = llm.generate(
            [row["prompt"] + row["tokens"] for row in rows], SamplingParams(max_tokens=1, prompt_logprobs=0)
        )
    same = all(list(output.outputs[0].token_ids) == row["tokens"] for output, row in zip(outputs, rows, strict=True))
    errors = [
        np.array([token.logprob for token in output.prompt_logprobs or () if token]) - row["logprobs"]
        for output, row in zip(scored, rows, strict=True)
    ]
    return same, float(np.abs(np.concatenate(errors)).max())


def measure(report: Report, python: Path, work: Path, families: list[str], models: int) -> None:
    """Make the models, and compare each as soon as it is there."""
    items = [f"{family}:{seed}" for family in families for seed in range(models)]
    results: dict[str, list[tuple[bool, float]]] = defaultdict(list)
    with subprocess.Popen(
        [python, PEERS / "make_held_out.py", work / "hf", *items], text=True, stdout=subprocess.PIPE
    ) as maker:
        assert maker.stdout is not None
        report.versions["transformers"] = next(maker.stdout, "").strip()
        for line in maker.stdout:
            name = line.strip()
            same, error = compare(work / "hf" / name, work)
            results[name.partition(":")[0]].append((same, error))
            print(f"{name:16} {'same tokens' if same else 'OTHER TOKENS'}, log probabilities within {error:.0e}")
    if maker.returncode:
        raise SystemExit(f"make_held_out.py ended with status {maker.returncode}.")
    for family, found in results.items():
        report.row(family=family, models=len(found), same=sum(s for s, _ in found), error=max(e for _, e in found))
    every = [result for found in results.values() for result in found]
    report.check("held_out_same_tokens", sum(s for s, _ in every) / len(items), "of the models", target=1.0)
    report.check("held_out_error", max(e for _, e in every), "nats", target=TOLERANCE, better="lower")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", action="append", choices=FAMILIES, help="this one; repeatable (default: all)")
    parser.add_argument("--models", type=int, default=2, help="of each family (default: 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    parser.add_argument(
        "--peer-python", type=Path, help="interpreter with the peers (default: $JAXINFER_PEERS or make peers)"
    )
    args = parser.parse_args()
    report = Report()
    report.print_header()
    with tempfile.TemporaryDirectory() as work:
        measure(report, find_peers(args.peer_python), Path(work), args.family or list(FAMILIES), args.models)
    report.finish(args.json)


if __name__ == "__main__":
    main()
