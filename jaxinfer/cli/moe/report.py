"""The load of experts as a table, as JSON, and as a heat map."""

from typing import TYPE_CHECKING, Any

import numpy as np
import typer

from jaxinfer.cli.display import figure, show, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from jaxinfer.generation.outputs import ExpertLoad
    from jaxinfer.models import DecoderConfig

BUSIEST = 4
"""How many of a layer's experts are named."""


def print_load(load: "ExpertLoad", config: "DecoderConfig") -> None:
    """Print a row for each layer that has experts."""
    experts, k = load.tokens.shape[1], _experts_per_token(config)
    title = f"{load.tokens[0].sum() // k:,} tokens, {k} of {experts} experts each"
    rows = table("layer", "busiest experts", "imbalance", "dropped", "unused", figures=3, title=title)
    for layer, tokens, imbalance, dropped in _layers(load, config):
        busiest = np.argsort(-tokens, kind="stable")[:BUSIEST]
        named = ", ".join(f"{e} ({tokens[e] / tokens.sum():.1%})" for e in busiest if tokens[e])
        rows.add_row(str(layer), named, figure(imbalance, 3), f"{dropped:.1%}", str(int((tokens == 0).sum())))
    show(rows)
    typer.echo(
        "busiest experts: share of the layer's choices; imbalance: busiest / mean; unused: experts without tokens."
    )


def as_json(load: "ExpertLoad", config: "DecoderConfig") -> dict[str, Any]:
    """Return all counts and figures as plain values."""
    layers = [
        {"layer": layer, "tokens": tokens.tolist(), "imbalance": float(imbalance), "dropped_share": float(dropped)}
        for layer, tokens, imbalance, dropped in _layers(load, config)
    ]
    return {"experts_per_token": _experts_per_token(config), "layers": layers}


def draw_load(load: "ExpertLoad", config: "DecoderConfig", caption: str) -> "Figure":
    """Draw layers by experts: the share of a layer's choices that each expert got, over an even share."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from jaxinfer.evaluation.figures import OURS, finish

    layers, experts = load.tokens.shape
    even = load.tokens / np.maximum(load.tokens.mean(axis=1, keepdims=True), 1e-9)
    size = min(12.0, 3.0 + 0.12 * experts), min(9.0, 1.8 + 0.2 * layers)
    drawn = Figure(figsize=size, layout="constrained")
    axes = drawn.subplots()
    colours = LinearSegmentedColormap.from_list("load", ["white", OURS])
    image = axes.imshow(even, cmap=colours, vmin=0.0, aspect="auto", interpolation="nearest")
    axes.set(xlabel="expert", ylabel="layer", title="tokens of each expert, 1 is even")
    axes.set_yticks(range(layers), [str(layer) for layer in config.moe_layers])
    if layers > 24:
        axes.set_yticks(axes.get_yticks()[:: layers // 12])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    drawn.colorbar(image, ax=axes)
    finish(drawn, caption)
    for each in drawn.axes:
        each.grid(False)
    return drawn


def _layers(load: "ExpertLoad", config: "DecoderConfig") -> "zip[tuple[int, np.ndarray, float, float]]":
    return zip(config.moe_layers, load.tokens, load.imbalance, load.dropped_share, strict=True)


def _experts_per_token(config: "DecoderConfig") -> int:
    moe = config.layer(config.moe_layers[0]).mlp.moe
    assert moe is not None
    return moe.router.experts_per_token
