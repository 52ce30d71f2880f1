"""Options that several subcommands share."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

if TYPE_CHECKING:
    from jaxinfer.generation import LLM
    from jaxinfer.generation.text import Prompt
    from jaxinfer.sharding import MeshFile

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
    typer.Option(metavar="DIR", help="Where files of layers are written and read (default: in the model directory)."),
]
PrefetchOption = Annotated[int | None, typer.Option(help="How many layers are brought ahead (default: by experience).")]
KernelsOption = Annotated[bool, typer.Option(help="GPU kernels where the GPU supports them, or plain XLA.")]
KVDtypeOption = Annotated[str | None, typer.Option(help="int8: keys and values as bytes (default: the model's dtype).")]


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


def load_llm(ctx: typer.Context, *, max_batch: int, **options: Any) -> "LLM":
    """Load a command's model, with the options above and the others given."""
    from jaxinfer.generation import LLM
    from jaxinfer.generation.engine.config import EngineOptions
    from jaxinfer.streaming.config import MemoryOptions

    engine = ctx.params.keys() & EngineOptions.__annotations__.keys()
    chosen = (name for name in engine if getattr(ctx.get_parameter_source(name), "name", "") != "DEFAULT")
    names = ("dtype", "quantize", "context", *chosen)
    memory = {name: value for name in MemoryOptions.__annotations__ if (value := ctx.params.get(name)) is not None}
    return LLM(
        ctx.params["model"],
        mesh=parse_mesh(ctx.params["mesh"]),
        max_batch=max_batch,
        **{name: ctx.params[name] for name in names},
        **memory,
        **options,
    )


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
