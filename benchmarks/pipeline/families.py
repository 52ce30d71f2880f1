"""Greedy tokens of every family of decoders in two and in four stages, against one device.

A golden has two to seven layers. Where these cannot be divided, the model is the golden's config with its layers
repeated until they can, in random weights. One step reads three prompts, and one decodes them.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.pipeline.steps import STRIDES, decode
from benchmarks.report import ROOT, Report
from benchmarks.workers import QUICK, run_module
from jaxinfer import LLM, MeshConfig
from jaxinfer.models import DecoderConfig
from jaxinfer.models.families import family_of
from jaxinfer.models.files.conversion import convert
from jaxinfer.models.files.loading import save_model
from jaxinfer.models.stages import divide

STAGES = (2, 4)
MOST_REPEATS = 4
GOLDENS = ROOT / "tests" / "goldens"
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [2, 7], [1, 8, 2])
"""As many rows as leave a micro-batch of four stages empty; the first takes two chunks."""
PASSES = 12
SIZES: dict[str, Any] = {
    "max_batch": 3,
    "token_budget": 16,
    "chunk_size": 4,
    "page_size": 24,
    "context": 24,
    "max_decode_passes": PASSES,
    "overlap": False,
}


def decoders(*, every: bool) -> dict[Path, DecoderConfig]:
    """The goldens that are decoders, with their configs: all, or the first of each family."""
    configs: dict[Path, DecoderConfig] = {}
    families = set[str]()
    for folder in sorted(path.parent for path in GOLDENS.glob("*/config.json")):
        hf = json.loads((folder / "config.json").read_text())
        config = family_of(hf).config(hf)
        if isinstance(config, DecoderConfig) and (every or hf["model_type"] not in families):
            configs[folder] = config
            families.add(hf["model_type"])
    return configs


def are_divisible(config: DecoderConfig) -> bool:
    """Return whether the layers of a model can be divided into all numbers of stages."""
    try:
        return all(divide(config, count) for count in STAGES)
    except ValueError:
        return False


def repeated(config: DecoderConfig, times: int) -> DecoderConfig:
    """The config with the same layers once more, and so on: windows, positions and MLPs, in their order."""
    return config.with_layers([*range(config.layers)] * times)


def repeats_of(config: DecoderConfig) -> int | None:
    """Return how often layers are repeated until they can be divided; None: no number helps."""
    counts = range(1, MOST_REPEATS + 1)
    return next((times for times in counts if are_divisible(repeated(config, times))), None)


def greedy_tokens(path: Path, **options: Any) -> list[list[int]]:
    """Generate from prompts of several lengths together."""
    with LLM(path, **SIZES, **options) as llm:
        return decode(llm, PROMPTS, PASSES, STRIDES["queued"]).tokens


def compare(folder: Path, config: DecoderConfig) -> Iterator[dict[str, Any]]:
    """Yield whether a golden's tokens are those of one device, by number of stages; None where it has no stages."""
    family, times = json.loads((folder / "config.json").read_text())["model_type"], repeats_of(config)
    row = {"figure": "family", "golden": folder.name, "family": family}
    if times is None:
        yield row | {"equal": None}
        return
    with tempfile.TemporaryDirectory() as temporary:
        path, model = Path(temporary) / "model", repeated(config, times)
        if times == 1:
            convert(folder, path)
        else:
            from tests.tiny import random_model

            save_model(path, random_model(model), family=family)
        alone = greedy_tokens(path)
        for count in STAGES:
            equal = greedy_tokens(path, mesh=MeshConfig(pipeline=count)) == alone
            yield row | {"random": times > 1, "stages": count, "layers": str(divide(model, count)), "equal": equal}


def run(report: Report, args: argparse.Namespace) -> None:
    """Check that every decoder that can be divided has one device's tokens."""
    environment = {"JAX_PLATFORMS": "cpu", "NPROC": "32", "JAX_NUM_CPU_DEVICES": str(STAGES[-1]), "XLA_FLAGS": QUICK}
    which = ["--every"] if args.every_golden else []
    rows = run_module(__name__, *which, **environment)["rows"]
    report.rows += rows
    equal = [row["equal"] for row in rows if row["equal"] is not None]
    report.check("families_equal", statistics.mean(equal), "of the runs", target=1)


if __name__ == "__main__":
    goldens = decoders(every="--every" in sys.argv)
    print(json.dumps({"rows": [row for each in goldens.items() for row in compare(*each)]}))
