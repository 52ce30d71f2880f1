"""Options of the bench commands, checked before a model is loaded."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from jaxinfer.models import DecoderConfig

PROMPT_TOKENS, REQUESTS = 128, 64  # without --prompts-file

RequestsOption = Annotated[
    int | None,
    typer.Option(
        min=1, help=f"Number of requests (default: {REQUESTS}, or all prompts of the file).", show_default=False
    ),
]
PromptTokensOption = Annotated[
    int | None,
    typer.Option(
        min=1, help=f"Mean number of random tokens per prompt (default: {PROMPT_TOKENS}).", show_default=False
    ),
]
OutputTokensOption = Annotated[int, typer.Option(min=1, help="Tokens to generate per request; end-of-text is ignored.")]
SpreadOption = Annotated[
    float, typer.Option(help="Draw lengths uniformly from 1 - spread to 1 + spread times the mean.")
]
SeedOption = Annotated[int, typer.Option(min=0, help="Random seed of prompts and lengths.")]
JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Write metrics, settings and the machine as JSON to this file.")
]
PlotOption = Annotated[Path | None, typer.Option(help="Draw the measurement into this .png or .svg file.")]


def parse_batch_sizes(text: str) -> list[int]:
    """Return the distinct sizes in `--batch`, in the order given."""
    try:
        sizes = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise ValueError(f"--batch must be integers >= 1 separated by commas, got {text!r}.")
    return sizes


def check_spread(spread: float) -> None:
    """Raise ValueError if `--spread` is out of range."""
    if not 0 <= spread < 1:
        raise ValueError(f"--spread must be in [0, 1), got {spread}.")


def check_prompts_file(prompts_file: Path | None, prompt_tokens: int | None) -> None:
    """Raise ValueError for a file of prompts with `--prompt-tokens`, which is for random prompts."""
    if prompts_file is not None and prompt_tokens is not None:
        raise ValueError(
            f"--prompt-tokens {prompt_tokens} contradicts --prompts-file {prompts_file}: use only one of them."
        )


def read_config(directory: Path) -> "DecoderConfig":
    """Return the config of a decoder. Raises ValueError for an encoder."""
    from jaxinfer.hub import resolve
    from jaxinfer.models import DecoderConfig
    from jaxinfer.models.files.description import Description, require_transformer

    config = require_transformer(directory, Description.read(resolve(directory)).config)
    if not isinstance(config, DecoderConfig):
        raise ValueError(f"{directory} is an encoder; bench measures decoders.")
    return config


def check_context(config: "DecoderConfig", context: int | None) -> int:
    """Return the context to run with: `--context`, or the model's."""
    if context is not None and not 1 < context <= config.context:
        raise ValueError(f"--context must be in [2, {config.context}] for this model, got {context}.")
    return context or config.context


def check_length(prompt_tokens: int, output_tokens: int, context: int, which: str = "") -> None:
    """Raise ValueError, starting with `which`, if a request exceeds the context."""
    if prompt_tokens + output_tokens > context:
        raise ValueError(
            f"{which}{prompt_tokens} prompt and {output_tokens} output tokens exceed the context of {context}; "
            "lower one of them or raise --context."
        )
