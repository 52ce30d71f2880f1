"""Speed of models with recurrent states on a CPU, against a dense model of the same bytes.

    python -m benchmarks.families_speed [--quick] [--dtype bfloat16] [--json FILE]

Two random models take turns: one of Qwen3.5's shape with 0.8B parameters, whose delta rules have states, and one whose
layers all have attention, with an MLP so wide that a decode step has as many bytes. `hybrid_bandwidth_share` is the
share of the read bandwidth that a step of the first reaches, relative to the second, by median over the rounds. Bytes
of a step are weights, keys and values, and states, which are read and written. The prefill of a prompt of 2048 tokens
is reported for both.
"""

import argparse
import dataclasses
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.bandwidth import ReadBandwidth
from benchmarks.cpu_decode.step_bytes import kv_bytes, state_bytes, step_bytes, weight_bytes
from benchmarks.random_models import save_random
from benchmarks.report import Report
from benchmarks.workers import OUR_SCRIPT, Engines, Worker, workers
from jaxinfer.compiled import cache_folder
from jaxinfer.models import DecoderConfig
from jaxinfer.models.families import qwen3_5

HYBRID, DENSE = "hybrid", "dense"
CONTEXT, PROMPT = 512, 2048
TARGET = 0.9

SHAPE: dict[str, object] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "intermediate_size": 3584,
    "vocab_size": 248_320,
    "max_position_embeddings": 4096,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": True,
}
"""The fields of Qwen3.5 0.8B that differ from the family's defaults."""
QUICK_SHAPE = SHAPE | {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "intermediate_size": 512,
    "vocab_size": 32_000,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def hybrid(*, quick: bool) -> DecoderConfig:
    """The config of the model with states."""
    return qwen3_5.config(QUICK_SHAPE if quick else SHAPE)


def dense(like: DecoderConfig, dtype: str) -> DecoderConfig:
    """A model with attention in each layer, whose decode step has as many bytes as that of a model with states."""
    (attention,) = {kind for kind in like.pattern if kind.has_attention}
    plain = dataclasses.replace(like, pattern=(attention,)).with_attention(output_gate=False)
    hidden = plain.layer(0).mlp.hidden
    wider = plain.with_mlp(hidden=2 * hidden)
    sizes = [step_bytes(config, dtype, CONTEXT) for config in (like, plain, wider)]
    exact = hidden * (1 + (sizes[0] - sizes[1]) / (sizes[2] - sizes[1]))
    return plain.with_mlp(hidden=64 * round(exact / 64))


def make_models(folder: Path, configs: dict[str, DecoderConfig]) -> None:
    """Write the models of random weights, unless they exist."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, config in configs.items():
        if not (folder / name).exists():
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                save_random(Path(temporary) / name, config)
                (Path(temporary) / name).rename(folder / name)


def in_turn(processes: list[Worker], rounds: int, **request: Any) -> dict[str, list[float]]:
    """Ask both in each round, each of them first in every second one: their milliseconds, after a round that is not
    counted."""
    times: dict[str, list[float]] = {worker.engine: [] for worker in processes}
    for counted in range(-1, rounds):
        for worker in processes if counted % 2 else reversed(processes):
            time.sleep(0.2)  # until the other's threads are idle
            seconds = worker.ask(**request)["seconds"]
            if counted >= 0:
                times[worker.engine].append(1e3 * seconds)
    return times


def measure(report: Report, args: argparse.Namespace, configs: dict[str, DecoderConfig]) -> None:
    """Time decode steps and prompts of both, and check the share."""
    rounds, steps = (2, 4) if args.quick else (args.rounds, 16)
    prompt = PROMPT // 16 if args.quick else PROMPT
    sizes = "1", str(max(prompt, CONTEXT) + 512)
    engines: Engines = {(name, args.dtype): (OUR_SCRIPT, name, *sizes) for name in configs}
    bandwidth = ReadBandwidth()
    with workers(args.dtype, args.work_dir, Path(sys.executable), 0, engines) as processes:
        bandwidth.measure()
        decoded = in_turn(processes, rounds, do="decode", batch=1, context=CONTEXT, steps=steps)
        bandwidth.measure()
        prefilled = in_turn(processes, max(rounds // 2, 1), do="prefill", tokens=prompt)
    size = {name: step_bytes(config, args.dtype, CONTEXT) for name, config in configs.items()}
    for name, config in configs.items():
        report.row(
            figure="decode step",
            model=name,
            dtype=args.dtype,
            context=CONTEXT,
            ms=round(statistics.median(decoded[name]), 2),
            all_ms=[round(value, 2) for value in decoded[name]],
            weight_mb=round(weight_bytes(config, args.dtype) / 1e6, 1),
            page_mb=round(kv_bytes(config, args.dtype, CONTEXT) / 1e6, 1),
            state_mb=round(state_bytes(config, args.dtype) / 1e6, 1),
            gb_per_s=round(size[name] / statistics.median(decoded[name]) / 1e6, 2),
            bandwidth_share=round(size[name] / statistics.median(decoded[name]) / 1e6 / bandwidth.best, 3),
        )
    for name, times in prefilled.items():
        ms = statistics.median(times)
        report.row(
            figure="prefill",
            model=name,
            dtype=args.dtype,
            tokens=prompt,
            ms=round(ms, 1),
            all_ms=[round(value, 1) for value in times],
            tokens_per_s=round(prompt / ms * 1e3, 1),
        )
    report.row(**bandwidth.row())
    shares = [
        size[HYBRID] / ours * theirs / size[DENSE] for ours, theirs in zip(decoded[HYBRID], decoded[DENSE], strict=True)
    ]
    report.check("hybrid_bandwidth_share", statistics.median(shares), "x", target=TARGET)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models and two rounds, to try the command")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights and pages")
    parser.add_argument("--rounds", type=int, default=9, help="of decode steps; of prompts half as many")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    parser.add_argument("--work-dir", type=Path, default=cache_folder() / "benchmarks" / "families_speed")
    args = parser.parse_args()
    report = Report()
    report.print_header()
    first = hybrid(quick=args.quick)
    configs = {HYBRID: first, DENSE: dense(first, args.dtype)}
    args.work_dir /= f"quick-{args.dtype}" if args.quick else args.dtype  # on which the dense model's width depends
    make_models(args.work_dir, configs)
    measure(report, args, configs)
    for row in report.rows:
        print(row, flush=True)
    report.finish(args.json)


if __name__ == "__main__":
    main()
