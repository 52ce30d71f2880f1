"""The figure of exchanges: measured bytes beside the paper's latency model."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEVICE_TICKS, KIB_TICKS = (8, 16, 32, 64), (2, 4, 8, 16, 32, 64, 128, 256)
RATIO_TICKS = (1, 2, 4, 8, 16, 32, 64)


def model_of(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Fit C1 + C2 p / L to the bytes of all rows, by least squares of relative errors; return both constants."""
    import numpy as np

    sizes = np.array([row["wire_bytes"] for row in rows])
    slope, intercept = np.polyfit([row["p"] / row["L"] for row in rows], sizes, 1, w=1 / sizes)
    return float(intercept), float(slope)


def draw_exchange(result: Mapping[str, Any]) -> "Figure":
    """Draw the bytes of parallelism-coordinated communication by devices, and by p / L, an expert on each device."""
    from matplotlib.figure import Figure  # in the extra `bench`

    from jaxinfer.evaluation.figures import BLACK, SEQUENCE, finish, legend_outside, plain_ticks

    rows = [row for row in result["rows"] if row["figure"] == "devices"]
    constant, slope = model_of(rows)
    figure = Figure(figsize=(9.5, 4), layout="constrained")
    by_devices, by_peers = figure.subplots(1, 2, sharey=True)
    for colour, column in zip(SEQUENCE, sorted({row["L"] for row in rows}), strict=False):
        points = [(row["p"], row["wire_bytes"] / 1024) for row in rows if row["L"] == column]
        devices, sizes = zip(*points, strict=True)
        label = f"L = {column}" + (": all-to-all over all" if column == 1 else "")
        by_devices.plot(devices, sizes, marker="o", color=colour, label=label)
        by_peers.plot([p / column for p in devices], sizes, marker="o", linestyle="", color=colour)
        predicted = [(constant + slope * p / column) / 1024 for p in devices]
        by_devices.plot(devices, predicted, color=BLACK, linestyle=":", zorder=4)
    predicted = [(constant + slope * n) / 1024 for n in RATIO_TICKS]
    by_peers.plot(RATIO_TICKS, predicted, color=BLACK, linestyle=":", zorder=4, label="$C_1 + C_2\\ p / L$")
    for axes, ticks, name in (
        (by_devices, DEVICE_TICKS, "p, devices with an expert"),
        (by_peers, RATIO_TICKS, "p / L"),
    ):
        axes.set(xlabel=name, xscale="log", yscale="log")
        plain_ticks(axes.xaxis, ticks)
        plain_ticks(axes.yaxis, KIB_TICKS)
    by_devices.set_ylabel("KiB that a device sends in a layer")
    figure.suptitle("L devices that share tokens divide the exchange by L", fontsize="medium")
    legend_outside(figure, by_devices, by_peers)
    return finish(
        figure,
        f"Layer of top-2 of p experts, 8 tokens a lane of width 64 in float32, read from compiled programs; "
        f"C1 = {constant:,.0f} and C2 = {slope:,.0f} bytes fit all points; "
        f"{result['date']}, commit {result['commit'][:10]}",
    )
