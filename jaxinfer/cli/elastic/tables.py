"""The tables of the elastic commands."""

from rich.table import Table

from jaxinfer.cli.display import table
from jaxinfer.elastic.service import Service


def levels_table(service: Service, name: str) -> Table:
    """Return a table of a task's levels: tokens, accuracy with standard errors, and what batches take."""
    task, sizes = service.task(name), service.batch_sizes
    largest, config = sizes[-1], service.config
    levels = table(
        "level",
        "tokens",
        "accuracy, %",
        "vs. level 0",
        "p",
        "batch of\n1, ms",
        f"batch of\n{largest}, ms",
        "images/s",
        figures=8,
        title=f"{name}: {service.accuracy(name, 0).images} validation images; tokens in the last MLP",
    )
    for level in (level for level in service.levels if level <= 0 or level in task.prompts):
        accuracy, batch = service.accuracy(name, level), service.latency.seconds(level, largest)
        _, tokens = service.adaptation(level).counts(config.tokens, config.layers, protected=config.first_patch)[-1]
        levels.add_row(
            f"{level:+d}" if level else "0",
            str(tokens),
            f"{100 * accuracy.accuracy:.1f} ± {100 * accuracy.standard_error:.1f}",
            f"{100 * accuracy.difference:+.1f} ± {100 * accuracy.difference_error:.1f}" if level else "",
            f"{accuracy.p_value:.2g}" if level else "",
            f"{1e3 * service.latency.seconds(level, 1).p50:.2f}",
            f"{1e3 * batch.p50:.2f}",
            f"{largest / batch.p50:,.0f}",
        )
    return levels
