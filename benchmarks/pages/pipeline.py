"""The section about pipelines."""

from typing import Any

from benchmarks.pages.checks import CHECKS, PIPELINE_CHECKS, checks_table
from benchmarks.pages.tables import Result, table


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
