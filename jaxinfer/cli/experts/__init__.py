"""`jaxinfer experts`: many expert models in little memory. What they cost, how they are placed, and running them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxinfer.cli.bench.files import check_file
from jaxinfer.cli.common import api_key, is_url, refuse_ignored, server_of
from jaxinfer.progress import long_work

if TYPE_CHECKING:
    from jaxinfer.evaluation.experts import TraceRequest
    from jaxinfer.experts import OpenedSystem, Policy, SystemConfig
    from jaxinfer.experts.scheduling.profile import Profiles

ConfigArgument = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="TOML file that describes the system.", show_default=False)
]
ModeOption = Annotated[
    str | None, typer.Option(help="Policy, such as best, paper or samba (default: the file's).", show_default=False)
]
RequestsOption = Annotated[int, typer.Option(min=1, help="Number of inputs in the random trace.")]
IntervalOption = Annotated[float, typer.Option(min=0, help="Milliseconds between inputs of the random trace.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Random seed.")]
TraceOption = Annotated[
    Path | None,
    typer.Option(
        help="Read a trace from this file instead: one JSON object per line with `arrival` and `experts`.",
        show_default=False,
    ),
]

app = typer.Typer(no_args_is_help=True, help="Run many expert models in little memory.")


@app.command()
def profile(
    config: ConfigArgument,
    mode: ModeOption = None,
    remeasure: Annotated[bool, typer.Option("--remeasure", help="Measure again, even if results are stored.")] = False,
) -> None:
    """Measure the costs of experts, and store them.

    They are measured once per architecture and device. A batch of n inputs takes K n + B. Load times are from disk, and
    from a copy in host memory.
    """
    with long_work(f"reading {config}"):
        from jaxinfer.cli.display import show
        from jaxinfer.cli.experts import tables
        from jaxinfer.experts import OpenedSystem

        opened = OpenedSystem.from_config(config, mode=mode)
    measured = {}
    try:
        opened.measure_into(measured, remeasure=remeasure)
    finally:  # after Ctrl-C: what is measured, which is kept
        show(*tables.profile_tables(opened, measured))


@app.command()
def plan(
    ctx: typer.Context,
    config: ConfigArgument,
    mode: ModeOption = None,
    requests: RequestsOption = 1000,
    interval_ms: IntervalOption = 4.0,
    trace: TraceOption = None,
    seed: SeedOption = 0,
    top: Annotated[int, typer.Option(min=1, help="Number of experts to show, the most used first.")] = 10,
) -> None:
    """Predict throughput, and recommend memory.

    It shows the initial placement of experts, simulates a trace, and recommends memory for experts and activations.
    """
    with long_work(f"reading {config}"):
        from jaxinfer.cli.display import show
        from jaxinfer.cli.experts import tables
        from jaxinfer.evaluation.experts.forecast import advise_memory, forecast
        from jaxinfer.experts import ConfigError, SystemConfig

        given = SystemConfig.read(config, mode=mode)
    inputs = _trace(ctx, given, trace, requests, interval_ms, seed)
    opened, profiles = _measured(given)
    expected = forecast(opened, profiles, inputs)
    show(tables.usage_table(opened, expected, top), tables.pool_table(expected))
    loads = expected.outcome.statistics.loads
    typer.echo(
        f"Simulated, {len(inputs)} inputs: {expected.outcome.throughput:.4g} a second, {loads.total()} loads\n"
        f"({loads['disk']} from disk, {loads['host']} from the host); any scheduler needs at least {expected.bound}."
    )
    if expected.outcome.failed:
        typer.echo(f"warning: {expected.outcome.failed} inputs would fail: too little memory.", err=True)
    try:
        advice = advise_memory(opened, profiles, inputs)
    except ConfigError as error:
        typer.echo(f"No advice on memory: {error}")
        return
    show(tables.window_table(advice))
    most_used = "the most used expert" if advice.experts == 1 else f"the {advice.experts} most used experts"
    typer.echo(
        f"Best: room for {most_used}:\n  expert_memory of {tables.sizes(advice.expert_bytes)}\n"
        f"  activation_memory of {tables.sizes(advice.activation_bytes)}"
    )


@app.command()
def run(
    ctx: typer.Context,
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG", help="TOML file that describes the system, or a server's URL.", show_default=False
        ),
    ],
    images: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of images of any size, which are resized as the checkpoint of their first expert says: "
            "DIR/KIND/NAME.jpg, .png and others, or .npy (uint8, [height, width, 3]).",
            show_default=False,
        ),
    ] = None,
    random: Annotated[
        int | None,
        typer.Option(min=1, help="Use N random inputs instead of files; kinds are drawn by their shares."),
    ] = None,
    mode: ModeOption = None,
    seed: SeedOption = 0,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line; the summary goes to stderr.")
    ] = False,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the system on the server, if it has several.", show_default=False),
    ] = None,
) -> None:
    """Judge images, here or on a server.

    It prints one line each, and a summary. It exits with status 1 if some could not be judged. Verdicts are the names
    of an expert's classes. `jaxinfer convert` takes them from labels.txt next to the weights. With a server's URL, such
    as http://127.0.0.1:8000, it sends the images of --images. An API key comes from JAXINFER_API_KEY.
    """
    with long_work(f"reading {config}"):
        from jaxinfer.cli.experts import judging
        from jaxinfer.experts import System, SystemConfig

    if is_url(config):
        refuse_ignored(ctx, ["random", "mode", "seed"], "with a server's URL")
        if images is None:
            raise ValueError(f"{config}: give --images, the folder of the images to send.")
        _run_there(config, images, name, as_json=json)
        return
    refuse_ignored(ctx, ["name"], "without a server's URL")
    if (images is None) == (random is None):
        raise ValueError("Use exactly one of --images and --random.")
    if images is not None:
        refuse_ignored(ctx, ["seed"], "with --images")
    given = SystemConfig.read(config, mode=mode)
    files = judging.image_files(images, [kind.name for kind in given.inputs]) if images is not None else []
    with System(given) as system:
        inputs = judging.read_images(system, files) if random is None else judging.random_inputs(system, random, seed)
        summary = judging.Summary(random or len(files))
        try:
            judging.judge(lambda each: system.run(each, return_errors=True), inputs, summary, typer.echo, as_json=json)
        finally:  # after Ctrl-C too
            typer.echo(summary.text(system.stats()), err=json)
    if summary.failed:
        raise typer.Exit(1)


def _run_there(url: str, images: Path, name: str | None, *, as_json: bool) -> None:
    """Judge images on a server."""
    from jaxinfer.cli.experts import judging
    from jaxinfer.evaluation.experts.client import ExpertsClient

    with ExpertsClient(server_of(url), model=name or "", api_key=api_key()) as client:
        files = judging.image_files(images, client.kinds())
        summary = judging.Summary(len(files))
        try:
            judging.judge(client.run, judging.read_contents(files), summary, typer.echo, as_json=as_json)
        finally:  # after Ctrl-C too
            typer.echo(summary.rate, err=as_json)
    if summary.failed:
        raise typer.Exit(1)


@app.command()
def simulate(
    ctx: typer.Context,
    config: ConfigArgument,
    mode: Annotated[
        list[str] | None,
        typer.Option(help="Policy to compare; repeatable (default: samba, paper, best).", show_default=False),
    ] = None,
    requests: RequestsOption = 1000,
    interval_ms: IntervalOption = 4.0,
    trace: TraceOption = None,
    save_trace: Annotated[Path | None, typer.Option(help="Write the trace to this file.", show_default=False)] = None,
    seed: SeedOption = 0,
) -> None:
    """Compare policies on one simulated trace.

    Costs are those measured on this machine.
    """
    with long_work(f"reading {config}"):
        from jaxinfer.cli.display import show
        from jaxinfer.cli.experts import tables
        from jaxinfer.evaluation.experts.forecast import forecast
        from jaxinfer.evaluation.traces import write_trace
        from jaxinfer.experts import SystemConfig, policy_of

    if save_trace is not None:
        check_file("--save-trace", save_trace)
    policies = {name: policy_of(name) for name in mode or ("samba", "paper", "best")}
    given = SystemConfig.read(config)
    inputs = _trace(ctx, given, trace, requests, interval_ms, seed)
    if save_trace is not None:
        write_trace(save_trace, inputs)
    opened, profiles = _measured(given, *policies.values())
    forecasts = {}
    try:
        for name, policy in policies.items():
            forecasts[name] = forecast(opened, profiles, inputs, policy=policy)
    finally:  # after Ctrl-C: those that are done
        show(tables.mode_table(forecasts, len(inputs)))


def _trace(
    ctx: typer.Context, given: "SystemConfig", file: Path | None, requests: int, interval_ms: float, seed: int
) -> "list[TraceRequest]":
    """Read or draw a trace, before anything is opened."""
    from jaxinfer.evaluation.experts import draw_trace, read_trace

    if file is not None:
        refuse_ignored(ctx, ["requests", "interval_ms", "seed"], "with --trace")
        return read_trace(file, given.graph())
    return draw_trace(given.graph(), requests, interval=interval_ms / 1e3, seed=seed)


def _measured(given: "SystemConfig", *policies: "Policy") -> "tuple[OpenedSystem, Profiles]":
    """Open a system whose experts are all there, or assumed to be by `like`, and measure what is not known.

    Args:
      policies: what else it is to work with.

    Raises LoadError naming an expert that is not there.
    """
    from jaxinfer.experts import OpenedSystem

    opened = OpenedSystem(given)
    _refuse_missing(opened)
    for policy in policies:
        opened.check_memory(policy)
    profiles = opened.measure()
    _refuse_missing(opened)  # files can turn out to be damaged when they are read
    return opened, profiles


def _refuse_missing(opened: "OpenedSystem") -> None:
    for expert in opened.config.experts:
        if expert.like is None and expert.name in opened.broken:
            raise ValueError(
                f"expert {expert.name!r} cannot be opened, so its costs are not known: {opened.broken[expert.name]} "
                "Repair it, remove it from the file, or name an expert of the same architecture: like = NAME."
            )
