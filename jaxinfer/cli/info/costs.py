"""The measured costs of a model's programs on this machine, as tables."""

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from jaxinfer.compiled.costs import KeptCosts
    from jaxinfer.models import ModelConfig

FEWEST_POINTS = 3
"""Fewest points of a line that is worth showing: it goes through any two."""

_OFF = ("=None", "=0")
"""Ends of options that are not in use."""


def print_costs(config: "ModelConfig") -> None:
    """Print what a model's programs took on this machine, a table for each format and choice of options."""
    import jax

    from jaxinfer.cli.display import show
    from jaxinfer.compiled.costs import kept_costs
    from jaxinfer.models.devices import device_name

    device = device_name(jax.local_devices()[0])
    records = [kept for kept in kept_costs(device) if kept.model.get("config") == str(config)]
    if not records:
        typer.echo(f"No programs of this model were measured on {device} yet.")
    for kept in records:
        options = [option for option in kept.model.get("options", "").split(", ") if not option.endswith(_OFF)]
        others = [text for name, text in kept.model.items() if text and name not in ("config", "options")]
        title = f"{device}, JAX {kept.jax}\n{', '.join(others + options)}"
        show(*(table for table in (_cost_table(kept, title), _fit_table(kept)) if table.row_count))


def _cost_table(kept: "KeptCosts", title: str) -> "Table":
    from jaxinfer.cli.display import figure, table
    from jaxinfer.compiled.program import bucket_text

    costs = table("program", "sizes", "calls", "mean ms", "p50 ms", "p95 ms", figures=4, title=title)
    for (name, bucket), cost in sorted(kept.costs.items()):
        times = (figure(1e3 * seconds) for seconds in (cost.mean, cost.p50, cost.p95))
        costs.add_row(name, bucket_text(bucket), f"{cost.calls:,}", *times)
    return costs


def _fit_table(kept: "KeptCosts") -> "Table":
    """Return a table of lines through costs that differ in one size alone."""
    from jaxinfer.cli.display import figure, table
    from jaxinfer.compiled import CostTable
    from jaxinfer.compiled.program import bucket_text

    lines = table("program", "line over", "at", "ms for\none more", "ms for\nnone", "R²", "points", figures=4)
    costs = CostTable(kept.costs)
    held = {
        (name, over, tuple(size for size in bucket if size[0] != over)): None
        for name, bucket in sorted(kept.costs)
        for over, _ in bucket
    }
    for name, over, rest in held:
        fit = costs.fit(name, over, **dict(rest))
        if fit and fit.points >= FEWEST_POINTS:
            numbers = figure(1e3 * fit.slope), figure(1e3 * fit.intercept), f"{fit.r2:.3f}", str(fit.points)
            lines.add_row(name, over, bucket_text(rest), *numbers)
    return lines
