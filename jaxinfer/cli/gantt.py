"""The schedules that `jaxinfer plan --gantt` draws: those of the paper's Figs. 2 and 3, and chunks of a prompt."""

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from jaxinfer.sharding.schedules import Schedule

TERMINAL = Path("-")
"""Instead of a file: schedules are drawn in the terminal alone."""
MOST_SLOTS = 20_000
"""Ticks of all stages of a schedule that is drawn."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GanttOptions:
    """Sizes of the schedules; by default those of Fig. 2.

    Attributes:
      stages: how many the pipeline has.
      micro_batches: of generation, and of prompts in Fig. 2; None: as many as there are stages.
      prompt_micro_batches: of prompts in Fig. 3, which is drawn if it is given.
      tokens: of each sequence; the first is made of the prompt.
      prompt_time: what a stage takes for all prompts, in passes of a micro-batch of generation; None: a micro-batch of
        prompts takes one (in Fig. 3 if there are as many as of the kind that has more), and so does a chunk.
      chunks: of one prompt; they are drawn if it is given.
      prompt_tokens: of that prompt.
      attention_context: tokens of context with which a token's attention takes as long as all else.
    """

    stages: int = 4
    micro_batches: int | None = None
    prompt_micro_batches: int | None = None
    tokens: int = 3
    prompt_time: float | None = None
    chunks: int | None = None
    prompt_tokens: int = 32_768
    attention_context: int = 24_576

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"GanttOptions.{name} must be a number above 0, got {value}.")
        generation, prompts = self.generation, self.prompt_micro_batches
        if prompts == generation:
            raise ValueError(
                f"GanttOptions.prompt_micro_batches={prompts} must differ from the micro-batches of generation; "
                "set another number, or leave it out."
            )
        slots = self.stages * (self.tokens * max(generation, self.stages, prompts or 0) + (self.chunks or 0))
        if slots > MOST_SLOTS:
            raise ValueError(
                f"--gantt: {slots:,} ticks of stages are too many to draw, the maximum is {MOST_SLOTS:,}; "
                "lower --tokens, --chunks or micro-batches."
            )

    @property
    def generation(self) -> int:
        """Micro-batches of generation."""
        return self.stages if self.micro_batches is None else self.micro_batches

    def schedules(self) -> "dict[str, Schedule]":
        """Return the schedules by what they are called."""
        return self._queueing() | self._hybrids() | self._chunks()

    def _queueing(self) -> "dict[str, Schedule]":
        from jaxinfer.sharding.schedules import drained, queued

        sizes = self.stages, self.generation, self.tokens
        return {
            "drained after each token (Fig. 2a)": drained(*sizes, prompt_units=self.prompt_time),
            "generated tokens queued (Fig. 2b)": queued(*sizes, prompt_units=self.prompt_time),
        }

    def _hybrids(self) -> "dict[str, Schedule]":
        from jaxinfer.sharding.schedules import hybrid

        prompts, generation = self.prompt_micro_batches, self.generation
        if prompts is None:
            return {}
        units = float(max(prompts, generation)) if self.prompt_time is None else self.prompt_time
        counts = {(generation, generation): "both", (prompts, prompts): "both", (prompts, generation): "hybrid"}
        return {
            f"{kind}: {count[0]} micro-batches of prompts, {count[1]} of generation (Fig. 3)": hybrid(
                self.stages, *count, self.tokens, prompt_units=units
            )
            for count, kind in counts.items()
        }

    def _chunks(self) -> "dict[str, Schedule]":
        from jaxinfer.sharding.schedules import chunk_costs, chunk_sizes, chunked

        if self.chunks is None:
            return {}
        drawn, per_pair = {}, 1 / self.attention_context
        for kind, grow in (("tokens", 0.0), ("time", per_pair)):
            sizes = chunk_sizes(self.prompt_tokens, self.chunks, per_pair=grow)
            costs = chunk_costs(sizes, per_pair=per_pair)
            unit = sum(costs) / (self.prompt_time or self.chunks)
            name = f"chunks of equal {kind}, {sizes[0]:,} to {sizes[-1]:,} tokens"
            drawn[name] = chunked(self.stages, [cost / unit for cost in costs])
        return drawn


def draw(file: Path, options: GanttOptions) -> None:
    """Draw schedules in the terminal, and into a file unless it is TERMINAL."""
    from jaxinfer.cli.display import show
    from jaxinfer.evaluation import gantt

    schedules = options.schedules()
    show(gantt.TerminalGantt(schedules))
    if file != TERMINAL:
        from jaxinfer.evaluation.figures import write_figure

        write_figure(file, gantt.draw_schedules(schedules))
        typer.echo(f"Wrote {file}", err=True)
