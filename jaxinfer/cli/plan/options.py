"""The options of `jaxinfer plan` that plan for other devices, and those that draw schedules."""

from pathlib import Path
from typing import Annotated

import typer

DevicesOption = Annotated[
    str | None, typer.Option(help='Rank meshes of devices that need not be here, such as "h200:8".')
]
NamedOption = Annotated[
    str | None, typer.Option("--model", help="With --devices: a model that the planner knows, such as lm-175b.")
]
BatchOption = Annotated[int | None, typer.Option(help="With --devices: requests at the same time (default: 1).")]
PromptOption = Annotated[int | None, typer.Option(help="With --devices: tokens of each prompt (default: 512).")]
GenerateOption = Annotated[int | None, typer.Option(help="With --devices: tokens to generate (default: 128).")]
HitRateOption = Annotated[
    float | None,
    typer.Option(
        help="With --devices: share of each prompt that came before, and that devices forgot (default: 0). Ranks tiers "
        "of the KV cache, which read it back."
    ),
]
ByOption = Annotated[
    str | None, typer.Option(help="With --devices: throughput, ttft or tpot, which ranks (default: throughput).")
]
PriceOption = Annotated[
    float | None, typer.Option(help="With --devices: dollars per device and hour (default: a market price).")
]
WriteOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="With --devices: write the best mesh into this TOML file.")
]
PlotOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="With --devices: draw the plans into this .svg or .png file.")
]
TraceOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="With --devices: size a fleet for the arrivals of a trace.")
]
RateOption = Annotated[float | None, typer.Option(help="With --trace: requests/s of the fleet (default: the trace's).")]
SloOption = Annotated[
    str | None, typer.Option(help='With --trace: the latency of 99% of requests, such as "ttft=500ms,tpot=50ms".')
]
GanttOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Draw pipeline schedules in the terminal and into this .svg or .png file; -: in the terminal only.",
    ),
]
MicroBatchesOption = Annotated[
    int | None, typer.Option(help="With --gantt: micro-batches of generation (default: one per stage).")
]
PromptMicroBatchesOption = Annotated[
    int | None,
    typer.Option(help="With --gantt: micro-batches of prompts; draws hybrid scheduling too."),
]
TokensOption = Annotated[int | None, typer.Option(help="With --gantt: tokens per sequence (default: 3).")]
PromptTimeOption = Annotated[
    float | None,
    typer.Option(
        help="With --gantt: time of all prompts on one stage, in passes of generation (default: 1 per micro-batch)."
    ),
]
ChunksOption = Annotated[
    int | None, typer.Option(help="With --gantt: chunks of one long prompt; draws their schedules too.")
]
PromptTokensOption = Annotated[int | None, typer.Option(help="With --chunks: tokens of the prompt (default: 32,768).")]
AttentionContextOption = Annotated[
    int | None,
    typer.Option(help="With --chunks: context at which attention takes as long as the rest (default: 24,576)."),
]
