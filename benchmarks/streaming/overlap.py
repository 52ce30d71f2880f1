"""How much of fetching computing hides, and the other way round."""

import math
import statistics
from pathlib import Path

from benchmarks.report import Report
from benchmarks.streaming.ours import CAP, run_ours
from benchmarks.streaming.settings import Settings


def overlap(report: Report, settings: Settings) -> None:
    """With as many tokens a pass as make computing a layer take about as long as fetching it."""
    model = settings.large_model()
    sizes = (64, 128) if settings.quick else (32, 64, 96)
    serial = {tokens: of_tokens(model, tokens, prefetch=0) for tokens in sizes}
    tokens = min(sizes, key=lambda tokens: abs(math.log(serial[tokens]["compute"] / serial[tokens]["fetch"])))
    overlaps, gains = [], []
    for _ in range(settings.rounds):
        alone, ahead = of_tokens(model, tokens, prefetch=0), of_tokens(model, tokens, prefetch=1)
        overlaps.append(ahead["overlap"])
        gains.append(max(alone["fetch"], alone["compute"]) / ahead["layer"])
        report.row(figure="overlap", tokens=tokens, prefetch=0, **alone)
        report.row(figure="overlap", tokens=tokens, prefetch=1, **ahead)
    report.check("overlap_depth1", statistics.median(overlaps), "of the shorter one", target=0.85)
    report.check("throughput_of_model", statistics.median(gains), "of 1 / max(fetch, compute)", target=0.9)


def of_tokens(model: Path, tokens: int, *, prefetch: int) -> dict[str, float]:
    """Seconds a layer, over the second and third pass of so many prompt tokens each."""
    sizes = {"batch": tokens // 16, "prompt": 48, "passes": 1, "chunk_size": 16, "token_budget": tokens}
    found = run_ours(model, 4 * CAP, prefetch=prefetch, **sizes)
    layers, fetches = found["layers"], round(found["bytes"]["disk"] / found["layer_bytes"])
    return {
        "fetch": round(found["fetch_seconds"] / fetches, 5),
        "compute": round(found["compute_seconds"] / layers, 5),
        "layer": round(sum(found["seconds"][1:]) / layers, 5),
        "overlap": round(found["overlap"], 4),
    }
