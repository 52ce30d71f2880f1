"""Options that several subcommands share."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import msgspec
import typer

from jaxinfer.progress import paused

if TYPE_CHECKING:
    from jaxinfer.generation import LLM, Request, RequestOutput, SamplingParams
    from jaxinfer.generation.api.build import ModelOptions
    from jaxinfer.generation.text import Prompt
    from jaxinfer.sharding import MeshFile

ModelArgument = Annotated[Path, typer.Argument(metavar="DIR", help="A model directory.", show_default=False)]
PromptsFileOption = Annotated[
    Path | None,
    typer.Option(help="One prompt a line; in a .jsonl file, one object a line with `prompt` or `token_ids`."),
]
MaxTokensOption = Annotated[int, typer.Option(help="Most tokens to generate.")]
TemperatureOption = Annotated[float, typer.Option(help="0 is greedy.")]
TopKOption = Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")]
TopPOption = Annotated[float, typer.Option(help="Keep the smallest set of tokens with this probability.")]
MinPOption = Annotated[float, typer.Option(help="Drop tokens below this fraction of the likeliest.")]
RepetitionPenaltyOption = Annotated[float, typer.Option(help="Above 1 discourages tokens seen before.")]
StopOption = Annotated[list[str] | None, typer.Option(help="A string that ends the text; may be repeated.")]
SeedOption = Annotated[int | None, typer.Option(help="Same seed, same text.")]
ContextOption = Annotated[int | None, typer.Option(help="Most tokens of a sequence (default: the model's).")]
AdapterOption = Annotated[Path | None, typer.Option(help="A LoRA adapter, a folder in PEFT's layout.")]
MeshOption = Annotated[
    str | None,
    typer.Option(help='Devices: "tensor=2", or a TOML file with a table named mesh and perhaps rules (default: one).'),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        help="Of the matrices: float32, bfloat16 or float16, also bf16 (default: as stored; float32 on a CPU)."
    ),
]
QuantizeOption = Annotated[str | None, typer.Option(help="Of the matrices: int8, int4 or fp8 (default: as stored).")]
SpeculationOption = Annotated[
    int,
    typer.Option(help="Most tokens the n-gram proposer suggests per pass; 0: no speculation."),
]
WeightsOption = Annotated[
    str | None,
    typer.Option(help="Where layers are: device, or brought from host or disk, or auto (default: device)."),
]
DeviceMemoryOption = Annotated[
    str | None, typer.Option(help="Of each device, how much the model may take, such as 12GiB (default: what is free).")
]
HostMemoryOption = Annotated[
    str | None, typer.Option(help="How much layers in the host's memory may take (default: what is free).")
]
LayerFilesOption = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Where files of layers are kept (default: in the cache; of convert: in OUT_DIR)."),
]
PrefetchOption = Annotated[int | None, typer.Option(help="How many layers are brought ahead (default: by experience).")]
KernelsOption = Annotated[bool, typer.Option(help="GPU kernels where the GPU supports them, or plain XLA.")]
KVDtypeOption = Annotated[str | None, typer.Option(help="Keys and values in bfloat16 or int8 (default: as computed).")]


def parse_mesh(text: str | None) -> "MeshFile":
    """Read `--mesh`: axes such as tensor=2, or the name of a file."""
    from jaxinfer.sharding import MeshConfig, MeshFile, read_mesh

    if text is None:
        return MeshFile()
    if "=" in text:
        return MeshFile(mesh=MeshConfig.parse(text))
    if not Path(text).is_file():
        raise ValueError(f"--mesh {text}: no such file; name a TOML file, or give axes such as tensor=2.")
    return read_mesh(text)


def read_text(option: str, file: Path) -> str:
    """Read the file that an option names. Raises ValueError naming both."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{option} {file}: {error.strerror}; name a file that can be read.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {file}: not text in UTF-8 ({error}).") from error


ADAPTER = "adapter"
"""The name of the one adapter that the command line takes."""

SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
"""Options of `SamplingParams` that commands have by the same name."""


def sampling_params(ctx: typer.Context, **others: Any) -> "SamplingParams":
    """Return a command's sampling options, the ones above and the others given."""
    from jaxinfer.generation import SamplingParams

    return SamplingParams(
        **{name: ctx.params[name] for name in SAMPLING},
        stop=tuple(ctx.params["stop"] or ()),
        adapter=ADAPTER if ctx.params["adapter"] else None,
        **others,
    )


def load_llm(ctx: typer.Context, *, max_batch: int, **options: "Unpack[ModelOptions]") -> "LLM":
    """Load a command's model, with the options above and others."""
    from jaxinfer.generation import LLM

    adapter = ctx.params.get("adapter")
    adapters = {ADAPTER: adapter} if adapter else None
    return LLM(**model_options(ctx), max_batch=max_batch, adapters=adapters, **options)


def model_options(ctx: typer.Context) -> dict[str, Any]:
    """Return the options of `LLM` and `Embedder` that a command has by the same name."""
    from jaxinfer.generation.engine.config import EngineOptions
    from jaxinfer.streaming.config import MemoryOptions

    engine = ctx.params.keys() & EngineOptions.__annotations__.keys()
    chosen = (name for name in engine if getattr(ctx.get_parameter_source(name), "name", "") != "DEFAULT")
    names = ("dtype", "quantize", "context", *chosen)
    memory = {name: value for name in MemoryOptions.__annotations__ if (value := ctx.params.get(name)) is not None}
    given = {name: ctx.params[name] for name in names}
    return {"path": ctx.params["model"], "mesh": parse_mesh(ctx.params["mesh"]), **given, **memory}


def note(text: str) -> None:
    """Print a note to stderr: stdout has the results alone."""
    with paused():
        typer.secho(text, err=True, dim=True)


def compile_for(llm: "LLM", request: "Request") -> None:
    """Compile what a request needs, before anything is printed that its line of progress would break."""
    llm.engine.executor.compile_ahead(request.sequences())


def length_note(output: "RequestOutput", params: "SamplingParams", context: int) -> str:
    """Return why the first completion ended, and whether that is because the context is full."""
    completion = output.outputs[0]
    full = completion.finish_reason == "length" and len(completion.token_ids) != params.max_tokens
    return f"length: the context of {context} tokens is full" if full else str(completion.finish_reason)


def read_prompts(texts: list[str], file: Path | None, token_ids: list[str]) -> "list[Prompt]":
    """Collect the prompts of all three options. Raises ValueError naming the invalid option or line."""
    prompts: list[Prompt] = list(texts)
    if file is not None:
        lines = read_text("--prompts-file", file).splitlines()
        if file.suffix == ".jsonl":
            prompts += [_json_prompt(f"{file}:{number}", line) for number, line in enumerate(lines, 1)]
        else:
            prompts += lines
    for ids in token_ids:
        try:
            prompts.append([int(i) for i in ids.split(",")])
        except ValueError:
            raise ValueError(f"--token-ids must be integers separated by commas, got {ids!r}.") from None
    if not prompts:
        raise ValueError("No prompt: give a text, --prompts-file or --token-ids.")
    return prompts


class _PromptLine(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str | None = None
    token_ids: list[int] | None = None


def _json_prompt(where: str, line: str) -> "Prompt":
    try:
        given = msgspec.json.decode(line, type=_PromptLine)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{where}: {error}; each line must be an object with `prompt` or `token_ids`.") from error
    if (given.prompt is None) == (given.token_ids is None):
        raise ValueError(f"{where}: give exactly one of `prompt` and `token_ids`.")
    return given.prompt if given.prompt is not None else given.token_ids or []
