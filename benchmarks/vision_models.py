"""Convolutional image models on a CPU against PyTorch and ONNX Runtime.

    python -m benchmarks.vision_models [--quick] [--json benchmarks/results/KIND/vision_models.json]

ResNet-101 at 224 pixels and YOLOv5m at 640, batch 1 and 8, float32, random weights: from uint8 images to logits, or to
predictions before non-maximum suppression, which torch alone does not have (ours is timed by itself). Every figure is
the median over rounds in which all engines take turns, with as many threads as there are cores. On a machine that
others use, give `--threads 1`: torch's threads wait for one another at every layer, so that it loses far more than its
share of the cores. Nothing is timed unless the outputs agree. The JSON is rewritten after every figure.
"""

import argparse
import time

import numpy as np

from benchmarks.image_engines import (
    MODULES,
    add_options,
    add_row,
    compare,
    make_models,
    of_peer,
    parse,
    print_rows,
    timed,
)
from benchmarks.report import Report
from benchmarks.workers import find_peers

OUTPUTS = {"resnet101": "logits", "yolov5m": "predictions"}
BATCHES = (1, 8)


def time_suppression(predictions: np.ndarray, rounds: int) -> list[float]:
    """Time non-maximum suppression in every round, in seconds."""
    import jax

    from jaxinfer.models.vision.suppression import suppress

    run = jax.jit(lambda predictions: suppress(predictions, confidence=0.25, iou=0.45))
    times = [timed(lambda: jax.block_until_ready(run(predictions))) for _ in range(1 + rounds)]
    return times[1:]


def add_checks(report: Report) -> None:
    """Check torch's time relative to ours, in the worse of both batches."""
    for check, name in (("resnet_vs_torch", "resnet101"), ("yolo_vs_torch", "yolov5m")):
        report.check(check, of_peer(report, name, BATCHES), "x", target=0.7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "vision_models")
    args = parse(parser)

    peer_python = find_peers(args.peer_python, MODULES)
    make_models(OUTPUTS, args.work_dir, peer_python)
    start, report = time.monotonic(), Report()
    report.print_header()
    report.row(figure="settings", rounds=args.rounds, threads=args.threads)

    def add_suppression(batch: int, predictions: np.ndarray) -> None:
        add_row(report, f"suppression batch {batch}", "jaxinfer", time_suppression(predictions, args.rounds))

    compare(report, "resnet101", OUTPUTS["resnet101"], BATCHES, args, peer_python)
    compare(report, "yolov5m", OUTPUTS["yolov5m"], BATCHES, args, peer_python, after=add_suppression)
    print_rows([row for row in report.rows if "ms" in row])
    add_checks(report)
    report.row(figure="part", part="all", seconds=round(time.monotonic() - start, 1))
    report.finish(args.json)


if __name__ == "__main__":
    main()
