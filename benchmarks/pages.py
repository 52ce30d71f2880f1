"""The tables of pages in `docs/benchmarks`, from the results in `benchmarks/results`; and docs/families.md.

    python -m benchmarks.pages            # prints them
    python -m benchmarks.pages --write    # puts them into the pages (`PAGES`), between their two markers

A folder of results is one kind of machine, with the files that the commands below (`SECTIONS`) wrote there. A new
result replaces one file; the other machines' stay as they are.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import families
from benchmarks.prose import wrapped
from benchmarks.report import ROOT, Check, machine_kind, machine_text
from benchmarks.streaming.summary import summary
from benchmarks.workers import MODELS, OWN_MODEL

RESULTS, FOLDER = ROOT / "benchmarks/results", ROOT / "docs/benchmarks"
BEGIN = "<!-- Written by `python -m benchmarks.pages --write`, from benchmarks/results. -->"
END = "<!-- End of what benchmarks.pages writes. -->"
OURS = "jaxinfer"

Result = dict[str, Any]
"""The content written by `Report.save`."""

CHECKS = {
    "held_out_same_tokens": "share of models with the same tokens as transformers",
    "held_out_error": "largest difference of a log probability, without delta rules",
    "held_out_states_median": "the same with delta rules: the largest median of a model",
    "held_out_states_error": "the same with delta rules: the largest",
    "decode_fp32_b1_vs_best_peer": "float32 decode, batch 1, against the best peer",
    "decode_fp32_b1_vs_hf": "float32 decode, batch 1, against transformers",
    "decode_fp32_b8_vs_best_peer": "float32 decode, batch 8, against the best peer",
    "decode_int8_b1_vs_best_peer": "int8 decode, batch 1, against the best peer",
    "decode_int8_b1_vs_ctranslate2": "int8 decode, batch 1, against CTranslate2",
    "decode_int8_b8_vs_best_peer": "int8 decode, batch 8, against the best peer",
    "decode_int4_b1_vs_best_peer": "int4 decode, batch 1, against the best peer in q4_0 and q4_K",
    "worst_decode_cell_vs_best_peer": "the worst of all decode figures above against the best peer",
    "prefill_vs_best_peer": "float32 prefill against the best peer",
    "prefill_int8_vs_best_peer": "int8 prefill against the best peer",
    "decode_fp32_b1_of_read_bandwidth": "float32 decode, batch 1: share of the read bandwidth",
    "decode_fp32_b1_of_step_bandwidth": "1B parameters, float32, batch 1: a step's share of the read bandwidth",
    "decode_int8_b1_of_step_bandwidth": "the same in int8",
    "decode_int4_b1_of_step_bandwidth": "the same in int4",
    "decode_8k_of_bandwidth": "the same in float32, with 8192 tokens of context",
    "products_fp32_of_bandwidth": "1B parameters, float32, one row: share of the read bandwidth, products only",
    "products_int8_of_bandwidth": "the same in int8",
    "products_int4_of_bandwidth": "the same in int4",
    "moe_b1_vs_dense_active": "decode step of 64 experts top-2 at batch 1, relative to a dense model of the active "
    "size",
    "hybrid_bandwidth_share": "decode step of the model with states: share of the read bandwidth, relative to the "
    "dense model's",
    "host_overhead_ms": "host overhead of a decode step, 12 layers",
    "demo_warm_start_s": "demo model, warm cache: complete `jaxinfer generate` of 16 tokens",
    "throughput_vs_best_peer": "throughput against the best peer",
    "throughput_vs_fixed_batches": "throughput against fixed batches (transformers)",
    "prefix_hit_ttft_gain": "time to first token: gain if 512 of 528 prompt tokens are in the prefix cache",
    "speculation_gain_repetitive": "gain by speculation on repetitive text, the worse of two models",
    "speculation_worst": "gain by speculation on unpredictable text, the worse of two models",
    "step_gap_ms": "idle time of the device between steps, demo model",
    "compile_misses": "programs compiled during 200 random requests, after compiling ahead of time",
    "queues_linear": "CPU time per queued item, for 20,000 items against 2,000; worst of six queues, after "
    "`gc.freeze` as in vLLM (up to 2.1x without)",
    "host_ms_256_streams": "host work per step for 256 streams of 32,000 tokens",
    "host_step_ms_256x2048": "host work per step for 256 rows after 1,000 tokens of output, all outputs read as deltas",
    "host_step_ms_1000x8192": "the same for 1,000 rows with prompts of 4,000 tokens",
    "host_prefill_s": "host work for 1,000 prompts of 4,000 tokens until all decode",
    "host_step_growth": "host work per step for 1,000 rows over that for 256",
    "gguf_Q8_0_off_llama_cpp": "GGUF in Q8_0: difference to llama.cpp in bits per byte",
    "gguf_Q4_K_off_llama_cpp": "GGUF in Q4_K: difference to llama.cpp in bits per byte",
    "cap_ratio": "model bytes over the peak of memory, from disk, cap of 1 GiB",
    "disk_of_fio": "read bandwidth from disk, as a share of fio's",
    "disk_cores": "cores used for reading and verifying",
    "hidden_half": "computing takes about half as long as fetching: share of it hidden at depth 1",
    "throughput_half": "the same: throughput, as a share of the limit by max(fetch, compute)",
    "hidden_balance": "computing takes about as long as fetching: share of the shorter one hidden at depth 1",
    "throughput_balance": "the same: throughput, as a share of the limit by max(fetch, compute)",
    "residents_overhead": "time of a decode pass with one of 32 layers (7 MB each) in the host's memory, relative to "
    "the model on the device: the worse of CPU and wall time, median of 7 processes",
    "streamed_speculation_gain": "demo model from disk, repetitive text: tokens/s with speculation against without",
    "plan_error": "relative error of `jaxinfer plan` for a pass at batch 1 (768 MiB from disk, one device and two)",
    "vs_accelerate_b1": "tokens/s against accelerate's disk offload, same cap, batch 1",
    "vs_accelerate_b8": "the same, batch 8",
    "vs_llamacpp": "tokens/s against llama.cpp's mmap, same cap, batch 1",
    "gating_flops_ratio": "gating, 2,048 tokens and 128 experts: operations with one-hot matrices against tables",
    "gating_time_ratio": "the same in time",
    "mlp_vs_dense_active": "MLP of 64 experts top-2, one row: time relative to a dense MLP of the active size; worst "
    "shape",
    "mlp_vs_dense_touched": "the same for 8 rows, relative to a dense MLP as large as the experts used",
    "grouped_vs_all_experts": "speed of products of the chosen experts against a loop over all; minimum from 1 to 512 "
    "rows",
    "grouped_vs_dense_active": "decode step of 64 experts top-2 at batch 1: time relative to a dense model of the "
    "active size",
    "grouped_vs_dense_touched": "the same at batch 8, relative to a dense model as large as the experts used",
    "vs_transformers_b1": "decode of the Qwen3-MoE in float32, batch 1: speed against the fastest of transformers' "
    "three ways",
    "vs_transformers_b8": "the same, batch 8",
    "streamed_bytes_per_token": "from disk, an eighth of the model in memory, skewed router: bytes read, relative to "
    "the experts used and not resident",
    "streamed_vs_all_experts": "the same: tokens/s against reading all experts of each layer",
    "streamed_vs_disk": "the same: read bandwidth, as a share of fio's",
    "pcc_wire_ratio": "mesh with L = 2, no choice dropped: bytes that PCC sends, relative to the plain all-to-all; "
    "maximum of 2 to 16 devices",
    "participants_exact": "share of layers whose exchanges have the paper's number of devices and, to the byte, the "
    "bytes of its formulas",
    "families_equal": "share of runs with one device's tokens, on four meshes, for all families with experts and two "
    "without",
    "lane_gain": "16 requests, prompts of 32 tokens, answers of 64: two lanes of one thread each, against one lane of "
    "one thread",
    "lane_gain_prompts": "the same with prompts of 448 tokens and answers of 16 (added after the check above had "
    "missed)",
    "import_ms": "`from jaxinfer import LLM`",
    "cold_first_token_s": "first token, empty compilation cache",
    "warm_first_token_s": "first token, programs cached by an earlier start",
    "classify_two_images_cold_s": "`jaxinfer elastic classify` of two images, empty compilation cache",
    "warm_vs_llama.cpp": "speed until the first token, cached programs, against llama.cpp",
    "warm_vs_transformers": "the same, against transformers",
    "vs_process_swap": "good requests/s against the better of swapped processes, single requests",
    "switch_vs_bytes": "a switch against reading the weights from the page cache into new memory",
    "switch_vs_bytes_disk": "the same from the disk",
    "switch_compiles": "programs that a switch compiles",
    "two_models_goodput": "good requests/s of two models in the memory of 1.3 of one, against both in memory",
    "two_models_vs_reload": "the same against processes that end and start",
    "two_models_compiles": "programs compiled meanwhile",
    "two_models_goodput_int8": "good requests/s in the memory of 1.3 of one, with a KV cache in int8",
    "two_models_vs_reload_int8": "the same against processes that end and start",
    "two_models_compiles_int8": "programs compiled meanwhile",
    "resume_gain": "a preempted sequence of 2,048 tokens: time to its next token, computed again over restored",
    "resume_tokens_equal": "its tokens are the same",
    "host_tier_ttft_gain": "mean time to the first token in turns 2 to 5 of 16 sessions, without over with `host_kv`",
    "host_tier_idle_overhead": "share of tokens/s that `host_kv` costs if no prompt comes again",
    "resume_after_restart_gain": "the next turn of a session of 2,048 tokens after `kill -9`: time to its first token, "
    "computed again over read from disk",
    "restart_tokens_equal": "its tokens are the same",
    "both_ends_vs_best": "copies slowed to a quarter, one and four times computing: time to the first token, the "
    "better single way over both ends; worst of the three",
    "sliced_batch_gain": "a model streamed from disk: tokens/s of four times the rows with `kv_offload`",
    "experts_over_http": "inputs/s of experts over HTTP against one process",
    "elastic_over_http": "inputs/s of an elastic task over HTTP against one process",
    "front_end_events_per_s": "events that a CPU second of the whole process sends, 64 streams, steps of 4 ms",
    "health_p99_ms": "the slowest 1% of answers of `/health` meanwhile",
    "engine_ms_64_streams": "what HTTP adds to a step of the engine, 64 streams, steps of 10 ms",
    "server_overhead": "CPU time of a token over HTTP against `AsyncLLM` alone, less 1, 64 streams, 246 M parameters",
    "itl_p99_vs_best_peer": "99th percentile of the time between events: the same peer's over ours",
    "overload_goodput": "good requests/s at 10 times the saturating rate, against that rate",
    "agent_prefix_hits": "share of the prompt tokens of an agent's second and later turns found in the prefix cache",
    "parser_overhead": "CPU time of an event with parsers of calls and reasoning against that without, less 1",
    "restart_ready_s": "from the start of a process to `/ready` and a first token, warm cache, after `kill -9`",
}
"""Names of checks in the table; other checks are left out."""
PIPELINE_CHECKS = {
    "idle_exact": "share of schedules whose idle slots, planned or recorded by a compiled ring, match the closed form",
    "hybrid_gain_model": "530B model in five stages (Fig. 10b), computed from ticks: hybrid over drained",
    "queued_vs_drained_measured": "50 tokens for two micro-batches in two stages of one thread each: queued over "
    "drained",
    "chunk_pipeline_measured": "a prompt of 2,048 tokens: eight chunks in two stages of one thread each, over the "
    "fastest way on one device of one thread",
    "families_equal": "share of runs with one device's tokens, in two and in four stages, for all families that divide",
}
"""The same for `benchmarks.pipeline`, which has families, too."""
PLANNER_CHECKS = {
    "deepspeed-fp16_error": "largest error of a point of DeepSpeed in FP16 (Fig. 6)",
    "deepspeed-int8_error": "the same in INT8",
    "deepspeed-moe_error": "the same of mixtures (Figs. 7 and 11)",
    "figures_within_tolerance": "share of DeepSpeed's points within these tolerances",
    "fitted_constants": "most constants that are fitted for a system",
    "trillion_ms_error": "error of the milliseconds of the trillion-parameter model",
    "trillion_tb_per_s_error": "error of its bandwidth",
    "trillion_share_error": "error of its share of the peak bandwidth",
    "mixture_speedup_error": "error of the largest speed-up of mixtures",
    "int8_speedup_error": "error of the largest speed-up by INT8",
    "zero_share_of_peak": "50B in DRAM on an A6000: predicted share of the peak",
}
"""The same for `benchmarks.deepspeed_figures`."""
SIMULATOR_CHECKS = {
    "e2e_error_median": "median error of the time from arrival to the last token",
    "ttft_error_median": "median error of the time to the first token",
    "tpot_error_median": "median error of the time per output token",
    "cells": "cells",
    "cells_near_saturation": "cells near saturation",
    "configs_per_s": "configurations that are ranked a second, with the best 20 simulated, on one core",
}
"""The same for `benchmarks.planner`."""
HEADLINES = {
    "trillion_ms": "a token of the trillion-parameter mixture, ms",
    "trillion_tb_per_s": "its bandwidth, TB/s",
    "trillion_share": "share of the peak bandwidth",
    "mixture_speedup": "largest speed-up of mixtures over PyTorch",
    "int8_speedup": "largest speed-up of INT8 over FasterTransformer",
    "zero_share_of_peak": "50B in DRAM on an A6000, share of the peak (Fig. 9b)",
}
"""Names of the paper's headlines in the table."""
SHORT_UNITS = {"": "", "x": "x", "of": ""}
"""Replacements of a unit's first word, as the table's names say of what."""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def rows_of(files: Iterable[str | Path]) -> list[dict[str, Any]]:
    """Read the rows of results, one file after the other."""
    return [row for file in files for row in json.loads(Path(file).read_text())["rows"]]


def best(cells: Sequence[float | None], choose: Callable[[Iterable[float]], float], places: int) -> list[str]:
    """Format figures; the best in bold, a missing one empty."""
    winner = choose(cell for cell in cells if cell is not None)
    texts = ["" if cell is None else f"{cell:.{places}f}" for cell in cells]
    return [f"**{text}**" if cell == winner else text for cell, text in zip(cells, texts, strict=True)]


def engine_name(engine: str) -> str:
    return f"**{engine}**" if engine == OURS else engine


def decode_section(result: Result) -> list[str]:
    """Write the milliseconds of every engine, if measured, what decode steps read, and the checks."""
    kernels = next((row for row in result["rows"] if row["figure"] == "CPU kernels"), None)
    paragraphs = [*_engines_of(result), *_reading_of(result["rows"]), checks_table(result)]
    if kernels is not None:
        level = kernels.get("level")
        paragraphs[0] += f" CPU kernels: {f'compiled for {level}' if level else 'none, only XLA'}."
    return paragraphs


def _engines_of(result: Result) -> list[str]:
    """Write the milliseconds of every engine: a column per figure, the best of a dtype in bold."""
    rows = [row for row in result["rows"] if "ms" in row]
    if not rows:
        return ["Decoding on a CPU, without other engines."]
    figures = list(dict.fromkeys(row["figure"] for row in rows))
    lines = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        ms = {(row["engine"], row["figure"]): row["ms"] for row in rows if row["dtype"] == dtype}
        engines = list(dict.fromkeys(engine for engine, _ in ms))
        measured = [figure for figure in figures if (OURS, figure) in ms]
        columns = {figure: best([ms.get((engine, figure)) for engine in engines], min, 1) for figure in measured}
        for index, engine in enumerate(engines):
            cells = [columns[figure][index] if figure in columns else "" for figure in figures]
            lines.append([engine_name(engine), dtype, *cells])
    settings = next(row for row in result["rows"] if row["figure"] == "settings")
    model = settings.get("model", OWN_MODEL)
    shape = "" if model == OWN_MODEL else f", the shape of {model} in random weights"
    return [
        f"One request or batch{shape}: milliseconds of a prefill and of a decode step, medians of {settings['rounds']} "
        "rounds in which engines take turns.",
        table(["engine", "dtype", *figures], lines),
    ]


def _reading_of(rows: list[dict[str, Any]]) -> list[str]:
    """Write what whole decode steps read, and products alone, if they were measured."""
    bandwidth = max((row["gb_per_s"] for row in rows if row["figure"] == "read bandwidth"), default=None)
    if bandwidth is None:
        return []
    lines = []
    for row in rows:
        if row["figure"] not in ("whole step", "products"):
            continue
        what = "decode step" if "context" in row else f"products, {row['rows']} {'row' if row['rows'] == 1 else 'rows'}"
        rate = row["gb_per_s"] if "gb_per_s" in row else 1e3 * row["gb"] / row["step_ms"]  # results of before
        line = [row["model"], row["dtype"], what, row.get("context", ""), f"{row['step_ms']:.1f}", f"{rate:.1f}"]
        in_turn = f"{row['in_turn']:.2f}" if "in_turn" in row else ""
        lines.append([*map(str, line), f"{rate / bandwidth:.2f}", in_turn])
    if not lines:
        return []
    return [
        "Bytes read per second. A decode step at batch 1 reads all weights with their scales, and the KV cache of all "
        f"layers. *Of the best*: share of {bandwidth:g} GB/s, the fastest read of a C++ loop or XLA in the run. *In "
        "turn*: share of the median read before and after each round.",
        table(["model", "dtype", "measured", "context", "ms", "GB/s", "of the best", "in turn"], lines),
    ]


def engine_section(result: Result) -> list[str]:
    """Write output tokens per second of every engine, the best of a dtype in bold, if measured; and the checks."""
    rows = [row for row in result["rows"] if row["figure"] == "throughput"]
    lines = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        same = sorted((row for row in rows if row["dtype"] == dtype), key=lambda row: -row["tokens_per_s"])
        for row, rate in zip(same, best([row["tokens_per_s"] for row in same], max, 1), strict=True):
            way = ", ".join(f"{name} {value}" for name, value in row["way"].items())
            lines.append([engine_name(row["engine"]), dtype, str(row["requests"]), way, rate])
    if not lines:
        return ["Many requests at once, without peers.", checks_table(result)]
    return [
        "Many requests at once: output tokens per second, each engine in its best configuration.",
        table(["engine", "dtype", "requests", "configuration", "tokens/s"], lines),
        checks_table(result),
    ]


def quality_section(result: Result) -> list[str]:
    """Write bits per byte of every format, in one line."""
    rows = result["rows"]
    size = rows[0]["bytes"] // 1000
    return [
        f"Cost of precision: bits per byte of the demo model on {size} kB of held-out standard library code.",
        table([row["name"] for row in rows], [[f"{row['bits_per_byte']:.4f}" for row in rows]]),
    ]


def gguf_section(result: Result) -> list[str]:
    """Write bits per byte of every type in both engines, and the checks."""
    names = [name for name in result["rows"][0] if name not in ("type", "bytes")]
    lines = [[row["type"], *(f"{row[name]:.4f}" for name in names)] for row in result["rows"]]
    return [
        f"GGUF: bits per byte of the demo model on {result['rows'][0]['bytes'] // 1000} kB of the same text, in files "
        "quantised by llama.cpp.",
        table(["type", *names], lines),
        checks_table(result),
    ]


def moe_section(result: Result) -> list[str]:
    """Write the milliseconds of decode steps and of MLPs, the streaming, and the checks."""
    rows = [row for row in result["rows"] if "ms" in row and str(row["figure"]).startswith("decode")]
    engines = dict.fromkeys((row["engine"], row["dtype"], row.get("beside", "")) for row in rows)
    figures = list(dict.fromkeys(row["figure"] for row in rows))
    ms = {(row["engine"], row["dtype"], row.get("beside", ""), row["figure"]): f"{row['ms']:.1f}" for row in rows}
    lines = [
        [engine_name(engine), dtype, beside, *(ms.get((engine, dtype, beside, figure), "") for figure in figures)]
        for engine, dtype, beside in engines
    ]
    return [
        "Milliseconds of a decode step. `mixture` has 64 experts top-2 in 4 layers; `active` and `touched` are dense "
        "models of the size of 2 and 14 experts. The other rows run a random Qwen3-MoE of 690 M parameters with 64 "
        "experts top-8. One of transformers' ways runs at a time; `in turn with` names it.",
        table(["engine", "dtype", "in turn with", *figures], lines),
        "One MLP of 64 experts top-2 in float32, and a dense MLP for comparison, in milliseconds. The dense one is as "
        "large as the experts that the rows use, up to 48; for 512 rows it has the active size. *Of bandwidth*: share "
        "of the read bandwidth at which the used experts are read.",
        _mlp_table(result["rows"]),
        "From disk, decoding one sequence of random tokens in float32:",
        _expert_streaming_table(result["rows"]),
        *_meshes_of_experts(result["rows"]),
        checks_table(result),
    ]


def _mlp_table(rows: list[dict[str, Any]]) -> str:
    def key(row: dict[str, Any]) -> tuple[int, ...]:
        return row["width"], row["hidden"], row["rows"]

    fractions = {key(row): f"{row['fraction']:.2f}" for row in rows if row["figure"] == "moe_bytes_fraction"}
    mlps = [row for row in rows if row["figure"] == "mlp" and row["format"] == "float32"]
    lines = [
        [
            f"{row['width']}, {row['hidden']}",
            *(f"{row[name]:g}" for name in ("rows", "touched", "experts_ms", "dense_ms", "ratio")),
            fractions.get(key(row), ""),
        ]
        for row in mlps
    ]
    return table(["width, hidden", "rows", "experts used", "experts, ms", "dense, ms", "ratio", "of bandwidth"], lines)


def _expert_streaming_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        [
            row["router"],
            f"{row['experts']}, {row['slots']} resident",
            f"{row['model_bytes'] / 1e9:.2f} in {row['cap_bytes'] / 1e9:.2f}",
            *(f"{row[name]:.{places}f}" for name, places in (("hits", 2), ("tokens_per_s", 1))),
            f"{row['all_experts_tokens_per_s']:.1f}",
            f"{row['gb_per_s']:.2f} of {row['disk_gb_per_s']:.2f}",
        ]
        for row in rows
        if row["figure"] == "streaming"
    ]
    return table(["router", "experts", "GB", "hit rate", "tokens/s", "tokens/s, reading all", "GB/s, of fio's"], lines)


EXCHANGES = ("all_to_all", "pcc", "pcc_all_gather", "all_gather")


def _meshes_of_experts(rows: list[dict[str, Any]]) -> list[str]:
    """Write what exchanges send on 16 devices, and the tokens per second of lanes, if they were measured."""
    wire: dict[tuple[Any, ...], dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row["figure"] == "exchange" and (row["p"], row["tensor"]) == (16, 1):
            wire[row["capacity_factor"] or "", row["tokens"], row["L"]][row["exchange"]] = row["wire_bytes"]
    if not wire:
        return []
    exchanges = [
        [str(tokens), str(capacity), str(column), str(16 // column), *(f"{sent[name] / 1e3:.1f}" for name in EXCHANGES)]
        for (capacity, tokens, column), sent in sorted(wire.items(), key=lambda item: (str(item[0][0]), *item[0][1:]))
    ]
    lanes: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row["figure"] == "lanes":
            lanes[row["way"]].append(f"{row['tokens_per_s']:,.0f} ({min(row['all']):,.0f} to {max(row['all']):,.0f})")
    return [
        "kB that a device sends, by its compiled program, for a layer of 16 experts top-2 of width 64 in float32 on 16 "
        "devices, one expert on each. L devices have the same T tokens. With p devices there are p / L lanes of "
        "different tokens. With a capacity of 1.25, an expert takes at most 1.25 times its even share of the choices; "
        "without one, up to all T tokens.",
        table(["T", "capacity", "L", "p / L", *(f"`{name}`" for name in EXCHANGES)], exchanges),
        "16 requests to a dense model of 56 M parameters in float32: tokens per second of prompts and answers, median "
        "and range of rounds in which all ways take turns. During answers, each lane reads all weights for its half of "
        "the rows.",
        table(
            ["way", "prompts of 448, answers of 16", "prompts of 32, answers of 64"],
            [[way, *cells] for way, cells in lanes.items()],
        ),
    ]


def streaming_section(result: Result) -> list[str]:
    """Write the checks, and a summary of the rows."""
    return ["A model with 8 GiB of layers.", checks_table(result), " ".join(summary(result["rows"]))]


def start_section(result: Result) -> list[str]:
    """Write the seconds of every engine until its first token, and the checks."""
    rows = [row for row in result["rows"] if row["figure"] == "first token"]
    lines = [[engine_name(row["engine"]), f"{row['s']:.2f}", f"{min(row['all_s']):.2f}"] for row in rows]
    return [
        "Seconds from the start of a process to its first token: median and minimum of rounds in which engines take "
        "turns.",
        table(["engine", "median", "minimum"], lines),
        checks_table(result),
    ]


def held_out_section(result: Result) -> list[str]:
    """Write how many models of each family have transformers' tokens, and the checks."""
    lines = [[row["family"], f"{row['same']} of {row['models']}", f"{row['error']:.0e}"] for row in result["rows"]]
    return [
        "Random models that no test contains, in float32: models that generate the same 64 greedy tokens as "
        "transformers after prompts of 1, 13 and 30 tokens, and the largest difference of a log probability. It is "
        "larger with delta rules: where their output is small, the norm after it makes rounding errors large.",
        table(["`model_type`", "same tokens", "nats"], lines),
        checks_table(result),
    ]


def families_speed_section(result: Result) -> list[str]:
    """Write decode steps and prefill of the model with states and of the dense one, and the check."""
    decoded, prefilled = (
        {row["model"]: row for row in result["rows"] if row["figure"] == figure}
        for figure in ("decode step", "prefill")
    )
    lines = [
        [
            name,
            f"{row['weight_mb']:,.0f} + {row['page_mb']:.0f} + {row['state_mb']:.0f}",
            f"{row['ms']:.1f} ({min(row['all_ms']):.1f} to {max(row['all_ms']):.1f})",
            f"{row['bandwidth_share']:.2f}",
            f"{prefilled[name]['tokens_per_s']:,.0f}",
        ]
        for name, row in decoded.items()
    ]
    (row, *_), (prefill, *_) = decoded.values(), prefilled.values()
    return [
        f"Random models of 0.8B parameters in {row['dtype']}: one of Qwen3.5's shape, with recurrent states in three "
        "of four layers, and a dense one whose decode step has as many bytes. One row, from a context of "
        f"{row['context']} tokens; medians (and ranges) of rounds in turn, and the prefill of {prefill['tokens']} "
        "tokens.",
        table(["model", "MB: weights, pages, states", "step in ms", "of read bandwidth", "prefill, tokens/s"], lines),
        checks_table(result),
    ]


def pipeline_section(result: Result) -> list[str]:
    """Write idle slots, the model of hybrid scheduling, the tokens per second of devices, and the checks."""
    rows = result["rows"]
    closed = next((row for row in rows if row["figure"] == "closed forms"), {})
    devices = [
        [row["way"], row["figure"], f"{row['tokens_per_s']:,.0f} ({min(row['all']):,.0f} to {max(row['all']):,.0f})"]
        for row in rows
        if "tokens_per_s" in row
    ]
    hybrid = [
        [f"{row['parameters_b']:g}B", *(str(row[name]) for name in ("P", "sequences", "prompt_s", "decode_s"))]
        + [f"{row[f'{name}_s']:.2f}" for name in ("drained", "queued", "hybrid")]
        + [f"{row['gain']:.2f}x"]
        for row in rows
        if row["figure"] == "hybrid"
    ]
    return [
        "Tokens per second (median and range) of two CPU devices of one thread each, with a Llama of 57 M parameters "
        f"in float32. The closed forms predict {closed['queued_vs_drained']:.2f}x for queued over drained, and "
        f"{closed['chunk_pipeline']:.2f}x for eight chunks in two stages over one device.",
        table(["way", "phase", "tokens/s"], devices),
        "Idle slots (of ticks times stages) with P stages, M micro-batches and G tokens per micro-batch:",
        _idle_table(rows),
        "Seconds that each schedule needs for the paper's models, computed from ticks. Each sequence has a prompt of "
        "512 tokens and generates 50, in P micro-batches; hybrid scheduling divides prompts into 4 P. A stage's time "
        "for the prompts is that of their products (0.76 of 312 TFLOP/s), however they are divided. A tick of "
        "generation takes as long as reading the stage's weights (0.95 of 1.555 TB/s).",
        table(["model", "P", "sequences", "prompts, one stage", "tick", "drained", "queued", "hybrid", "gain"], hybrid),
        checks_table(result, CHECKS | PIPELINE_CHECKS),
    ]


def _idle_table(rows: list[dict[str, Any]]) -> str:
    """Write the idle slots of as many micro-batches as stages, and of eight chunks; what rings recorded beside."""
    idle = {
        (row["recorded"], row["schedule"], row["P"], row["M"]): f"{row['idle']:,} of {row['slots']:,}"
        for row in rows
        if row["figure"] == "idle"
    }
    stages = sorted({p for _, _, p, _ in idle})
    lines = [
        [name, how, *(idle[is_recorded, name, p, p] for p in stages)]
        for name in ("drained", "queued", "hybrid")
        for is_recorded, how in ((False, "planned"), (True, "recorded"))
        if (is_recorded, name, stages[0], stages[0]) in idle
    ]
    return table(["schedule, M = P, G = 50", "", *(f"P = {p}" for p in stages)], lines)


def planner_section(result: Result) -> list[str]:
    """Write the errors of each system and each point, the ratios, the public points, and the checks."""
    points = [row for row in result["rows"] if "left_out" in row]
    systems = list(dict.fromkeys(row["system"] for row in points))
    return [
        "Nothing was run: the planner predicts each of the paper's points. Errors of a system's points, by the "
        "planner's constants, and (left out) by constants that were fitted to all points but the one.",
        table(
            ["system", "points", "mean", "largest", "left out: mean", "largest", "of"],
            [_errors_of([row for row in points if row["system"] == system]) for system in systems],
        ),
        "Each point of Figs. 6, 7 and 11 in milliseconds: measured, predicted, its error, and its error when left out.",
        *(_points_table([row for row in points if row["figure"] == figure]) for figure in ("fig6", "fig7")),
        "The ratios of Figs. 8, 10b and 13, to which nothing is fitted; and the paper's headlines, most of which "
        "follow from the points above.",
        _predicted_table([row for row in result["rows"] if row["figure"] in ("ratio", "headline")]),
        "Public measurements of today's systems, with the constants of 2022. None of them is fitted; what is predicted "
        "for DeepEP is the time of the wire alone.",
        _predicted_table([row for row in result["rows"] if row["figure"] == "public"]),
        checks_table(result, PLANNER_CHECKS),
    ]


def _errors_of(rows: list[dict[str, Any]]) -> list[str]:
    errors, without = ([abs(row[name]) for row in rows] for name in ("error", "left_out"))
    worst = rows[without.index(max(without))]["name"]
    figures = [statistics.mean(errors), max(errors), statistics.mean(without), max(without)]
    return [rows[0]["system"], str(len(rows)), *(f"{100 * figure:.1f}%" for figure in figures), worst]


def _points_table(rows: list[dict[str, Any]]) -> str:
    """Write a line for each model and batch, and a column for each system."""
    systems = list(dict.fromkeys(row["system"] for row in rows))
    cells = {
        (row["name"], row["system"]): f"{row['measured_ms']:g}, {row['predicted_ms']:g}, {row['error']:+.1%}, "
        f"{row['left_out']:+.1%}"
        for row in rows
    }
    names = dict.fromkeys(row["name"] for row in rows)
    return table(["point", *systems], [[name, *(cells[name, system] for system in systems)] for name in names])


def _predicted_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        [
            f"Fig. {row['of']}" if row["figure"] == "ratio" else row.get("of", "text"),
            f"{HEADLINES.get(row['name'], row['name'])}{', ' + row['unit'] if 'unit' in row else ''}",
            *(f"{row[name]:,g}" for name in ("measured", "predicted")),
            f"{row['predicted'] / row['measured'] - 1:+.0%}",
        ]
        for row in rows
    ]
    return table(["source", "figure", "measured", "predicted", "error"], lines)


def simulator_section(result: Result) -> list[str]:
    """Write each cell's latencies, measured and predicted, the worst cells, and the checks."""
    rows = [row for row in result["rows"] if row["figure"] == "cell"]
    metrics = {"e2e_ms": "end to end", "ttft_ms": "TTFT", "tpot_ms": "TPOT"}
    lines = [
        [
            row["engine"],
            row["cell"],
            *(f"{row[name]:,.3g}, {row[f'predicted_{name}']:,.3g}, {row[f'error_{name}']:+.0%}" for name in metrics),
        ]
        for row in rows
    ]
    worst = [row for row in result["rows"] if row["figure"] == "worst"]
    return [
        "The real engine on this machine, and what its simulation predicted before. Means over the requests of a cell, "
        "in milliseconds: measured (the median of three runs), predicted, error.",
        table(["engine", "cell", *metrics.values()], lines),
        "The largest errors:",
        table(["of", "error", "cell"], [[row["metric"], f"{row['error']:+.0%}", row["cell"]] for row in worst]),
        *_peer_paragraphs(result),
        checks_table(result, SIMULATOR_CHECKS),
    ]


def _peer_paragraphs(result: Result) -> list[str]:
    """Write AISimulate's predictions of public points next to the planner's, if it ran."""
    rows = [row for row in result["rows"] if row["figure"] == "peer"]
    if not rows:
        return []
    (total,) = (row for row in result["rows"] if row["figure"] == "peer_errors")
    lines = [
        [row["name"], f"{row['measured']:,}"]
        + [f"{row[who]:,}, {row[who] / row['measured'] - 1:+.0%}" for who in ("aisimulate", "jaxinfer")]
        for row in rows
    ]
    return [
        "AISimulate, which has measured each kernel on H200s, and jaxinfer's planner, which knows the datasheet and "
        "constants of 2022, on throughputs that NVIDIA published for TensorRT-LLM. Median errors: "
        f"{total['aisimulate']:.0%} and {total['jaxinfer']:.0%}.",
        table(["point", "tokens/s", "AISimulate", "jaxinfer"], lines),
    ]


def kv_tier_section(result: Result) -> list[str]:
    """Write the times of every part with and without tiers, and the checks."""
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in result["rows"]:
        rows[row["figure"]].append(row)
    resumed = [("preempted, from host memory", row["restored_ms"], row) for row in rows["resume"]]
    resumed += [("after `kill -9`, from disk", row["resumed_ms"], row) for row in rows["restart"]]
    sequences = [
        [name, _median(kept), _median(row["computed_ms"]), f"{_read_back_mb(row):,.0f}"] for name, kept, row in resumed
    ]
    chats = [[row["engine"], *(f"{ms:,.0f}" for ms in row["first_token_ms"])] for row in rows["chat"]]
    ends = [[f"{row['ratio']:g}", *(_median(times) for times in row["ms"].values())] for row in rows["both_ends"]]
    sliced = [
        [row["engine"], str(row["rows"]), f"{row['tokens_per_second']:,.1f}", f"{row['device_bytes'] / 1e6:,.0f}"]
        for row in rows["sliced"]
    ]
    return [
        "A random Llama of 246 M parameters in float32.",
        "Sequences of 2,048 tokens that go on: milliseconds to the next token, median and range.",
        table(["sequence", "pages kept", "computed again", "MB read back"], sequences),
        "16 sessions of 2,048 tokens in turn, of which the device has room for four: milliseconds to the first token, "
        "mean of all sessions.",
        table(["pages", *(f"turn {turn}" for turn in range(1, 6))], chats),
        "A prompt of 1,024 tokens whose pages are copied slowly: milliseconds to its first token. The ratio is that of "
        "copying all pages to computing them.",
        table(["ratio", "copied", "computed", "both ends"], ends),
        "The model streamed from disk, prompts of 32 tokens and answers of 96.",
        table(["KV cache", "rows", "tokens/s", "MB of the device"], sliced),
        checks_table(result),
    ]


def _median(times: Sequence[float]) -> str:
    return f"{statistics.median(times):,.0f} ({min(times):,.0f} to {max(times):,.0f})"


def _read_back_mb(row: dict[str, Any]) -> float:
    """MB that a sequence of `resume` or `restart` read back, in the mean."""
    of_all = row["read_back_bytes"]
    return statistics.mean(of_all) / 1e6 if isinstance(of_all, list) else of_all / len(row["resumed_ms"]) / 1e6


def serving_section(result: Result) -> list[str]:
    """Write the latencies and tokens per second of every server, and the checks."""
    servers = [row for row in result["rows"] if row["figure"] == "servers" and "absent" not in row]
    columns = ("tokens_per_s", "ttft_ms_p50", "tpot_ms_p50", "itl_ms_p99")
    lines = [[row["server"], *(f"{row[name]:,.1f}" for name in columns)] for row in servers]
    return [
        "16 concurrent requests in float32, prompts of 128 tokens and answers of 64 on average; milliseconds; medians "
        "of rounds in which servers take turns.",
        table(["server", "tokens/s", "TTFT p50", "TPOT p50", "ITL p99"], lines),
        checks_table(result),
    ]


def serving_models_section(result: Result) -> list[str]:
    """Write the goodput of one server and of swapped processes, the switches, and the checks."""
    rows = [row for row in result["rows"] if row["figure"] == "goodput"]
    columns = ("rate", "burst", "goodput", "good_share", "ttft_p50_ms", "errors")
    lines = [[row["server"], *(f"{row[name]:,}" for name in columns)] for row in rows]
    switches = [row for row in result["rows"] if row["figure"] == "switch"]
    switched = [
        [row["configs"], row["tier"], f"{row['switch_s']:.3f}", f"{row['read_s']:.3f}", str(row["compiles"])]
        for row in switches
    ]
    sections = [
        "Each request has 64 tokens, asks for 16 more, and goes to one of three models, which is drawn at random. The "
        "models have 246 M parameters in float32. A request is good if its first token comes within 2 s.",
        table(["server", "requests/s", "a burst", "good/s", "share", "TTFT p50 in ms", "errors"], lines),
        table(["configs", "weights from", "switch in s", "reading alone in s", "compiled"], switched),
    ]
    columns = ("kv_dtype", "interval", "goodput", "good_share", "ttft_p50_ms", "errors")
    if turns := [row for row in result["rows"] if row["figure"] == "two_models"]:
        lines = [[row["server"], *(str(row[name]) for name in columns)] for row in turns]
        lines = [[server, kv_dtype.replace("None", "float32"), *rest] for server, kv_dtype, *rest in lines]
        sections += [
            "Bursts of 16 requests of 64 tokens for 64 more, for two models in turn; a request is good if its first "
            "token comes within 4 s.",
            table(["server", "KV cache", "s between bursts", "good/s", "share", "TTFT p50 in ms", "errors"], lines),
        ]
    return [*sections, checks_table(result)]


def checks_table(result: Result, names: Mapping[str, str] = CHECKS) -> str:
    """Write every check with a name here, its target, and whether it was met."""
    checks = [Check(**check) for check in result["checks"] if check["name"] in names]
    lines = []
    for check in checks:
        unit = SHORT_UNITS.get(check.unit.partition(" ")[0], f" {check.unit}")
        sign = "≥" if check.better == "higher" else "≤"
        lines.append([names[check.name], f"{check.value:.3g}{unit}", f"{sign} {check.target:g}{unit}", check.verdict])
    return table(["check", "value", "target", ""], lines)


SHAPES = [f"cpu_decode-{model}" for model in MODELS if model != OWN_MODEL]
"""The results of `benchmarks.cpu_decode --model`."""
SECTIONS: dict[str, Callable[[Result], list[str]]] = {
    **dict.fromkeys(("cpu_decode", *SHAPES), decode_section),
    "engine": engine_section,
    "quality": quality_section,
    "gguf_quality": gguf_section,
    "held_out": held_out_section,
    "families_speed": families_speed_section,
    "streaming": streaming_section,
    "start": start_section,
    "moe": moe_section,
    "pipeline": pipeline_section,
    "deepspeed_figures": planner_section,
    "planner": simulator_section,
    "kv_tier": kv_tier_section,
    "serving": serving_section,
    "serving_models": serving_models_section,
}
"""Paragraphs of each command `benchmarks.NAME`, whose result is NAME.json."""
PAGES = {
    "language-models.md": ("cpu_decode", *SHAPES, "engine", "quality", "gguf_quality"),
    "larger-than-memory.md": ("streaming",),
    "start.md": ("start",),
    "families.md": ("held_out", "families_speed"),
    "mixtures.md": ("moe",),
    "pipeline.md": ("pipeline",),
    "planner.md": ("deepspeed_figures", "planner"),
    "kv-tiers.md": ("kv_tier",),
    "serving.md": ("serving",),
    "serving-models.md": ("serving_models",),
}
"""The sections of each page."""


def short(commit: str) -> str:
    """Shorten a commit from `report.commit`."""
    name, changed, _ = commit.partition("+")
    return name[:10] + (" with changes" if changed else "")


def source(command: str, result: Result) -> str:
    """Write the source of a section's figures: command, commit, date and versions."""
    text, others = short(result["commit"]), defaultdict(list)
    for row in result["rows"]:
        if row.get("commit", result["commit"]) != result["commit"]:
            others[row["commit"]].append(row["part"])
    text += "".join(f" (but {', '.join(parts)}: commit {short(commit)})" for commit, parts in others.items())
    peers = dict.fromkeys(peer for name, peer in result["versions"].items() if " " in peer and name != "python")
    versions = ", ".join([f"jax {result['versions']['jax']}", *peers])
    return f"`benchmarks.{command.replace('-', ' --model ', 1)}`, commit {text}, {result['date']}; {versions}."


def render(results: Path, names: Iterable[str]) -> str:
    """Write the sections `names` and the markers around them: a heading per machine that has results of theirs."""
    names, parts = tuple(names), []
    for folder in sorted(path for path in results.iterdir() if path.is_dir()):
        files = {name: folder / f"{name}.json" for name in names}
        read = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
        if not read:
            continue
        kinds = sorted({machine_kind(result["machine"]) for result in read.values()})
        if len(kinds) != 1:
            raise SystemExit(f"{folder} should have results of one kind of machine; it has {kinds}.")
        parts.append(f"## {machine_text(next(iter(read.values()))['machine'])}")
        for name, result in read.items():
            text, *rest = SECTIONS[name](result)
            paragraphs = [f"{text} {source(name, result)}", *rest]
            parts += (text if text.startswith("|") else wrapped(text) for text in paragraphs)
    return "\n\n".join([BEGIN, *parts, END])


def insert(page: str, tables: str) -> str:
    """Put new tables between the page's markers, their first and last lines. Exits if it does not have them."""
    first, *_, last = tables.splitlines()
    before, begin, rest = page.partition(first)
    _, end, after = rest.partition(last)
    if not (begin and end):
        raise SystemExit(f"The page lacks the lines between which the tables stand: {first!r} and {last!r}.")
    return before + tables + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into the pages")
    args = parser.parse_args()
    pages = {FOLDER / name: render(RESULTS, sections) for name, sections in PAGES.items()}
    for page, tables in (pages | {families.PAGE: families.render()}).items():
        if args.write:
            page.write_text(insert(page.read_text(), tables))
            print(f"Wrote {page}")
        else:
            print(tables)


if __name__ == "__main__":
    main()
