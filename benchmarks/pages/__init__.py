"""The tables of pages in `docs/benchmarks`, from the results in `benchmarks/results`; and docs/families.md.

    python -m benchmarks.pages            # prints them
    python -m benchmarks.pages --write    # puts them into the pages (`PAGES`), between their two markers

A folder of results is one kind of machine, with the files that the commands below (`SECTIONS`) wrote there. A new
result replaces one file; the other machines' stay as they are.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.pages.language_models import (
    decode_section,
    engine_section,
    families_speed_section,
    gguf_section,
    held_out_section,
    quality_section,
    start_section,
    streaming_section,
)
from benchmarks.pages.mixtures import moe_section
from benchmarks.pages.pipeline import pipeline_section
from benchmarks.pages.planner import planner_section, simulator_section
from benchmarks.pages.serving import kv_tier_section, serving_models_section, serving_section
from benchmarks.pages.tables import Result
from benchmarks.prose import wrapped
from benchmarks.report import ROOT, machine_kind, machine_text
from benchmarks.workers import MODELS, OWN_MODEL

RESULTS, FOLDER = ROOT / "benchmarks/results", ROOT / "docs/benchmarks"
BEGIN = "<!-- Written by `python -m benchmarks.pages --write`, from benchmarks/results. -->"
END = "<!-- End of what benchmarks.pages writes. -->"
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
