"""`jaxinfer tune`: measure which implementations a model's operations are the fastest with on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxinfer.cli.common import DtypeOption, QuantizeOption

if TYPE_CHECKING:
    from rich.table import Table

    from jaxinfer.pallas_kernels.choices import Call


def tune(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Model directory.", show_default=False)],
    batch: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 8,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens per request (default: the model's).")] = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    forget: Annotated[bool, typer.Option("--forget", help="Delete what was measured on this machine instead.")] = False,
) -> None:
    """Time all implementations of the operations that a model's programs call, and keep which are the fastest.

    Later runs on this machine use them, for the same shapes and with the same version. Their programs are compiled
    anew, and numbers may differ in the last bits.
    """
    from rich.console import Console
    from rich.progress import track

    from jaxinfer.compiled.choices import forget_choices, measure_choices
    from jaxinfer.generation import LLM
    from jaxinfer.generation.execution.decoder import DecoderExecutor

    if forget:
        forget_choices()
        return
    console = Console()
    with (
        console.status("Tracing the model's programs"),
        LLM(directory, max_batch=batch, context=context, dtype=dtype, quantize=quantize) as llm,
    ):
        executor = llm.engine.executor
        assert isinstance(executor, DecoderExecutor), "an LLM has one"
        calls = executor.calls()
    rows = list(track(measure_choices(calls), "Measuring", total=len(calls), console=console, transient=True))
    if not rows:
        console.print(f"{directory}: every operation has a single implementation here; there is nothing to measure.")
        return
    console.print(_table(rows))


def _table(rows: "list[tuple[Call, dict[str, float]]]") -> "Table":
    from rich.table import Table

    from jaxinfer.pallas_kernels.choices import fastest

    table = Table("operation", "shapes", "microseconds", "later runs use")
    for call, seconds in rows:
        times = "\n".join(f"{name} {1e6 * taken:.0f}" for name, taken in seconds.items())
        table.add_row(call.operation, call.shapes, times, fastest(call, seconds))
    return table
