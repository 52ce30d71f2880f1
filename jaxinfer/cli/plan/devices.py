"""`jaxinfer plan --devices`: which mesh and schedule suit a model on devices that need not be there."""

import dataclasses
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from jaxinfer.cli.bench.files import check_file, check_plot, write_file
from jaxinfer.cli.plan.notes import cache_note, expert_note, tier_notes
from jaxinfer.progress import long_work

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from jaxinfer.sharding.planner import Device, Format, ModelShape, Prediction, Runner, System, Workload

SHOWN = 10
"""Plans in the table."""
PAGE = 64
"""Tokens to which the lengths of requests are rounded up: at least those of a page."""
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
    hit_rate: float
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
        if not 0 <= self.hit_rate < 1:
            raise ValueError(f"--hit-rate must be a share in [0, 1), such as 0.8, got {self.hit_rate}.")
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
        from jaxinfer.cli.display import say, show
        from jaxinfer.sharding.planner import Runner, rank

        model, device, system, form = planned(options)
        count, workload = options.count, _workload(options)
        made = rank(model, device, count, system, form, workload, by=options.by)  # type: ignore[arg-type]  # checked
    best = _best_of_each(made)
    show(_table(_shown(best), model, device, count, form, workload))
    say(
        f"{len(made):,} plans fit; the best of each mesh, schedule and tiers, by {options.by}. Times are predicted "
        f"with constants of {system.name}, fitted to {system.source}; its points are off by {system.error:.0%} at "
        "most. Errors on public figures of other systems and devices: docs/benchmarks/planner.md."
    )
    runner = Runner(model=model, device=device, system=system, ways=best[0].plan.ways, format=form)
    for note in _notes(runner, workload, best):
        say(note)
    say_price(device)
    if options.write is not None:
        write_file(options.write, mesh_file(best[0], runner, workload).encode())
    if options.plot is not None:
        from jaxinfer.evaluation.figures import render

        title = f"{model.name} on {count} {device.name}, {workload.batch} requests"
        alike = [each for each in made if each.plan.weights == best[0].plan.weights]  # streams are far slower
        write_file(options.plot, render(draw(alike, title), options.plot.suffix[1:]))


def _notes(runner: "Runner", workload: "Workload", best: "list[Prediction]") -> list[str]:
    """Say what the best mesh means for experts and tiers of the KV cache, and what tiers gain or cost."""
    from jaxinfer.sharding.planner.tiers import disk_rate

    device, ways = runner.device, runner.ways
    links, disks = (each * ways.slices * ways.pipeline for each in (device.host_link, disk_rate(device, ways)))
    rates = {"host": links, "disk": 1 / (1 / disks + 1 / links)}  # from disks to the host, then to devices
    notes = [expert_note(runner, workload.batch), cache_note(runner, workload.prompt, rates)]
    notes += tier_notes(best, runner, workload)
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

    return Workload(batch=options.batch, prompt=options.prompt, generate=options.generate, hit_rate=options.hit_rate)


def _best_of_each(made: "list[Prediction]") -> "list[Prediction]":
    """Keep the best plan of each mesh, schedule and tiers, in order."""
    best: dict[Any, Prediction] = {}
    for each in made:
        best.setdefault((each.plan.ways, each.plan.schedule, each.plan.tiers), each)
    return list(best.values())


def _shown(best: "list[Prediction]") -> "list[Prediction]":
    """Choose the first plans, and the best of each combination of tiers that these do not have.

    Known prompts are shown in tiers with the best plan's place of weights alone.
    """
    shown, tiers, weights = [], set(), best[0].plan.weights
    for each in best:
        plan = each.plan
        is_alike = plan.prefixes == "device" or plan.weights == weights
        if is_alike and (len(shown) < SHOWN or plan.tiers not in tiers):
            shown.append(each)
            tiers.add(plan.tiers)
    return shown


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
            figure(made.tokens_per_s, 3),
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
    if plan.at_once:
        text += f", {plan.at_once * plan.ways.data:,} at once"
    if plan.weights != "device":
        text += f", weights on {plan.weights}"
    if plan.cache != "device":
        text += ", kv_offload"
    if plan.prefixes != "device":
        text += f", {plan.prefixes}_kv"
    return text


def dollars(made: "Prediction", price: float) -> float:
    """Compute the dollars for a million generated tokens."""
    return price * made.plan.ways.size / 3600 / made.tokens_per_s * 1e6


def mesh_file(made: "Prediction", runner: "Runner", workload: "Workload") -> str:
    """Write the TOML file of a plan, for `--mesh`. runner: the model on its devices."""
    from jaxinfer.cli.display import figure

    model, device, plan = runner.model, runner.device, made.plan
    first, each, rate = (figure(x, 3) for x in (made.first.total, 1e3 * made.each.total, made.tokens_per_s))
    ways = [f"{name} = {count}" for name, count in dataclasses.asdict(plan.ways).items() if count > 1]
    lines = [
        f"# {model.name} on {plan.ways.size} {device.name}, for {workload.batch} requests of {workload.prompt} + "
        f"{workload.generate} tokens: --max-batch {_running(made, workload)}.",
        f"# Predicted: first token in {first} s, then one each {each} ms, {rate} tokens/s ({schedule_text(made)}).",
        "[mesh]",
        *(ways or ["data = 1"]),
    ]
    if memory := _memory_options(made, runner, workload):
        lines += ["", "[memory]", *(f"{name} = {value}" for name, value in memory.items())]
    return "\n".join(lines) + "\n"


def _running(made: "Prediction", workload: "Workload") -> int:
    """The requests of a lane that run at once."""
    return made.plan.at_once or -(-workload.batch // made.plan.ways.data)


def _memory_options(made: "Prediction", runner: "Runner", workload: "Workload") -> dict[str, str]:
    """Choose the options of the file's table `[memory]`; a tier of prompts gets what a node has left."""
    from jaxinfer.sharding.planner.memory import kept_bytes
    from jaxinfer.sharding.planner.plans import kept_room

    plan, options = made.plan, dict[str, str]()
    if plan.weights != "device":
        options["weights"] = f'"{plan.weights}"'
        if plan.cache != "device":
            tokens = (
                _running(made, workload) * plan.ways.data * -(-(workload.prompt + workload.generate) // PAGE) * PAGE
            )
            options["kv_offload"] = str(math.ceil(tokens * kept_bytes(runner)))
    if plan.prefixes == "host":
        options["host_kv"] = str(int(kept_room(runner, made, workload)))
    elif plan.prefixes == "disk":
        options |= {"disk_kv": '"kv"', "disk_kv_limit": str(int(kept_room(runner, made, workload)))}
    return options


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
