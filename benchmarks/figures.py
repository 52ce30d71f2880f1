"""The figures of docs/, drawn again from the results in `benchmarks/results` and from schedules: nothing is run.

python -m benchmarks.figures
"""

import json
from pathlib import Path

from benchmarks.coserve import plots as coserve
from benchmarks.deepspeed_figures.plots import draw as draw_deepspeed
from benchmarks.moe.plots import draw_exchange
from benchmarks.otas import figures as otas
from benchmarks.pages import RESULTS
from benchmarks.pipeline.plots import draw_rings
from benchmarks.report import ROOT
from benchmarks.streaming.curve import draw_curves
from jaxinfer.cli.gantt import GanttOptions
from jaxinfer.evaluation.figures import write_figure
from jaxinfer.evaluation.gantt import draw_schedules

DOCS = ROOT / "docs"
MACHINE, OTHER_MACHINE = "amd-avx512", "intel-amx"
"""The results that are drawn: folders of `benchmarks/results`. The second has mixtures, predictions, and peers that
stream."""
SCHEDULES = GanttOptions(prompt_micro_batches=8, chunks=8)
"""Those that docs/pipeline.md draws by `jaxinfer plan --gantt`."""


def draw(docs: Path) -> None:
    """Write all figures below a folder."""

    def read(machine: str, name: str) -> dict:
        return json.loads((RESULTS / machine / f"{name}.json").read_text())

    for name in ("coserve-simulated", "coserve-real"):
        coserve.draw_all(read(MACHINE, name), docs / "coserve")
    for name in ("otas-shown", "otas-replayed", "otas"):  # the last, which was measured, draws the setting again
        otas.draw_all(read(MACHINE, name), docs / "otas")
    curves = draw_curves([read(machine, "streaming") for machine in (MACHINE, OTHER_MACHINE)])
    write_figure(docs / "streaming-batch.svg", curves)
    write_figure(docs / "benchmarks" / "expert-exchange.svg", draw_exchange(read(OTHER_MACHINE, "moe")))
    planned = draw_deepspeed(read(OTHER_MACHINE, "deepspeed_figures"))
    write_figure(docs / "benchmarks" / "deepspeed-figures.svg", planned)
    write_figure(docs / "pipeline-schedules.svg", draw_schedules(SCHEDULES.schedules()))
    write_figure(docs / "pipeline-ring.svg", draw_rings(read(MACHINE, "pipeline")))


if __name__ == "__main__":
    draw(DOCS)
