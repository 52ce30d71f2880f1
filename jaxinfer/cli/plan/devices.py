"""`jaxinfer plan --devices`: which mesh and schedule suit a model on devices that need not be there."""

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from jaxinfer.cli.bench.files import check_file, check_plot, write_file
from jaxinfer.cli.plan.notes import cache_note, expert_note
from jaxinfer.progress import long_work

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from jaxinfer.sharding.planner import Device, Format, ModelShape, Prediction, Runner, System, Workload

SHOWN = 10
"""Plans in the table."""
ORDERS = ("throughput", "ttft", "tpot")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """The options of a plan for devices, checked.

    Attributes:
      name: a model of the planner's catalogue; None: the config of `folder` is read.
      devices: such as "h200:8".
      price: dollars per device and hour; None: the catalogue's.
      write: the file for the best mesh.
    """

    name: str | None
    folder: Path | None
    devices: str
    batch: int
    prompt: int
    generate: int
    by: str
    quantize: str | None
    price: float | None
    write: Path | None
    plot: Path | None

    def __post_init__(self) -> None:
        from jaxinfer.sharding.planner.search import FORMATS

        if (self.name is None) == (self.folder is None):
            raise ValueError("--devices: name one model, by --model NAME or as MODEL, a directory or repository.")
        if self.by not in ORDERS:
            raise ValueError(f"--by must be one of {', '.join(ORDERS)}, got {self.by!r}.")
        if self.quantize not in FORMATS:
            known = ", ".join(name for name in FORMATS if name)
            raise ValueError(f"--quantize {self.quantize} is not known to --devices; known: {known}.")
        if self.price is not None and not 0 <= self.price < 1e6:
            raise ValueError(f"--price must be dollars per device and hour, >= 0, got {self.price}.")
        if not re.fullmatch(r"[^:]+(:[1-9]\d{0,4})?", self.devices):
            raise ValueError(f'--devices must be a kind and a number, such as "h200:8", got {self.devices!r}.')
        for name in ("batch", "prompt", "generate"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be an integer >= 1, got {getattr(self, name)}.")
        if self.write is not None:
            check_file("--write", self.write)
        if self.plot is not None:
            check_plot("--plot", self.plot)

    @property
    def kind(self) -> str:
        """The kind of the devices."""
        return self.devices.partition(":")[0]

    @property
    def count(self) -> int:
        """How many there are."""
        return int(self.devices.partition(":")[2] or 1)


def plan_devices(options: DeviceOptions) -> None:
    """Print the best plans; write and draw them if asked to."""
    with long_work("predicting plans"):
        from jaxinfer.cli.display import show
        from jaxinfer.sharding.planner import Runner, rank

        model, device, system, form = planned(options)
        count, workload = options.count, _workload(options)
        made = rank(model, device, count, system, form, workload, by=options.by)  # type: ignore[arg-type]  # checked
    best = _best_of_each(made)
    show(_table(best[:SHOWN], model, device, count, form, workload))
    typer.echo(
        f"{len(made):,} plans fit; the best of each mesh and schedule, by {options.by}. Times are predicted with "
        f"constants of {system.name}, fitted to {system.source}; its points are off by {system.error:.0%} at most. "
        "Errors on public figures of other systems and devices: docs/benchmarks/planner.md."
    )
    runner = Runner(model=model, device=device, system=system, ways=best[0].plan.ways, format=form)
    for note in _notes(runner, workload, best[0].plan.cache):
        typer.echo(note)
    say_price(device)
    if options.write is not None:
        write_file(options.write, mesh_file(best[0], model, device, workload).encode())
    if options.plot is not None:
        from jaxinfer.evaluation.figures import render

        title = f"{model.name} on {count} {device.name}, {workload.batch} requests"
        write_file(options.plot, render(draw(made, title), options.plot.suffix[1:]))


def _notes(runner: "Runner", workload: "Workload", cache: str) -> list[str]:
    """Say what the best mesh means for experts and tiers of the KV cache. cache: where running requests have theirs."""
    device, ways = runner.device, runner.ways
    rates = {"host": device.host_link * ways.slices * ways.pipeline, "disk": device.disk}
    notes = [expert_note(runner, workload.batch), cache_note(runner, workload.prompt, rates)]
    if cache != "device":
        notes.append(
            "The best plan keeps the cache of running requests on the host, as DeepSpeed Inference does. jaxinfer does "
            "so only for streamed weights (--kv-offload): here some requests would wait, so lower --batch."
        )
    return [note for note in notes if note]


def planned(options: DeviceOptions) -> "tuple[ModelShape, Device, System, Format]":
    """Read what is planned: the model, its devices with their price, who runs it, and how its numbers are stored."""
    from jaxinfer.sharding.planner import Catalogue
    from jaxinfer.sharding.planner.search import FORMATS

    catalogue = Catalogue.read()
    device = catalogue.device(options.kind)
    if options.price is not None:
        device = dataclasses.replace(device, price=options.price)
    model, form = _model(options), FORMATS[options.quantize]
    return model, device, catalogue.system(model, form), form


def say_price(device: "Device") -> None:
    """Say that there is no bill, if the price of a device is unknown."""
    if device.price is None:
        typer.echo(f"No price of {device.name} is known: give --price DOLLARS per device and hour for a bill.")


def _model(options: DeviceOptions) -> "ModelShape":
    from jaxinfer.sharding.planner import Catalogue

    if options.name is not None:
        return Catalogue.read().model(options.name)
    from jaxinfer.cli.info.description import look_at
    from jaxinfer.models import DecoderConfig
    from jaxinfer.models.planning import shape_of

    assert options.folder is not None
    if str(options.folder) in Catalogue.read().models and not options.folder.exists():
        raise ValueError(f"MODEL is a directory or repository: write --model {options.folder} for the planner's model.")
    config = look_at(str(options.folder)).description.config
    if not isinstance(config, DecoderConfig):
        raise ValueError(f"{options.folder}: --devices plans language models; this is a {type(config).__name__}.")
    return shape_of(str(options.folder), config)


def _workload(options: DeviceOptions) -> "Workload":
    from jaxinfer.sharding.planner import Workload

    return Workload(batch=options.batch, prompt=options.prompt, generate=options.generate)


def _best_of_each(made: "list[Prediction]") -> "list[Prediction]":
    """Keep the best plan of each mesh and schedule, in order."""
    best: dict[tuple[Any, str], Prediction] = {}
    for each in made:
        best.setdefault((each.plan.ways, each.plan.schedule), each)
    return list(best.values())


def _table(
    shown: "list[Prediction]", model: "ModelShape", device: "Device", count: int, form: "Format", workload: "Workload"
) -> Any:
    from jaxinfer.cli.display import figure, table

    title = (
        f"{model.name} ({model.params / 1e9:.1f}B, {form.weight_bytes * 8:g} bits) on {count} {device.name} for "
        f"{workload.batch} requests of {workload.prompt} + {workload.generate} tokens"
    )
    costs = () if device.price is None else ("$/M",)
    figures = ("GB", "TTFT s", "TPOT ms", "tokens/s", *costs)
    rows = table("mesh", "schedule", "limited by", *figures, figures=len(figures), title=title)
    for made in shown:
        bill = () if device.price is None else (figure(dollars(made, device.price), 3),)
        rows.add_row(
            str(made.plan.ways).replace(",", ", "),
            schedule_text(made),
            f"{made.first.bound}, {made.each.bound}",
            f"{made.memory.device / 1e9:.1f}",
            figure(made.first.total, 3),
            figure(1e3 * made.each.total, 3),
            figure(made.tokens_per_s, 3 if made.tokens_per_s < 1000 else 4),
            *bill,
        )
    return rows


def schedule_text(made: "Prediction") -> str:
    """Describe a schedule, and where weights and the cache are if not on the devices."""
    plan = made.plan
    text = plan.schedule
    if plan.schedule == "hybrid":
        text += f" {plan.prompt_micro_batches}, {plan.micro_batches}"
    else:
        text += f" {plan.chunk}"
    if plan.weights != "device":
        text += f", weights on {plan.weights}"
    if plan.cache != "device":
        text += f", cache on {plan.cache}"
    return text


def dollars(made: "Prediction", price: float) -> float:
    """Compute the dollars for a million generated tokens."""
    return price * made.plan.ways.size / 3600 / made.tokens_per_s * 1e6


def mesh_file(made: "Prediction", model: "ModelShape", device: "Device", workload: "Workload") -> str:
    """Write the TOML file of a plan, for `--mesh`."""
    ways = [f"{name} = {count}" for name, count in dataclasses.asdict(made.plan.ways).items() if count > 1]
    lines = [
        f"# {model.name} on {made.plan.ways.size} {device.name}, for {workload.batch} requests of {workload.prompt} + "
        f"{workload.generate} tokens.",
        f"# Predicted: first token in {made.first.total:.3g} s, then one each {1e3 * made.each.total:.3g} ms, "
        f"{made.tokens_per_s:.4g} tokens/s ({schedule_text(made)}).",
        "[mesh]",
        *(ways or ["data = 1"]),
    ]
    if made.plan.weights != "device":
        lines += ["", "[memory]", f'weights = "{made.plan.weights}"']
    return "\n".join(lines) + "\n"


def draw(made: "list[Prediction]", title: str) -> "Figure":
    """Draw all plans by latency and throughput, and name those than which none is better in both."""
    from matplotlib.figure import Figure

    from jaxinfer.evaluation.figures import SEQUENCE, finish, legend_outside

    def place(each: "Prediction") -> tuple[float, float]:
        return 1e3 * each.each.total, each.tokens_per_s / each.plan.ways.size

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    schedules = dict.fromkeys(each.plan.schedule for each in made)
    for schedule, colour in zip(schedules, SEQUENCE, strict=False):
        points = [place(each) for each in made if each.plan.schedule == schedule]
        axes.plot(*zip(*points, strict=True), "o", color=colour, label=schedule, alpha=0.7)
    most = 0.0
    for each in sorted(made, key=lambda each: (place(each)[0], -place(each)[1])):
        if (rate := place(each)[1]) > most:
            axes.annotate(str(each.plan.ways), place(each), (4, -8), textcoords="offset points", fontsize=6)
            most = rate
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ms between tokens of a request")
    axes.set_ylabel("tokens/s of a device")
    axes.set_title(title)
    legend_outside(figure, axes)
    return finish(figure)
