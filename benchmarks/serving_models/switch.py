"""The time from a request for a model that sleeps to its first step, next to reading the model's bytes."""

import os
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import rich

from benchmarks.report import Report
from benchmarks.serving_models.settings import Settings
from jaxinfer import AsyncLLM, SamplingParams
from jaxinfer.checkpoints.host_memory import aligned_buffer
from jaxinfer.checkpoints.layer_files import BLOCK_BYTES, read_cached
from jaxinfer.generation.execution.whole_weights import PARTS
from jaxinfer.http.served_model import ServedModel
from jaxinfer.http.served_models import ServedModels
from jaxinfer.serving.budget import host_budget
from jaxinfer.streaming.layer_folders import layer_folder

ROUNDS = 15
READERS = 4
PROMPT = [5 + place for place in range(64)]


class Switching:
    """Three models in one process, with room for one: none keeps a part of its weights while another runs."""

    def __init__(self, models: dict[str, Path]):
        options = {"context": 1024, "compile_ahead": True}  # no compiler runs beside what is timed
        self.served = [
            ServedModel(name, lambda asleep, path=path: AsyncLLM(path, asleep=asleep, **options), on_demand=True)
            for name, path in models.items()
        ]
        self.models = ServedModels(self.served)
        for model in self.served:
            model.load(asleep=True)
            self.models.residency.watch(model)
        size = max(model.llm.needed.total() for model in self.served)
        host_budget().limit(host_budget().reserved + size)
        for model in [*self.served, *self.served]:
            self.ask(model)

    def ask(self, model: ServedModel) -> float:
        """Ask a model for 16 tokens; return the seconds until its first step began."""
        executor: Any = model.llm.engine.executor
        launch, begun = executor.launch, list[float]()

        def noted(batch: Any) -> Any:
            begun.append(time.perf_counter())
            return launch(batch)

        executor.launch = noted
        start = time.perf_counter()
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        model.llm.submit([*PROMPT[:-1], int(start) % 1000 + 5], params).result()
        executor.launch = launch
        return begun[0] - start

    @property
    def compiles(self) -> int:
        """The programs that a request waited for."""
        return sum(model.llm.stats().compile_misses for model in self.served)


def files_of(model: ServedModel) -> list[Path]:
    """The files that a model's weights come from."""
    return sorted(layer_folder(model.llm.model, parts=PARTS).glob("layer-*.bin"))


def read_seconds(files: list[Path]) -> float:
    """The seconds to read files into new memory, by as many threads as the engine has."""
    sizes, start = [file.stat().st_size for file in files], time.perf_counter()
    buffers = [aligned_buffer(size).data for size in sizes]
    blocks = iter([(i, offset) for i, size in enumerate(sizes) for offset in range(0, size, BLOCK_BYTES)])
    lock = threading.Lock()

    def read() -> None:
        while True:
            with lock:
                index, offset = next(blocks, (None, 0))
            if index is None:
                return
            end = min(offset + BLOCK_BYTES, sizes[index])
            read_cached(files[index], offset, buffers[index][offset:end])

    threads = [threading.Thread(target=read) for _ in range(READERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def forget(files: list[Path]) -> None:
    """Have the system drop files from its page cache."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def times_of(switching: Switching, index: int, tier: str) -> tuple[float, float]:
    """The seconds of a switch and of reading its files, each from this tier; they take turns in being first."""
    model = switching.served[index % 3]
    files = files_of(model)
    prepare = forget if tier == "disk" else read_seconds
    times = {}
    for side in ("ours", "alone") if index % 2 else ("alone", "ours"):
        prepare(files)
        times[side] = switching.ask(model) if side == "ours" else read_seconds(files)
    return times["ours"], times["alone"]


def switch(report: Report, settings: Settings) -> None:
    """Measure `switch_vs_bytes` and `switch_compiles`."""
    for configs in ("one", "three"):
        models = settings.models(configs) if not settings.serving.quick else {}
        switching = Switching(models or demo_models(settings))
        before = switching.compiles
        size = sum(file.stat().st_size for file in files_of(switching.served[0]))
        for tier in ("page cache", "disk"):
            times = [times_of(switching, index, tier) for index in range(3 if settings.serving.quick else ROUNDS)]
            compiles = switching.compiles - before
            mine, alone = (statistics.median(seconds) for seconds in zip(*times, strict=True))
            row = {"switch_s": round(mine, 4), "read_s": round(alone, 4), "compiles": compiles}
            report.row(figure="switch", configs=configs, tier=tier, bytes=size, **row)
            rich.print(f"{configs} config(s), {tier}: {row}")
            if configs == "one":
                name = "switch_vs_bytes" + ("" if tier == "page cache" else "_disk")
                report.check(name, mine / alone, "x", target=1.25, better="lower")
        if configs == "one":
            report.check("switch_compiles", compiles, "programs", target=0, better="lower")
        switching.models.close(drain=False)


def demo_models(settings: Settings) -> dict[str, Path]:
    """For a smoke test: the demo models."""
    demo = settings.serving.demo
    return {"a": demo, "b": demo.parent / "moe_demo_model", "c": demo}
