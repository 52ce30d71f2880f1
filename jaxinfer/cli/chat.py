"""`jaxinfer chat`: a conversation in the terminal, or by one turn a line of standard input."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from jaxinfer.cli.common import (
    AdapterOption,
    ContextOption,
    DeviceMemoryOption,
    DtypeOption,
    HostMemoryOption,
    KernelsOption,
    KVDtypeOption,
    LayerFilesOption,
    MaxTokensOption,
    MeshOption,
    MinPOption,
    ModelArgument,
    PrefetchOption,
    QuantizeOption,
    RepetitionPenaltyOption,
    SeedOption,
    SpeculationOption,
    StopOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    WeightsOption,
    load_llm,
    note,
    read_text,
    sampling_params,
)
from jaxinfer.progress import long_work


def chat(
    ctx: typer.Context,
    model: ModelArgument,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="File with a Jinja chat template (default: the model's).")
    ] = None,
    max_tokens: MaxTokensOption = 512,
    temperature: TemperatureOption = 0.8,
    top_k: TopKOption = 0,
    top_p: TopPOption = 0.95,
    min_p: MinPOption = 0.0,
    repetition_penalty: RepetitionPenaltyOption = 1.0,
    stop: StopOption = None,
    seed: SeedOption = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    mesh: MeshOption = None,
    context: ContextOption = None,
    num_speculative_tokens: SpeculationOption = 0,
    kv_dtype: KVDtypeOption = None,
    kernels: KernelsOption = True,
    weights: WeightsOption = None,
    device_memory: DeviceMemoryOption = None,
    host_memory: HostMemoryOption = None,
    prefetch: PrefetchOption = None,
    layer_files: LayerFilesOption = None,
    adapter: AdapterOption = None,
) -> None:
    """Chat with a model in the terminal.

    Each line is a turn; commands begin with a slash (/help lists them). Ctrl-C during an answer stops it and keeps the
    text so far. Ctrl-C or Ctrl-D at the prompt exits. Without a terminal, each line of standard input is a turn,
    answers go to standard output, and the first error exits.
    """
    with long_work(f"loading {model}"):
        from jaxinfer.cli.conversation import Conversation
        from jaxinfer.generation.chat_template import ChatTemplates
        from jaxinfer.hub import resolve

        params = sampling_params(ctx)
    template = None if chat_template is None else read_text("--chat-template", chat_template)
    folder = resolve(model)
    if template is None and not ChatTemplates(folder).names:
        raise ValueError(
            f"{model} has no chat template, so it may not be a chat model: pass one with --chat-template FILE, or "
            "continue texts with jaxinfer generate."
        )
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    talk = Conversation(load_llm(ctx, max_batch=1), params, system=system, chat_template=template)
    if interactive:
        note("/help lists commands; Ctrl-D exits.")
    for line in _lines(interactive):
        try:
            if not talk.take(line):
                return
        except (ValueError, TypeError, OSError) as error:
            if not interactive:
                raise
            typer.echo(f"error: {error}", err=True)
        except KeyboardInterrupt:
            if not interactive:
                raise
            note("[stopped]")


def _lines(interactive: bool) -> Iterator[str]:
    """Yield the lines that are typed, until Ctrl-D or Ctrl-C at the prompt; or those of standard input."""
    if not interactive:
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    import readline  # noqa: F401 (lets `input` edit the line, and go back to earlier ones)

    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        yield line
