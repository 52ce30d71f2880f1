"""`jaxinfer chat`: a conversation in the terminal, or by one turn a line of standard input."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxinfer.cli.common import (
    AdapterOption,
    ContextOption,
    DeviceMemoryOption,
    DiskKVLimitOption,
    DiskKVOption,
    DtypeOption,
    HostKVOption,
    HostMemoryOption,
    KernelsOption,
    KVDtypeOption,
    KVOffloadOption,
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
    sampling_options,
)
from jaxinfer.progress import long_work

if TYPE_CHECKING:
    from jaxinfer.cli.conversation import Conversation


def chat(
    ctx: typer.Context,
    model: ModelArgument,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="File with a Jinja chat template (default: the model's).")
    ] = None,
    chat_template_kwargs: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="Arguments of the chat template as a JSON object, such as '{\"enable_thinking\": false}'.",
        ),
    ] = None,
    hide_thinking: Annotated[bool, typer.Option("--hide-thinking", help="Do not show the model's reasoning.")] = False,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    repetition_penalty: RepetitionPenaltyOption = None,
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
    host_kv: HostKVOption = None,
    disk_kv: DiskKVOption = None,
    disk_kv_limit: DiskKVLimitOption = None,
    kv_offload: KVOffloadOption = None,
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
        from jaxinfer.generation import SamplingParams
        from jaxinfer.hub import resolve
        from jaxinfer.text.chat_template import ChatTemplates

        options = sampling_options(ctx)
    arguments = None if chat_template_kwargs is None else _template_arguments(chat_template_kwargs)
    template = None if chat_template is None else read_text("--chat-template", chat_template)
    folder = resolve(model)
    _require_decoder(model, folder)
    if template is None and not ChatTemplates(folder).names:
        raise ValueError(
            f"{model} has no chat template, so it may not be a chat model: pass one with --chat-template FILE, or "
            "continue texts with jaxinfer generate."
        )
    llm = load_llm(ctx, max_batch=1)
    talk = Conversation(
        llm,
        SamplingParams.from_model(llm, chat=True, **options),
        system=system,
        hide_thinking=hide_thinking,
        chat_template=template,
        chat_template_kwargs=arguments,
    )
    if sys.stdin.isatty() and sys.stdout.isatty():
        _converse(talk)
    else:
        _take_all(talk)


def _converse(talk: "Conversation") -> None:
    """Take the lines that are typed; after an error or Ctrl-C the conversation goes on."""
    note("/help lists commands; Ctrl-D exits.")
    for line in _typed_lines():
        try:
            if not talk.take(line):
                return
        except (ValueError, TypeError, OSError) as error:
            typer.echo(f"error: {error}", err=True)
        except KeyboardInterrupt:
            note("[stopped]")


def _take_all(talk: "Conversation") -> None:
    """Take the lines of standard input."""
    for line in sys.stdin:
        if not talk.take(line.rstrip("\n")):
            return


def _template_arguments(text: str) -> dict[str, Any]:
    """Read `--chat-template-kwargs`."""
    from jaxinfer.text.chat_template import check_arguments

    try:
        return check_arguments(json.loads(text))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"--chat-template-kwargs {text}: not JSON ({error}); write for example '{{\"enable_thinking\": false}}'."
        ) from error
    except ValueError as error:
        raise ValueError(f"--chat-template-kwargs {text}: {error}") from error


def _require_decoder(model: Path, folder: Path) -> None:
    """Raise ValueError for a model that cannot chat at all, of whose template nothing need be said."""
    from jaxinfer.models import DecoderConfig
    from jaxinfer.models.files.description import Description, require_transformer

    description = Description.read(folder)
    if not isinstance(require_transformer(model, description.config), DecoderConfig) or not description.generates:
        kind = "an encoder" if description.generates else "a decoder without a head"
        raise ValueError(f"{model} is {kind}, which writes no text; compute vectors with jaxinfer embed.")


def _typed_lines() -> Iterator[str]:
    """Yield the lines that are typed, until Ctrl-D or Ctrl-C at the prompt."""
    import readline  # noqa: F401 (lets `input` edit the line, and go back to earlier ones)

    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        yield line
