"""Sections about language models: their speed, the quality of their formats, and their families."""

from typing import Any

from benchmarks.pages.checks import checks_table
from benchmarks.pages.tables import OURS, Result, best, engine_name, table
from benchmarks.streaming.summary import summary
from benchmarks.workers import OWN_MODEL


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
