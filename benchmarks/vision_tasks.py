"""The parts of `benchmarks.vision` with real images and texts: accuracy by level, switching, embeddings."""

import argparse
import ast
import statistics
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np
import rich
from rich.table import Table

from benchmarks.image_engines import add_row, take_turns, timed
from benchmarks.report import ROOT, Report
from examples.embed import fetch
from examples.train_elastic_vit import DIVISION, SEEDED_TASKS, SEEDS
from jaxinfer.elastic import Dataset, LevelAccuracy, Service, load_dataset
from jaxinfer.evaluation.elastic.measurements import which_are_right

BACKBONE, SEEDED = ROOT / "examples" / "elastic_vit", ROOT / "benchmarks" / "data" / "elastic_vit_seeds"
"""The model, and its tasks that were trained once more from other seeds."""
SWITCHES = 400
EMBEDDING_LEVELS = (0, -2, -4, -8, -16, -32)
TEXTS, TOKENS = 256, 128
"""Number of texts that are embedded, and their approximate tokens."""


def tasks(report: Report, args: argparse.Namespace) -> None:
    """Measure the committed tasks' accuracy on images that nothing was trained on, and each level's throughput."""
    service = Service.from_checkpoint(BACKBONE)
    service.compile_ahead()
    largest, table = service.batch_sizes[-1], Table("level", *service.tasks, "images/s", title="right answers, %")
    tests = {name: _test_images(name, service) for name in service.tasks}
    seconds = _level_seconds(service, next(iter(tests.values())).images[:largest], args.rounds)
    right = {
        (name, level): which_are_right(service, name, level, test)
        for name, test in tests.items()
        for level in service.levels
        if level <= 0 or level in service.task(name).prompts
    }
    for level in service.levels:
        cells, rate = [], len(tests[next(iter(tests))].images[:largest]) / statistics.median(seconds[level])
        for name in tests:
            if (name, level) not in right:
                cells.append("")
                continue
            accuracy = LevelAccuracy.from_correct(right[name, level], right[name, 0], str(service.adaptation(level)))
            report.row(
                figure="accuracy",
                task=name,
                level=level,
                adaptation=accuracy.adaptation,
                images=accuracy.images,
                accuracy=round(accuracy.accuracy, 4),
                standard_error=round(accuracy.standard_error, 4),
                difference=round(accuracy.difference, 4),
                difference_error=round(accuracy.difference_error, 4),
                p_value=round(accuracy.p_value, 5),
            )
            mark = "*" if accuracy.p_value < 0.05 else ""
            cells.append(f"{100 * accuracy.accuracy:.1f} ({100 * accuracy.difference:+.1f}{mark})")
        report.row(figure="level throughput", level=level, batch=largest, images_per_second=round(rate, 1))
        table.add_row(f"{level:+d}" if level else "0", *cells, f"{rate:,.0f}")
    rich.print(table)
    lowest = service.levels[0]
    lost = {name: right[name, 0].mean() - right[name, lowest].mean() for name in tests}
    report.check("most_lost_at_lowest_level", 100 * max(lost.values()), "points", target=5.0)
    gain = statistics.median(seconds[0]) / statistics.median(seconds[lowest])
    report.check("lowest_level_gain", gain, "x", target=1.7)
    for name in SEEDED_TASKS:
        _compare_seeds(report, service, name, tests[name], right[name, 0])


def _compare_seeds(report: Report, service: Service, name: str, test: Dataset, plain: np.ndarray) -> None:
    """Test the mean effect of prompts over seeds against chance."""
    from scipy.stats import ttest_1samp  # takes a second to import

    seeds = Service.from_checkpoint(BACKBONE, repository=SEEDED, merge_levels=(-8,), schedule="constant", max_batch=64)
    prompts = max(service.task(name).prompts)
    answers = [which_are_right(service, name, prompts, test)]
    answers += [which_are_right(seeds, f"{name}-{seed}", prompts, test) for seed in SEEDS]
    differences = [100 * (right.mean() - plain.mean()) for right in answers]
    _, p = map(float, ttest_1samp(differences, 0.0))  # statistic and p-value
    report.row(
        figure="prompts over seeds",
        task=name,
        level=prompts,
        points=[round(value, 2) for value in differences],
        mean=round(statistics.mean(differences), 2),
        deviation=round(statistics.stdev(differences), 2),
        p_value=round(p, 4),
    )
    verdict = "a difference" if p < 0.05 else "no difference that chance would not make"
    rich.print(
        f"{name}: {prompts} prompts, {len(answers)} seeds: {statistics.mean(differences):+.2f} points "
        f"(deviation {statistics.stdev(differences):.2f}, p {p:.3f}): {verdict}"
    )


def _test_images(name: str, service: Service) -> Dataset:
    return DIVISION.parts(load_dataset(name, service.config.image_size, service.config.preprocessing)).test


def _level_seconds(service: Service, images: np.ndarray, rounds: int) -> dict[int, list[float]]:
    """Time a batch at every level, of a task that has it, in turn, in seconds."""

    def run(level: int) -> Callable[[], float]:
        name = next(n for n, task in service.tasks.items() if level <= 0 or level in task.prompts)
        return lambda: min(timed(lambda: service.classify(images, name, level)) for _ in range(5))

    times = take_turns({str(level): run(level) for level in service.levels}, rounds)
    return {int(level): seconds for level, seconds in times.items()}


def switching(report: Report, args: argparse.Namespace) -> None:
    """Measure the extra cost of an image whose level differs from that of the one before."""
    service = Service.from_checkpoint(BACKBONE)
    name, image = (
        next(iter(service.tasks)),
        np.zeros((1, service.config.image_size, service.config.image_size, 3), np.uint8),
    )
    levels = [level for level in service.levels if level <= 0 or level in service.task(name).prompts]
    service.compile_ahead(levels)
    compiled = service.compiled
    for level in levels * 3:
        service.classify(image, name, level)

    def seconds_of(order: list[int]) -> float:
        return timed(lambda: [service.classify(image, name, level) for level in order])

    count = SWITCHES // len(levels) * len(levels)
    one_by_one = [level for level in levels for _ in range(count // len(levels))]
    switched = levels * (count // len(levels))
    times = take_turns({"same": lambda: seconds_of(one_by_one), "switched": lambda: seconds_of(switched)}, args.rounds)
    ms = {way: 1e3 * statistics.median(seconds) / count for way, seconds in times.items()}
    report.row(figure="switching", images=count, **{f"{way}_ms": round(value, 4) for way, value in ms.items()})
    report.check("gamma_switch_ms", max(ms["switched"] - ms["same"], 0.0), "ms", target=1.0, better="lower")
    report.check("compiled_while_classifying", service.compiled - compiled, "programs", target=0.0, better="lower")
    rich.print(f"An image at the level of the one before: {ms['same']:.3f} ms; at another: {ms['switched']:.3f} ms.")


def embeddings(report: Report, args: argparse.Namespace) -> None:
    """Embed by real BERT weights with tokens merged: measure the speed-up, and the similarity to vectors without."""
    from jaxinfer import Embedder
    from jaxinfer.models.files.conversion import convert

    folder = args.work_dir / "all-MiniLM-L6-v2"
    if not folder.exists():
        convert(fetch(args.work_dir / "all-MiniLM-L6-v2-hf"), folder)
    embedders = {level: Embedder(folder, level=level, context=TOKENS) for level in EMBEDDING_LEVELS}
    tokenizer = embedders[0].tokenizer
    assert tokenizer is not None, "the package has one"
    texts = _texts(lambda text: len(tokenizer.encode(text)))
    vectors = {level: embedder.embed(texts) for level, embedder in embedders.items()}
    times = take_turns(
        {
            str(level): lambda embedder=embedder: timed(lambda: embedder.embed(texts))
            for level, embedder in embedders.items()
        },
        args.rounds,
    )
    table = Table("level", "texts/s", "gain", "cosine, mean", "least of 95%", title="all-MiniLM-L6-v2")
    base = statistics.median(times["0"])
    for level in EMBEDDING_LEVELS:
        cosines = np.sum(vectors[level] * vectors[0], axis=1)
        gain, mean, least = base / statistics.median(times[str(level)]), cosines.mean(), np.percentile(cosines, 5)
        add_row(report, "embeddings", str(level), times[str(level)], gain=round(gain, 3), cosine=round(float(mean), 4))
        rate = len(texts) / statistics.median(times[str(level)])
        table.add_row(str(level), f"{rate:.1f}", f"{gain:.2f}", f"{mean:.4f}", f"{least:.4f}")
    rich.print(table)


def _texts(count: Callable[[str], int]) -> list[str]:
    """Collect docstrings of the standard library with about `TOKENS` tokens, by the function `count`."""
    collected = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tree = ast.parse(file.read_bytes())
        nodes = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module))
        texts = (" ".join((ast.get_docstring(node) or "").split()[:110]) for node in nodes)
        collected += [text for text in texts if len(text) > 3 * TOKENS and TOKENS // 2 < count(text) <= TOKENS]
        if len(collected) >= TEXTS:
            break
    return collected[:TEXTS]
