"""The tables of the elastic commands."""

from rich.table import Table

from jaxinfer.cli.display import table
from jaxinfer.cli.elastic.opening import levels_of
from jaxinfer.elastic.service import Service


def levels_table(service: Service, name: str) -> Table:
    """Return a table of a task's levels: tokens, accuracy with standard errors, and what batches take.

    Times that were not measured are left out.
    """
    largest, config = service.batch_sizes[-1], service.config
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
    for level in levels_of(service, name):
        accuracy, times = service.accuracy(name, level), [""] * 3
        if not service.latency.missing([level], [1, largest]):
            single, batch = (service.latency.seconds(level, size).p50 for size in (1, largest))
            times = [f"{1e3 * single:.2f}", f"{1e3 * batch:.2f}", f"{largest / batch:,.0f}"]
        _, tokens = service.adaptation(level).counts(config.tokens, config.layers, protected=config.first_patch)[-1]
        levels.add_row(
            f"{level:+d}" if level else "0",
            str(tokens),
            f"{100 * accuracy.accuracy:.1f} ± {100 * accuracy.standard_error:.1f}",
            f"{100 * accuracy.difference:+.1f} ± {100 * accuracy.difference_error:.1f}" if level else "",
            f"{accuracy.p_value:.2g}" if level else "",
            *times,
        )
    return levels
