"""The figure of what the stages of compiled rings worked on."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxinfer.evaluation.gantt import draw_schedules
from jaxinfer.sharding.schedules import Job, Phase, Schedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = {
    "drained": "drained after each token (Fig. 2a)",
    "queued": "queued tokens (Fig. 2b)",
    "chunks": "chunks of one prompt",
}


def _generation(micro_batch: int, number: int) -> Job:
    return Job(micro_batch, Phase.GENERATION, number)


def _chunk(chunk: int, _: int) -> Job:
    return Job(0, Phase.PROMPT, 0, chunk)


def draw_rings(result: Mapping[str, Any]) -> "Figure":
    """Draw the ticks that rings recorded, as `benchmarks.pipeline` wrote them."""
    rings = {row["schedule"]: row["ticks"] for row in result["rows"] if row["figure"] == "ring"}
    drawn = {
        NAMES[name]: Schedule.from_ring(rings[name], _chunk if name == "chunks" else _generation)
        for name in NAMES
        if name in rings
    }
    caption = (
        "What the stages of compiled rings recorded, tick by tick, on virtual CPU devices: four micro-batches get "
        f"three tokens each; eight chunks; {result['date']}, commit {result['commit'][:10]}"
    )
    return draw_schedules(drawn, caption)
