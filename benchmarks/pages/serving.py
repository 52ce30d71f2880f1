"""Sections about servers and the tiers of the KV cache."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from benchmarks.pages.checks import checks_table
from benchmarks.pages.tables import Result, table


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
