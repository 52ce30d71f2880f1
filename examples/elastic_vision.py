"""Choose the number of tokens per image: one vision transformer, several tasks, a level for each batch (OTAS).

    python examples/elastic_vision.py
    python examples/elastic_vision.py --tasks digits faces --prompts 2 8 --repository tasks

Trains a head and prompts for each task on the backbone in examples/elastic_vit, profiles them, and classifies images
that nothing was trained on, at every level: above 0 prompts are added in each layer, below 0 tokens are merged. Tasks
that are in the repository already are not trained again. Needs the extra `elastic`; takes a few minutes.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jaxinfer.elastic import Dataset, Division, Service, TrainingConfig, load_dataset

BACKBONE = Path(__file__).parent / "elastic_vit"
DIVISION = Division(test_share=0.25, test_seed=1)
"""Division of train_elastic_vit.py: the backbone has not seen the images for tests."""


def right_answers(service: Service, name: str, test: Dataset, level: int) -> tuple[float, float]:
    """The share of right answers, and images per second."""
    begun = time.perf_counter()
    answers = service.classify(test.images, name, level)
    seconds = time.perf_counter() - begun
    right = np.mean([answer.label == test.names[label] for answer, label in zip(answers, test.labels, strict=True)])
    return float(right), len(test) / seconds


def compare_levels(service: Service, tests: dict[str, Dataset]) -> Table:
    """Tabulate all tasks at all their levels."""
    table = Table("level", "tokens in the last layer", *tests, "images/s", box=SIMPLE_HEAD)
    for column in table.columns:
        column.justify = "right"
    for level in service.levels:
        cells, rates = [], []
        for name, test in tests.items():
            if level > 0 and level not in service.task(name).prompts:
                cells.append("")
                continue
            service.classify(test.images[:1], name, level)  # the first call of a program sets up what later calls reuse
            right, rate = right_answers(service, name, test, level)
            cells.append(f"{right:.1%}")
            rates.append(rate)
        attention, mlp = service.adaptation(level).counts(service.config.tokens, service.config.layers)[-1]
        tokens = f"{attention}" if attention == mlp else f"{attention}, then {mlp}"
        table.add_row(f"{level:+d}" if level else "0", tokens, *cells, f"{np.median(rates):,.0f}")
    return table


def main(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        service = Service.from_checkpoint(
            args.model,
            repository=args.repository or temporary,
            merge_levels=args.merge_levels,
            max_batch=args.max_batch,
        )
        tests = {}
        for name in args.tasks:
            dataset = load_dataset(name, service.config.image_size, service.config.preprocessing)
            if name not in service.tasks:
                training = TrainingConfig(steps=args.steps)
                service.register_task(name, dataset, prompts=args.prompts, division=DIVISION, training=training)
            tests[name] = service.task(name).divide(dataset).test
        service.compile_ahead()  # else each program is compiled when it is first needed
        print(f"{service.compiled} programs, none compiled from here on. Right answers to images never seen:")
        Console().print(compare_levels(service, tests))
        # Images of several tasks go through the model together.
        names = list(tests)
        images = np.stack([tests[name].images[0] for name in names])
        for name, answer in zip(names, service.classify(images, names, service.levels[0]), strict=True):
            print(f"{name} at level {answer.level}: {answer.label} ({answer.probabilities.max():.0%})")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=BACKBONE, help="a model directory of a vision transformer")
    parser.add_argument("--repository", type=Path, help="folder to keep tasks in (default: do not keep them)")
    parser.add_argument("--tasks", nargs="+", default=["digits", "textures"], help="data sets, or folders of images")
    parser.add_argument("--prompts", nargs="*", type=int, default=[2, 8], help="numbers of prompts; each is a level")
    parser.add_argument("--merge-levels", nargs="*", type=int, help="levels below 0 (default: five)")
    parser.add_argument("--max-batch", type=int, default=64, help="largest number of images in a batch")
    parser.add_argument("--steps", type=int, default=600, help="training steps of each number of prompts")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse())
