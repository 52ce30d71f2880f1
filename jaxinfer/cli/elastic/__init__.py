"""`jaxinfer elastic`: one vision transformer for many tasks, whose tokens are chosen for each batch (OTAS)."""

from pathlib import Path
from typing import Annotated

import typer

from jaxinfer.cli.common import is_url, note, refuse_ignored
from jaxinfer.extras import require_extra
from jaxinfer.progress import long_work

_OPENING = "opening the model, its tasks and images"
"""Work of all commands, which begins with imports that may take seconds."""

ModelArgument = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="Vision transformer: model directory, Hugging Face directory, or hub name such as ORG/NAME.",
        show_default=False,
    ),
]
TaskOption = Annotated[str, typer.Option("--task", help="Name of the task.", show_default=False)]
DataOption = Annotated[
    str,
    typer.Option(
        help="Data set: digits, mnist, textures or faces; or a folder with CIFAR's binary version or one folder per "
        "class.",
        show_default=False,
    ),
]
RepositoryOption = Annotated[
    Path | None,
    typer.Option(help="Folder of registered tasks (default: `tasks` in the model directory).", show_default=False),
]
PromptModeOption = Annotated[
    str, typer.Option(help="replace: each layer's prompts replace those before; accumulate: they are added to them.")
]
MaxBatchOption = Annotated[int, typer.Option(min=1, help="Maximum number of images in a batch.")]
ArrivalsOption = Annotated[str, typer.Option(help="Arrival process of the queries: wandering, bursty or poisson.")]
LoadOption = Annotated[float, typer.Option(help="Mean arrival rate, as a multiple of the capacity at level 0.")]
SecondsOption = Annotated[float, typer.Option(help="Duration of the workload in seconds.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Random seed.")]
PolicyOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Policy: elastic, paper, pets, slack, slackfit, rate, or a fixed level such as level-8; repeatable "
        "(default: elastic for run, all named policies for simulate).",
        show_default=False,
    ),
]
TraceOption = Annotated[
    Path | None,
    typer.Option(
        help="Read queries from this trace of an earlier run instead, one JSON object per line.", show_default=False
    ),
]
TasksOption = Annotated[
    list[str] | None, typer.Option(help="Task to query; repeatable (default: all tasks).", show_default=False)
]
TaskDataOption = Annotated[
    list[str] | None,
    typer.Option(
        help="TASK=DATA: images of a task; repeatable (default: the data set named like the task).", show_default=False
    ),
]
OutOption = Annotated[Path, typer.Option(help="Folder where runs are recorded.")]
DeviceMemoryOption = Annotated[
    str | None,
    typer.Option(
        help="Memory for the model, its tasks and the batches in flight, such as 8GiB (default: no limit).",
        show_default=False,
    ),
]

app = typer.Typer(no_args_is_help=True, help="Serve many image tasks with one transformer.")


@app.command()
def register(
    model: ModelArgument,
    task: TaskOption,
    data: DataOption,
    prompts: Annotated[
        str, typer.Option(help="Numbers of prompts to train, such as 2,4,8; each becomes a level (default: none).")
    ] = "",
    test_share: Annotated[
        float,
        typer.Option(help="Share of each class's images kept for tests: not used for training or profiling."),
    ] = 0.0,
    steps: Annotated[int, typer.Option(min=1, help="Training steps for each number of prompts.")] = 600,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the training.")] = 0,
    new_version: Annotated[bool, typer.Option("--new-version", help="Replace an existing task of this name.")] = False,
    repository: RepositoryOption = None,
    prompt_mode: PromptModeOption = "replace",
    max_batch: MaxBatchOption = 64,
) -> None:
    """Train, profile and store a task.

    It trains a head and prompts, profiles them at all levels, and adds the task to the repository.
    """
    counts = _numbers("--prompts", prompts)
    with long_work(_OPENING):
        from jaxinfer.cli.display import show
        from jaxinfer.cli.elastic.opening import images_of
        from jaxinfer.cli.elastic.tables import levels_table
        from jaxinfer.elastic import Division, PromptMode, Service, TaskRepository, TrainingConfig, load_dataset

        division, training = Division(test_share=test_share), TrainingConfig(steps=steps, seed=seed)
        PromptMode(prompt_mode)
        TaskRepository.of_model(model, repository).next_version(task, new_version=new_version)
        dataset = load_dataset(data, *images_of(model))
        service = Service.from_checkpoint(model, repository=repository, prompt_mode=prompt_mode, max_batch=max_batch)
    registered = service.register_task(
        task, dataset, prompts=counts, division=division, training=training, new_version=new_version
    )
    typer.echo(f"Registered {task!r}, version {registered.version}, {len(registered.labels)} classes.")
    show(levels_table(service, task))


@app.command()
def profile(
    model: ModelArgument,
    task: TaskOption,
    data: Annotated[
        str | None,
        typer.Option(
            help="Data set, as in `register`: measure on its validation images (default: show what is stored).",
            show_default=False,
        ),
    ] = None,
    repository: RepositoryOption = None,
    prompt_mode: PromptModeOption = "replace",
    max_batch: MaxBatchOption = 64,
) -> None:
    """Show a task's accuracy and batch times by level.

    It shows what is stored. With --data it measures both again.
    """
    with long_work(_OPENING):
        from jaxinfer.cli.display import show
        from jaxinfer.cli.elastic.opening import check_profiled, how_to_profile, images_of, levels_of, read_tasks
        from jaxinfer.cli.elastic.tables import levels_table
        from jaxinfer.elastic import Service, load_dataset

        size = images_of(model)
        registered = read_tasks(model, repository, [task])[task]
        validation = None if data is None else registered.divide(load_dataset(data, *size)).validation
        service = Service.from_checkpoint(model, repository=repository, prompt_mode=prompt_mode, max_batch=max_batch)
    if validation is not None:
        service.profile(task, validation)
    else:
        check_profiled(service, model, task)
    show(levels_table(service, task))
    if service.latency.missing(levels_of(service, task), [1, service.batch_sizes[-1]]):
        note(f"[Some batches were not timed on this machine; to time them: {how_to_profile(model, task)}]")


@app.command()
def classify(
    model: ModelArgument,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Image files.", show_default=False)],
    task: TaskOption,
    level: Annotated[
        int,
        typer.Option(help="> 0: number of prompts added; 0: the plain model; < 0: tokens merged in each layer."),
    ] = 0,
    repository: RepositoryOption = None,
    prompt_mode: PromptModeOption = "replace",
    max_batch: MaxBatchOption = 64,
) -> None:
    """Classify image files.

    It prints one line each: file, label, probability.
    """
    with long_work(_OPENING):
        import numpy as np

        from jaxinfer.cli.elastic.opening import images_of, read_tasks
        from jaxinfer.elastic import Service, load_image

        size = images_of(model)
        pixels = np.stack([load_image(file, *size) for file in images])
        read_tasks(model, repository, [task])
        service = Service.from_checkpoint(model, repository=repository, prompt_mode=prompt_mode, max_batch=max_batch)
    for file, answer in zip(images, service.classify(pixels, task, level), strict=True):
        typer.echo(f"{file}\t{answer.label}\t{answer.probabilities.max():.3f}")


@app.command()
def run(
    ctx: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Vision transformer, as in the other commands, or a server's URL.",
            show_default=False,
        ),
    ],
    arrivals: ArrivalsOption = "bursty",
    load: LoadOption = 0.8,
    seconds: SecondsOption = 30.0,
    seed: SeedOption = 0,
    policy: PolicyOption = None,
    trace: TraceOption = None,
    task: TasksOption = None,
    data: TaskDataOption = None,
    out: OutOption = Path("runs"),
    repository: RepositoryOption = None,
    prompt_mode: PromptModeOption = "replace",
    max_batch: MaxBatchOption = 64,
    device_memory: DeviceMemoryOption = None,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the service on the server, if it has several.", show_default=False),
    ] = None,
) -> None:
    """Serve image queries with deadlines, live.

    A dashboard shows what happens. The level of each batch follows the load. Each policy serves the same queries. A run
    replaces an earlier one of the same name in the folder. Ctrl-C stops; the queries answered so far are shown and
    recorded.

    With a server's URL, such as http://127.0.0.1:8000, it sends the queries there and shows no dashboard. The server's
    own policy serves them. An API key comes from JAXINFER_API_KEY.
    """
    policies = policy or ["elastic"]
    _refuse_ignored(ctx)
    if is_url(model):
        refuse_ignored(
            ctx, ["policy", "repository", "prompt_mode", "max_batch", "device_memory"], "with a server's URL"
        )
        with long_work("reading images"):
            from jaxinfer.cli.elastic import over_http
        over_http.run(model, ctx.params)
        return
    refuse_ignored(ctx, ["name"], "without a server's URL")
    ctx.params["model"] = Path(model)
    with long_work(_OPENING):
        from jaxinfer.cli.elastic import runs

        opened = runs.open_tasks(ctx.params, policies)
    runs.compare(opened, policies, runs.run_live)


@app.command()
def simulate(
    ctx: typer.Context,
    model: ModelArgument,
    arrivals: ArrivalsOption = "bursty",
    load: LoadOption = 0.8,
    seconds: SecondsOption = 30.0,
    seed: SeedOption = 0,
    policy: PolicyOption = None,
    trace: TraceOption = None,
    task: TasksOption = None,
    data: TaskDataOption = None,
    out: OutOption = Path("runs"),
    repository: RepositoryOption = None,
    prompt_mode: PromptModeOption = "replace",
    max_batch: MaxBatchOption = 64,
    device_memory: DeviceMemoryOption = None,
) -> None:
    """Serve the queries of `run` on a simulated clock.

    It uses the controller of `run`, with latencies and answers measured at the start. Each policy serves the same
    queries. A run replaces an earlier one of the same name in the folder.
    """
    _refuse_ignored(ctx)
    with long_work(_OPENING):
        from jaxinfer.cli.elastic import runs
        from jaxinfer.elastic.scheduling.policies import POLICIES

        policies = policy or POLICIES
        opened = runs.open_tasks(ctx.params, policies)
    runs.compare(opened, policies, runs.simulate)


@app.command()
def report(
    runs: Annotated[Path, typer.Argument(metavar="RUNS", help="Folder of recorded runs.", show_default=False)],
    out: Annotated[Path, typer.Option(help="HTML page to write.")] = Path("report.html"),
) -> None:
    """Compare recorded runs in tables and figures.

    It prints tables, and writes a page with the figures of OTAS's evaluation.
    """
    with long_work("reading runs"):
        from jaxinfer.cli.display import show
        from jaxinfer.evaluation.elastic.runs import read_runs
        from jaxinfer.evaluation.elastic.tables import by_cell, terminal_table

        recorded = read_runs(runs)
        require_extra("matplotlib", "elastic report")
        from jaxinfer.evaluation.elastic.report import write_report
    show(*(terminal_table(cell, group) for cell, group in by_cell(recorded).items()))
    with long_work("drawing figures"):
        write_report(out, recorded)
    typer.echo(f"Wrote {out}")


def _refuse_ignored(ctx: typer.Context) -> None:
    """Raise ValueError for options of arrivals with a trace, which has its own."""
    if ctx.params["trace"] is not None:
        refuse_ignored(ctx, ["arrivals", "load", "seconds"], "with --trace")


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"{option} must be integers separated by commas, got {text!r}.") from None
