"""The section about mixtures of experts."""

from collections import defaultdict
from typing import Any

from benchmarks.pages.checks import checks_table
from benchmarks.pages.tables import Result, engine_name, table


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
