"""The names of checks in the pages, and the table of them."""

from collections.abc import Mapping

from benchmarks.pages.tables import Result, table
from benchmarks.report import Check

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
SHORT_UNITS = {"": "", "x": "x", "of": ""}
"""Replacements of a unit's first word, as the table's names say of what."""


def checks_table(result: Result, names: Mapping[str, str] = CHECKS) -> str:
    """Write every check with a name here, its target, and whether it was met."""
    checks = [Check(**check) for check in result["checks"] if check["name"] in names]
    lines = []
    for check in checks:
        unit = SHORT_UNITS.get(check.unit.partition(" ")[0], f" {check.unit}")
        sign = "≥" if check.better == "higher" else "≤"
        lines.append([names[check.name], f"{check.value:.3g}{unit}", f"{sign} {check.target:g}{unit}", check.verdict])
    return table(["check", "value", "target", ""], lines)
