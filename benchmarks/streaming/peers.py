"""Comparison with other engines that run models larger than memory, under the same limit."""

import json
import os
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, Report
from benchmarks.streaming.cgroup import Finished, run_capped, was_killed
from benchmarks.streaming.models import write_gguf
from benchmarks.streaming.ours import CAP, PASSES, PROMPT, decode_seconds, drop_pages, run_ours
from benchmarks.streaming.settings import Settings
from benchmarks.workers import EngineError

CAPS = [CAP, CAP * 3 // 2, 2 * CAP, 3 * CAP, 4 * CAP, 6 * CAP]
THREADS = str(os.cpu_count())
SCRIPTS = ROOT / "benchmarks/peers"


class Peers:
    """The other engines' runs.

    Attributes:
      cap: the lowest of `CAPS` under which accelerate has run.
    """

    def __init__(self, settings: Settings):
        self._folder, self._hf, self._python = settings.folder, settings.large_hf(), settings.python
        self.cap = CAP

    def accelerate(self, batch: int) -> dict[str, Any]:
        """Run accelerate, under the lowest cap that it survives."""
        with tempfile.TemporaryDirectory(dir=self._folder) as offload:
            while True:
                arguments = [offload, THREADS, batch, PROMPT, PASSES]
                done = self._run("run_accelerate.py", self._hf, *arguments)
                if not was_killed(done.status):
                    return read_peer(done)
                self.cap = CAPS[CAPS.index(self.cap) + 1]

    def llama_cpp(self, rounds: int) -> list[dict[str, Any]]:
        """Run llama.cpp on a file that is mapped into memory, and removed afterwards."""
        file = self._folder / "f32.gguf"
        write_gguf(self._hf, file, self._python)
        runs = [self._run("run_llama_cpp_mmap.py", file, THREADS, 1, PROMPT, PASSES) for _ in range(rounds)]
        file.unlink()
        return [read_peer(done) for done in runs]

    def _run(self, script: str, model: Path, *arguments: Any) -> Finished:
        """Run a peer's process, after its files have left memory."""
        drop_pages(model)
        return run_capped([self._python, SCRIPTS / script, model, *map(str, arguments)], self.cap)


def peers(report: Report, settings: Settings) -> None:
    """Compare with accelerate in turn, and then with llama.cpp.

    llama.cpp's file does not fit the disk beside the others' formats.
    """
    others, model = Peers(settings), settings.large_model()
    ours: dict[int, list[float]] = {1: [], 8: []}
    theirs: dict[int, list[float]] = {1: [], 8: []}

    def compare(engine: str, batch: int, peer: dict[str, Any]) -> None:
        mine = run_ours(model, others.cap, batch=batch)
        ours[batch].append(decode_seconds(mine))
        report.row(
            figure="peer",
            engine=engine,
            version=peer["version"],
            batch=batch,
            cap=others.cap,
            same_tokens=mine["tokens"] == peer["tokens"],
            seconds_a_pass=round(decode_seconds(peer), 3),
            our_seconds_a_pass=round(decode_seconds(mine), 3),
        )

    for _ in range(settings.rounds):
        for batch in ours:
            peer = others.accelerate(batch)
            theirs[batch].append(decode_seconds(peer))
            compare("accelerate", batch, peer)
    for batch in ours:
        gain = statistics.median(theirs[batch]) / statistics.median(ours[batch])
        report.check(f"vs_accelerate_b{batch}", gain, "x its tokens/s", target=2)
    shutil.rmtree(model)
    runs = others.llama_cpp(settings.rounds)
    settings.large_model()
    for peer in runs:
        compare("llama.cpp", 1, peer)
    gain = statistics.median(map(decode_seconds, runs)) / statistics.median(ours[1])
    report.check("vs_llamacpp", gain, "x its tokens/s", target=1)


def read_peer(done: Finished) -> dict[str, Any]:
    if done.status:
        raise EngineError(f"a peer ended with status {done.status}:\n{done.stderr[-2000:]}")
    return {**json.loads(done.stdout.splitlines()[-1]), "peak": done.peak}
