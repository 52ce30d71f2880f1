"""Options that several subcommands share."""

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import msgspec
import typer

from jaxinfer.progress import paused

if TYPE_CHECKING:
    from jaxinfer.generation import LLM, Request, RequestOutput, SamplingParams
    from jaxinfer.generation.api.build import ModelOptions
    from jaxinfer.sharding import MeshFile
    from jaxinfer.text import Prompt

MODEL_HELP = "Model directory, Hugging Face directory, GGUF file, or hub name such as ORG/NAME."
ModelArgument = Annotated[Path, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)]
PromptsFileOption = Annotated[
    Path | None,
    typer.Option(help="File with one prompt per line; .jsonl: one object per line with `prompt` or `token_ids`."),
]
MaxTokensOption = Annotated[
    int | None, typer.Option(help="Maximum number of tokens to generate (default: the model's, or 128; 512 in a chat).")
]
TemperatureOption = Annotated[
    float | None, typer.Option(help="Sampling temperature; 0 is greedy (default: the model's, or 1).")
]
TopKOption = Annotated[
    int | None, typer.Option(help="Sample from the k likeliest tokens; 0 keeps all (default: the model's, or 0).")
]
TopPOption = Annotated[
    float | None,
    typer.Option(
        help="Sample from the smallest set of tokens with this total probability (default: the model's, or 1)."
    ),
]
MinPOption = Annotated[
    float | None,
    typer.Option(
        help="Drop tokens below this fraction of the likeliest one's probability (default: the model's, or 0)."
    ),
]
RepetitionPenaltyOption = Annotated[
    float | None,
    typer.Option(help="Penalty for repeated tokens; above 1 discourages them (default: the model's, or 1)."),
]
StopOption = Annotated[list[str] | None, typer.Option(help="String that ends the text; repeatable.")]
SeedOption = Annotated[int | None, typer.Option(help="Random seed; the same seed generates the same text.")]
ContextOption = Annotated[int | None, typer.Option(help="Maximum tokens per sequence (default: the model's).")]
AdapterOption = Annotated[Path | None, typer.Option(help="Folder with a LoRA adapter in PEFT's layout.")]
MeshOption = Annotated[
    str | None,
    typer.Option(
        help='Devices to use: "tensor=2", or a TOML file with a table [mesh] and optionally [rules] (default: one).'
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        help="Dtype of the matrices: float32, bfloat16 (bf16) or float16 (default: as stored; float32 on a CPU)."
    ),
]
QuantizeOption = Annotated[
    str | None, typer.Option(help="Quantisation of the matrices: int8, int4 or fp8 (default: as stored).")
]
SpeculationOption = Annotated[
    int,
    typer.Option(min=0, help="Maximum tokens that the n-gram proposer suggests per pass; 0 turns speculation off."),
]
WeightsOption = Annotated[
    str | None,
    typer.Option(
        help="Where layers are kept: device; host or disk, from which they are streamed; or auto (default: device)."
    ),
]
DeviceMemoryOption = Annotated[
    str | None,
    typer.Option(help="Memory of each device that the model may use, such as 12GiB (default: all free memory)."),
]
HostMemoryOption = Annotated[
    str | None, typer.Option(help="Host memory that layers may use, such as 12GiB (default: all free memory).")
]
HostKVOption = Annotated[
    str | None,
    typer.Option(help="Host memory for cached prompts that the devices forget, such as 8GiB (default: none)."),
]
DiskKVOption = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Folder where cached prompts outlive the process (default: none)."),
]
DiskKVLimitOption = Annotated[
    str | None, typer.Option(help="Bytes that the files of --disk-kv may take, such as 100GiB.")
]
KVOffloadOption = Annotated[
    str | None,
    typer.Option(help="Host memory for the KV cache of streamed layers, such as 16GiB (default: on the devices)."),
]
LayerFilesOption = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Folder for layer files (default: the cache; OUT_DIR for convert)."),
]
PrefetchOption = Annotated[
    int | None, typer.Option(help="Number of layers to fetch ahead (default: chosen from measured fetch times).")
]
KernelsOption = Annotated[
    bool, typer.Option(help="Use GPU and CPU kernels where they are supported; --no-kernels uses only XLA.")
]
KVDtypeOption = Annotated[
    str | None, typer.Option(help="Dtype of the KV cache: bfloat16 or int8 (default: as computed).")
]


def parse_mesh(text: str | None) -> "MeshFile":
    """Read `--mesh`: axes such as tensor=2, or the name of a file."""
    from jaxinfer.sharding import MeshConfig, MeshFile, read_mesh

    if text is None:
        return MeshFile()
    if "=" in text:
        return MeshFile(mesh=MeshConfig.parse(text))
    if not Path(text).is_file():
        raise ValueError(f"--mesh {text}: no such file; name a TOML file, or axes such as tensor=2.")
    return read_mesh(text)


def read_text(option: str, file: Path) -> str:
    """Read the file that an option names. Raises ValueError naming both."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{option} {file}: {error.strerror}; name a readable file.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {file}: not UTF-8 text ({error}).") from error


ADAPTER = "adapter"
"""The name of the one adapter that the command line takes."""

SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
"""Options of `SamplingParams` that commands have by the same name."""


def sampling_options(ctx: typer.Context, **others: Any) -> dict[str, Any]:
    """Return the sampling options that a command is given, for `SamplingParams.from_model`, and others.

    Raises ValueError for wrong ones, before a model is fetched.
    """
    from jaxinfer.generation import SamplingParams

    given = {name: value for name in SAMPLING if (value := ctx.params[name]) is not None}
    given |= {"stop": tuple(ctx.params["stop"] or ()), "adapter": ADAPTER if ctx.params["adapter"] else None, **others}
    SamplingParams(**given)
    return given


def load_llm(ctx: typer.Context, *, max_batch: int, **options: "Unpack[ModelOptions]") -> "LLM":
    """Load a command's model, with the options above and others."""
    from jaxinfer.generation import LLM

    adapter = ctx.params.get("adapter")
    adapters = {ADAPTER: adapter} if adapter else None
    return LLM(ctx.params["model"], **model_options(ctx), max_batch=max_batch, adapters=adapters, **options)


def model_options(ctx: typer.Context) -> dict[str, Any]:
    """Return the options of `LLM` and `Embedder` that a command has by the same name."""
    from jaxinfer.generation.engine.config import EngineOptions
    from jaxinfer.streaming.config import MemoryOptions

    chosen = given(ctx, ctx.params.keys() & EngineOptions.__annotations__.keys())
    names = ("dtype", "quantize", "context", *chosen)
    memory = {name: value for name in MemoryOptions.__annotations__ if (value := ctx.params.get(name)) is not None}
    others = {name: ctx.params[name] for name in names}
    return {"mesh": parse_mesh(ctx.params["mesh"]), **others, **memory}


def given(ctx: typer.Context, names: Iterable[str]) -> list[str]:
    """Return those of a command's parameters that were typed."""
    return [name for name in names if getattr(ctx.get_parameter_source(name), "name", "") != "DEFAULT"]


def refuse_ignored(ctx: typer.Context, names: Iterable[str], why: str) -> None:
    """Raise ValueError for an option that was typed and has no effect; why: such as "with --trace"."""
    for name in given(ctx, names):
        raise ValueError(f"--{name.replace('_', '-')} has no effect {why}: leave it out.")


def note(text: str) -> None:
    """Print a note to stderr, in a terminal in lines that fit: stdout has the results alone."""
    if sys.stderr.isatty():
        columns = shutil.get_terminal_size().columns
        text = "\n".join(textwrap.fill(line, columns, break_on_hyphens=False) for line in text.split("\n"))
    with paused():
        typer.secho(text, err=True, dim=True)


def compile_for(llm: "LLM", request: "Request") -> None:
    """Compile what a request needs, before anything is printed that its line of progress would break."""
    llm.engine.compile_for(request.sequences())


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
        parsed = msgspec.json.decode(line, type=_PromptLine)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{where}: {error}; each line must be an object with `prompt` or `token_ids`.") from error
    if (parsed.prompt is None) == (parsed.token_ids is None):
        raise ValueError(f"{where}: give exactly one of `prompt` and `token_ids`.")
    return parsed.prompt if parsed.prompt is not None else parsed.token_ids or []


def is_url(text: str) -> bool:
    """Tell whether an argument is a server's URL rather than a file."""
    return text.startswith(("http://", "https://"))


def server_of(url: str) -> str:
    """The server of a URL, without a path."""
    return url.rstrip("/").removesuffix("/v1")


def api_key() -> str | None:
    """The first of the keys in JAXINFER_API_KEY, for requests to a server; None: there is none."""
    return os.environ.get("JAXINFER_API_KEY", "").partition(",")[0] or None
