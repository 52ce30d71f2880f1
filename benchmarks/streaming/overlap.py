"""Overlap of fetching and computing: how much of each hides the other."""

import statistics
from pathlib import Path

from benchmarks.report import Report
from benchmarks.streaming.ours import CAP, run_ours
from benchmarks.streaming.settings import Settings

POINTS = {"half": 0.5, "balance": 1.0}
"""Points at which overlap is measured: computing a layer, as a share of fetching it."""
CHUNK, CHUNKS = 16, 3
FIRST_TOKENS = 96


def overlap(report: Report, settings: Settings) -> None:
    """Compare one prefetched layer with none, where computing takes half as long as fetching, and as long.

    Fetching and computing are measured one after the other, without prefetching. The hidden share is the time that
    prefetching saves per layer, relative to the shorter of the two.
    """
    model = settings.large_model()
    for point, share in POINTS.items():
        tokens = tokens_for(model, share)
        rounds = []
        for _ in range(settings.rounds):
            serial, ahead = of_tokens(model, tokens, prefetch=0), of_tokens(model, tokens, prefetch=1)
            report.row(figure="overlap", point=point, tokens=tokens, prefetch=0, **serial)
            report.row(figure="overlap", point=point, tokens=tokens, prefetch=1, **ahead)
            both = serial["fetch"], serial["compute"]
            hidden, throughput = (serial["layer"] - ahead["layer"]) / min(both), max(both) / ahead["layer"]
            rounds.append((*both, serial["layer"], ahead["layer"], hidden, throughput))
        names = ("fetch", "compute", "serial", "ahead", "hidden", "throughput")
        medians = dict(zip(names, map(statistics.median, zip(*rounds, strict=True)), strict=True))
        shown = {name: round(value, 5) for name, value in medians.items()}
        report.row(figure="overlapped", point=point, tokens=tokens, **shown)
        report.check(f"hidden_{point}", medians["hidden"], "of the shorter one", target=0.85)
        report.check(f"throughput_{point}", medians["throughput"], "of 1 / max(fetch, compute)", target=0.9)


def tokens_for(model: Path, share: float) -> int:
    """Find the tokens a pass, in whole chunks, for which computing a layer takes this share of fetching it."""
    tokens = FIRST_TOKENS
    for _ in range(2):  # computing is not quite proportional to tokens, so the first measurement is only approximate
        result = of_tokens(model, tokens, prefetch=0)
        tokens = CHUNK * max(1, round(share * result["fetch"] / result["compute"] * tokens / CHUNK))
    return tokens


def of_tokens(model: Path, tokens: int, *, prefetch: int) -> dict[str, float]:
    """Measure the seconds a layer, over the second and third pass of `tokens` prompt tokens each."""
    sizes = {"batch": tokens // CHUNK, "prompt": CHUNK * CHUNKS, "passes": 1, "chunk_size": CHUNK}
    result = run_ours(model, 4 * CAP, prefetch=prefetch, token_budget=tokens, **sizes)
    layers, fetches = result["layers"], round(result["bytes"]["disk"] / result["layer_bytes"])
    return {
        "fetch": round(result["fetch_seconds"] / fetches, 5),
        "compute": round(result["compute_seconds"] / layers, 5),
        "layer": round(sum(result["seconds"][1:]) / layers, 5),
        "overlap": round(result["overlap"], 4),
    }
