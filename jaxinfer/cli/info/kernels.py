"""The implementations that a model's operations would run with."""

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from jaxinfer.compiled import ProgramSpec
    from jaxinfer.compiled.cpu_library import LibraryState
    from jaxinfer.models import EncoderConfig, TransformerConfig, WeightFormat
    from jaxinfer.pallas_kernels.implementation import Implementation
    from jaxinfer.pallas_kernels.target import GPU

TOKENS = 128
"""The length of the texts for which an encoder is looked at."""


def print_kernels(
    config: "TransformerConfig", weights: "WeightFormat", gpu: "GPU | None", *, batch: int, context: int
) -> None:
    """Print the operations of a model's programs, each with the implementations that are chosen for it.

    Programs are traced, and nothing is compiled. gpu: the GPU that they would run on; None: this machine's CPU.
    """
    import jax

    from jaxinfer.cli.display import show, table
    from jaxinfer.compiled.choices import stored_choices
    from jaxinfer.compiled.cpu_library import cpu_library, library_state
    from jaxinfer.pallas_kernels.choices import use_choices
    from jaxinfer.pallas_kernels.cpu.library import use_library
    from jaxinfer.pallas_kernels.dispatch import recorded_implementations, recorded_refusals
    from jaxinfer.pallas_kernels.target import targeting

    traced: dict[str, Mapping[str, Mapping[Implementation, None]]] = {}
    reasons: dict[str, None] = {}
    library = None if gpu else cpu_library()
    device = targeting(gpu) if gpu else use_choices(stored_choices())
    for name, (function, arguments) in _programs(config, weights, "gpu" if gpu else "cpu", batch, context).items():
        with device, use_library(library), _quiet(), recorded_implementations() as used, recorded_refusals() as refused:
            jax.eval_shape(function, *arguments)
        traced[name] = used
        reasons |= dict.fromkeys(f"No kernel in {name}: {reason}." for reason in refused.values())
    rows = table("operation", *traced, title=f"implementations on {gpu.name if gpu else 'this CPU'}")
    for operation in dict.fromkeys(operation for used in traced.values() for operation in used):
        rows.add_row(operation, *(", ".join(map(_text, used.get(operation, ()))) for used in traced.values()))
    show(rows)
    typer.echo("composed: of other operations; xla, reference: no kernel; ffi: a kernel in C++.")
    for reason in reasons:
        typer.echo(reason)
    if not gpu:
        _print_library(library_state())


def _print_library(state: "LibraryState") -> None:
    """Print which CPU kernels run on this machine, and up to how many rows; or why there are none."""
    from jaxinfer.cli.display import show, table
    from jaxinfer.pallas_kernels.cpu.library import DEFAULT_ROWS

    rows = table("CPU kernels", str(state))
    if state.verdicts:
        rows.add_row("compared with XLA", ", ".join(f"{level} {verdict}" for level, verdict in state.verdicts.items()))
    if state.library is not None:
        names = {"uint16": "int4"}
        limits = ", ".join(f"{names.get(dtype, dtype)} {most}" for dtype, most in state.library.limits)
        rows.add_row("operations compared", ", ".join(state.operations))
        rows.add_row("rows, at most", limits or f"{DEFAULT_ROWS}, not measured")
        rows.add_row("file", str(state.file))
    show(rows)


@contextlib.contextmanager
def _quiet() -> "Iterator[None]":
    """Let kernels log nothing of what the table says."""
    log = logging.getLogger("jaxinfer.kernels")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _text(implementation: "Implementation") -> str:
    return f"{implementation.name} (cpu)" if implementation.platform == "cpu" else implementation.name


def _programs(
    config: "TransformerConfig", weights: "WeightFormat", platform: str, batch: int, context: int
) -> "dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]":
    """Return an engine's programs for a full batch, and for a chunk of a prompt: functions and their arguments."""
    from jaxinfer.generation.engine.config import EngineConfig
    from jaxinfer.generation.execution.layout import DeviceLayout
    from jaxinfer.generation.execution.programs import decode, prefill
    from jaxinfer.models import DecoderConfig

    if not isinstance(config, DecoderConfig):
        tokens = min(TOKENS, context)
        return {f"embed, {batch} x {tokens} tokens": _embed(config, weights, batch, tokens)}
    engine = EngineConfig(max_batch=batch, context=context)
    pages = engine.pages_per_sequence
    layout = DeviceLayout(config, weights, engine, num_pages=batch * pages, platform=platform)
    programs: dict[str, tuple[ProgramSpec[Any, Any], Any]] = {
        f"decode, batch {batch}": (decode.spec(layout), decode.Decode(batch=batch, speculative=0, pages=pages)),
        f"prefill, {engine.chunk_size} tokens": (
            prefill.spec(layout),
            prefill.Prefill(chunks=1, batch=0, pages=pages),
        ),
    }
    return {name: (spec.function(sizes), spec.arguments(sizes)) for name, (spec, sizes) in programs.items()}


def _embed(
    config: "EncoderConfig", weights: "WeightFormat", batch: int, tokens: int
) -> "tuple[Callable[..., Any], tuple[Any, ...]]":
    import jax
    import jax.numpy as jnp

    from jaxinfer.generation.execution.layout import integers
    from jaxinfer.generation.execution.programs import embed
    from jaxinfer.models.leaves import canonical_leaves
    from jaxinfer.sharding import ShardingRules

    leaves = [jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype)) for x in canonical_leaves(config, weights).values()]
    static = embed.EncoderStatic(config, weights, ShardingRules())
    function = embed.build(static, embed.Embed(batch=batch, tokens=tokens))
    return function, (leaves, integers(batch, tokens), integers(batch, tokens))
