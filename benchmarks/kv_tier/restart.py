"""Sessions that go on after `kill -9` and a new start: from readiness to the first token of their next turn."""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.kv_tier.settings import PAGE, Settings, Tokens
from benchmarks.report import ROOT, Report
from benchmarks.workers import EngineError
from jaxinfer import LLM, SamplingParams
from jaxinfer.generation.engine.disk_pages import DiskPages

DISK_KV_LIMIT = "4GiB"
WITHIN = 5.0
"""Seconds from the end of a turn to the end of the process."""
QUESTION, ANSWER = 32, 8
PARAMS = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)


def restart(report: Report, settings: Settings) -> None:
    """Measure `resume_after_restart_gain`: sessions that a killed process has left, from disk and computed again."""
    folder = settings.folder / "disk-kv"
    shutil.rmtree(folder, ignore_errors=True)
    stored = run(settings, "store", status=-signal.SIGKILL)
    done = run(settings, "resume", json.dumps(stored["sessions"]))
    shutil.rmtree(folder)
    report.row(figure="restart", tokens=settings.tokens, stored=stored["stored"], **done)
    valid = done["read_back_bytes"] and not done["compile_misses"]
    invalid = "" if valid else "nothing was read back, or a program was compiled"
    resumed, computed = (statistics.median(done[name]) for name in ("resumed_ms", "computed_ms"))
    report.check("resume_after_restart_gain", computed / resumed, "x", target=10, invalid=invalid)
    report.check("restart_tokens_equal", int(done["tokens_equal"]), "", target=1, invalid=invalid)


def run(settings: Settings, *arguments: str, status: int = 0) -> dict[str, Any]:
    """Run a process of this module; return the JSON object that it prints. status: how it is to end."""
    command = [sys.executable, "-m", "benchmarks.kv_tier.restart", *arguments, "--work-dir", str(settings.folder)]
    command += ["--quick"] if settings.quick else []
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env)
    if done.returncode != status:
        raise EngineError(f"the process ended with status {done.returncode}; its own message is above.")
    return json.loads(done.stdout.splitlines()[-1])


def engine(settings: Settings) -> LLM:
    """An engine with room for two sessions on the device, whose programs are compiled."""
    disk = {"disk_kv": settings.folder / "disk-kv", "disk_kv_limit": DISK_KV_LIMIT}
    return settings.engine(2 * (settings.tokens // PAGE + 8), max_batch=1, **disk)


def store(settings: Settings) -> None:
    """Run the first turn of sessions, and end by SIGKILL."""
    llm = engine(settings)
    tokens, sessions = Tokens(llm), []
    for _ in range(2 if settings.quick else 4):
        prompt = tokens.draw(settings.tokens)
        (output,) = llm.generate([prompt], PARAMS)
        sessions.append([*prompt, *output.outputs[0].token_ids, *tokens.draw(QUESTION)])
    time.sleep(WITHIN)
    kept = llm.stats().disk_kv
    assert kept is not None
    print(json.dumps({"sessions": sessions, "stored": kept.stored}), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def resume(settings: Settings, sessions: list[list[int]]) -> None:
    """Run the next turn of each session from disk, then once more with nothing kept."""
    llm = engine(settings)
    tier, misses = llm.engine.page_tier, llm.stats().compile_misses
    assert isinstance(tier, DiskPages)
    resumed = [turn(llm, session) for session in sessions]
    kept = llm.stats().disk_kv
    assert kept is not None
    computed = []
    for session in sessions:
        tier.settle()
        tier.blocks.clear()
        (pool,) = llm.engine.scheduler.pools
        pool.clear()
        computed.append(turn(llm, session))
    result = {
        "resumed_ms": [ms for ms, _ in resumed],
        "computed_ms": [ms for ms, _ in computed],
        "tokens_equal": [tokens for _, tokens in resumed] == [tokens for _, tokens in computed],
        "read_back_bytes": kept.read_back_bytes,
        "compile_misses": llm.stats().compile_misses - misses,
    }
    print(json.dumps(result), flush=True)


def turn(llm: LLM, session: list[int]) -> tuple[float, list[int]]:
    """Run a turn; return the milliseconds to its first token, and its tokens."""
    (output,) = llm.generate([session], PARAMS)
    seconds = output.outputs[0].timings.first_token_s
    assert seconds is not None
    return round(1e3 * seconds, 1), list(output.outputs[0].token_ids)


def main() -> None:
    parser = argparse.ArgumentParser(description="A process of the part `restart`.")
    parser.add_argument("what", choices=("store", "resume"))
    parser.add_argument("sessions", nargs="?", default="[]", type=json.loads, help="tokens of each session, as JSON")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--work-dir", type=Path, required=True)
    args = parser.parse_args()
    settings = Settings(args.quick, args.work_dir)
    if args.what == "store":
        store(settings)
    else:
        resume(settings, args.sessions)


if __name__ == "__main__":
    main()
