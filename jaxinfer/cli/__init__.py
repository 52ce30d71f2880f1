"""The command line: one module per subcommand, each importing what it needs when it runs, so that --help is fast.

Expected errors (bad files, bad values, too little memory, missing packages) end with one line on stderr and status 2,
without traceback.
"""

import logging
import re
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from jaxinfer import __version__
from jaxinfer.cli.bench import app as bench_app
from jaxinfer.cli.cache import cache
from jaxinfer.cli.chat import chat
from jaxinfer.cli.convert import convert
from jaxinfer.cli.elastic import app as elastic_app
from jaxinfer.cli.embed import embed
from jaxinfer.cli.experts import app as experts_app
from jaxinfer.cli.generate import generate
from jaxinfer.cli.info import info
from jaxinfer.cli.inspect import inspect
from jaxinfer.cli.moe import app as moe_app
from jaxinfer.cli.plan import plan
from jaxinfer.cli.serve import serve
from jaxinfer.cli.tune import tune
from jaxinfer.cli.verify import verify
from jaxinfer.extras import MissingExtraError
from jaxinfer.progress import paused
from jaxinfer.serving.errors import ServingError


class _Commands(TyperGroup):
    """The subcommands. Expected errors become one line."""

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]  # typer's Context is click's
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # nobody reads our output any more: click exits silently
        except (ValueError, OSError, MemoryError, MissingExtraError, ServingError) as error:
            message = " ".join(str(error).split()) or type(error).__name__
            command = self.commands.get(ctx.invoked_subcommand or "")
            typer.echo(f"error: {_with_options(message, _options(command))}", err=True)
            raise typer.Exit(2) from error


def _options(command: Any) -> dict[str, str]:
    """Return the options of a command, and of those in a group, by the names of their parameters."""
    options = {p.name: p.opts[0] for p in getattr(command, "params", ()) if p.param_type_name == "option"}
    for inner in getattr(command, "commands", {}).values():
        options |= _options(inner)
    return options


def _with_options(message: str, options: dict[str, str]) -> str:
    """Name options as they are typed.

    >>> _with_options("LLM.context must be in [2, 128], got 1.", {"context": "--context"})
    '--context must be in [2, 128], got 1.'
    """
    return re.sub(r"(?<![\w./-])[A-Z]\w*\.(\w+)", lambda match: options.get(match[1], match[0]), message)


class _Notes(logging.Handler):
    """Warnings, each a line on stderr that does not run into the line of long work."""

    def emit(self, record: logging.LogRecord) -> None:
        with paused():
            typer.echo(f"{record.levelname.lower()}: {self.format(record)}", err=True)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its boxes cut the names of options at 80 columns
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"jaxinfer {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Run Hugging Face models, compiled with JAX and XLA."""
    logging.basicConfig(format="%(message)s", handlers=[_Notes()])


for _command in (cache, chat, convert, embed, generate, info, inspect, plan, serve, tune, verify):
    app.command()(_command)
app.add_typer(bench_app, name="bench")
app.add_typer(elastic_app, name="elastic")
app.add_typer(experts_app, name="experts")
app.add_typer(moe_app, name="moe")
