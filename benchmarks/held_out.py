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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
    *("qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid", "gemma4_text", "gemma4"),
)
TOLERANCE = 1e-4
"""Of log probabilities in float32. Tokens may differ where two are nearly as likely; none did."""
WITH_STATES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid")
STATES_MEDIAN, STATES_TOLERANCE = 1e-5, 1e-3
"""Of families with delta rules: where their output is small, the norm after it makes rounding errors large."""


class Comparison(NamedTuple):
    """A model beside transformers: whether all greedy tokens are the same, and the errors of log probabilities."""

    same: bool
    median: float
    largest: float


def compare(folder: Path, work: Path) -> Comparison:
    """Compare a model that transformers has written with the tokens that it generated."""
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
    error = np.abs(np.concatenate(errors))
    return Comparison(same, float(np.median(error)), float(error.max()))


def measure(report: Report, python: Path, work: Path, families: list[str], models: int) -> None:
    """Make the models, and compare each as soon as it is there."""
    items = [f"{family}:{seed}" for family in families for seed in range(models)]
    results = defaultdict[str, list[Comparison]](list)
    with subprocess.Popen(
        [python, PEERS / "make_held_out.py", work / "hf", *items], text=True, stdout=subprocess.PIPE
    ) as maker:
        assert maker.stdout is not None
        report.versions["transformers"] = next(maker.stdout, "").strip()
        for line in maker.stdout:
            name = line.strip()
            found = compare(work / "hf" / name, work)
            results[name.partition(":")[0]].append(found)
            errors = f"{found.largest:.0e} at most, {found.median:.0e} in the median"
            print(f"{name:16} {'same tokens' if found.same else 'OTHER TOKENS'}, log probabilities within {errors}")
    if maker.returncode:
        raise SystemExit(f"make_held_out.py ended with status {maker.returncode}.")
    for family, found in results.items():
        report.row(
            family=family,
            models=len(found),
            same=sum(each.same for each in found),
            median=max(each.median for each in found),
            error=max(each.largest for each in found),
        )
    check(report, results, len(items))


def check(report: Report, results: Mapping[str, Sequence[Comparison]], models: int) -> None:
    """Check the results of so many models."""
    every = [each for found in results.values() for each in found]
    plain = [each for family, found in results.items() if family not in WITH_STATES for each in found]
    states = [each for family, found in results.items() if family in WITH_STATES for each in found]
    report.check("held_out_same_tokens", sum(each.same for each in every) / models, "of the models", target=1.0)
    for name, found, target in (
        ("held_out_error", [each.largest for each in plain], TOLERANCE),
        ("held_out_states_median", [each.median for each in states], STATES_MEDIAN),
        ("held_out_states_error", [each.largest for each in states], STATES_TOLERANCE),
    ):
        if found:
            report.check(name, max(found), "nats", target=target, better="lower")


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
