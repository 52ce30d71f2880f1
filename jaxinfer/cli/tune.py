"""`jaxinfer tune`: measure which implementations a model's operations are the fastest with on this machine."""

import re
from typing import TYPE_CHECKING, Annotated

import typer

from jaxinfer.cli.common import DtypeOption, ModelArgument, QuantizeOption, refuse_ignored
from jaxinfer.progress import long_work

if TYPE_CHECKING:
    from rich.table import Table

    from jaxinfer.pallas_kernels.choices import Call


def tune(
    ctx: typer.Context,
    model: ModelArgument,
    batch: Annotated[int, typer.Option(min=1, help="Number of requests in the batch.")] = 8,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens per request (default: the model's).")] = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Delete all measurements of this machine, and measure nothing.")
    ] = False,
) -> None:
    """Find the fastest kernels for a model here.

    It times all implementations of the model's operations on this machine, and remembers the fastest. Later runs on
    this machine use them for the same shapes, with the same version of jaxinfer. Their programs are compiled again, and
    results may differ in the last bits.
    """
    with long_work(f"loading {model}"):
        from jaxinfer.cli.display import show
        from jaxinfer.compiled.choices import forget_choices, measure_choices
        from jaxinfer.generation import LLM
        from jaxinfer.generation.execution.decoder import DecoderExecutor

    if forget:
        refuse_ignored(ctx, ["batch", "context", "dtype", "quantize"], "with --forget")
        forget_choices()
        return
    with (
        long_work("tracing the model's programs"),
        LLM(model, max_batch=batch, context=context, dtype=dtype, quantize=quantize, kernels=True) as llm,
    ):
        executor = llm.engine.executor
        assert isinstance(executor, DecoderExecutor), "an LLM has one"
        calls = executor.calls()
    rows = []
    try:
        with long_work("measuring calls", total=len(calls)) as work:
            for row in measure_choices(calls):
                rows.append(row)
                work.advance()
    finally:  # after Ctrl-C: what is measured, which is kept
        if rows:
            show(times_table(rows))
    if not rows:
        typer.echo(f"{model}: every operation has a single implementation here; there is nothing to measure.")


def times_table(rows: "list[tuple[Call, dict[str, float]]]") -> "Table":
    """Return a table of what implementations took in each call."""
    from jaxinfer.cli.display import figure, table
    from jaxinfer.pallas_kernels.choices import fastest

    times = table("operation", "shapes", "later runs\nuse", "timed", "µs", figures=1)
    for call, seconds in rows:
        shapes = ", ".join(part for part in re.split("[,;] ", call.shapes) if not part.endswith("None"))
        names, figures = "\n".join(seconds), "\n".join(figure(1e6 * taken) for taken in seconds.values())
        times.add_row(call.operation, shapes, fastest(call, seconds), names, figures)
    return times
