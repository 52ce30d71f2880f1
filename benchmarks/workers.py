"""The engines' processes, their models on disk, and the options of the commands that compare them."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, Report, check_that_no_part_is_lost
from jaxinfer.compiled import cache_folder

PEERS = Path(__file__).parent / "peers"
JAXINFER = Path(sys.executable).parent / "jaxinfer"  # the command, as installed beside this interpreter
OUR_SCRIPT = "run_jaxinfer.py"
Engines = Mapping[tuple[str, str], tuple[str, ...]]
# (engine, dtype) -> its script, the file or directory of the work folder that it loads, and further arguments.
ENGINES: Engines = {
    ("jaxinfer", "float32"): (OUR_SCRIPT, "jaxinfer"),
    ("jaxinfer", "int8"): (OUR_SCRIPT, "jaxinfer"),
    ("jaxinfer", "int4"): (OUR_SCRIPT, "jaxinfer"),
    ("jaxinfer", "bfloat16"): (OUR_SCRIPT, "jaxinfer"),
    ("ctranslate2", "float32"): ("run_ctranslate2.py", "ct2-float32"),
    ("ctranslate2", "int8"): ("run_ctranslate2.py", "ct2-int8"),
    ("llama.cpp", "float32"): ("run_llama_cpp.py", "f32.gguf"),
    ("llama.cpp", "int8"): ("run_llama_cpp.py", "q8_0.gguf"),
    ("llama.cpp", "bfloat16"): ("run_llama_cpp.py", "bf16.gguf"),
    ("transformers", "float32"): ("run_transformers.py", "hf"),
    ("transformers", "bfloat16"): ("run_transformers.py", "hf"),
}
INT4_ENGINES: Engines = {
    ("llama.cpp q4_0", "int4"): ("run_llama_cpp.py", "q4_0.gguf"),
    ("llama.cpp q4_K", "int4"): ("run_llama_cpp.py", "q4_K.gguf"),
}
"""Further ones for `benchmarks.cpu_decode`; `QUANTISED` has their files."""
IK_MODULE = "ik_llama_cpp"
IK_ENGINES: Engines = {
    ("ik_llama.cpp", "float32"): ("run_ik_llama_cpp.py", "f32.gguf"),
    ("ik_llama.cpp", "int8"): ("run_ik_llama_cpp.py", "q8_0.gguf"),
    ("ik_llama.cpp", "bfloat16"): ("run_ik_llama_cpp.py", "bf16.gguf"),
    ("ik_llama.cpp q4_0", "int4"): ("run_ik_llama_cpp.py", "q4_0.gguf"),
    ("ik_llama.cpp q4_K", "int4"): ("run_ik_llama_cpp.py", "q4_K.gguf"),
}
"""Those of a package that is not there on every machine (`peers/optional.txt`)."""
QUANTISED = ("q4_0", "q4_K")
"""Types that llama.cpp itself writes, from f32.gguf."""


REMEDY = (
    "run `make peers` (after `rm -rf .venv-peers` if that is damaged), "
    "or give an interpreter with benchmarks/peers/requirements.txt as --peer-python."
)


OWN_MODEL = "llama-213m"
MODELS = {OWN_MODEL: "3 GB", "qwen3-0.6b": "11 GB", "gemma3-1b": "17 GB"}
"""The presets that engines are compared with, in random weights, and what all formats take on disk."""
MOE_MODEL = "qwen3-moe-690m"
"""A small Qwen3-MoE of random weights; it takes 9 GB on disk in all formats."""
MOE_ENGINES: Engines = {
    ("jaxinfer", "float32"): (OUR_SCRIPT, "jaxinfer"),
    ("jaxinfer", "int8"): (OUR_SCRIPT, "jaxinfer"),
    ("llama.cpp", "float32"): ("run_llama_cpp.py", "f32.gguf"),
    ("llama.cpp", "int8"): ("run_llama_cpp.py", "q8_0.gguf"),
    ("transformers eager", "float32"): ("run_transformers.py", "hf", "eager"),
    ("transformers batched_mm", "float32"): ("run_transformers.py", "hf", "batched_mm"),
    ("transformers grouped_mm", "float32"): ("run_transformers.py", "hf", "grouped_mm"),
}
"""As `ENGINES`, for `MOE_MODEL`; the third is how transformers computes experts."""

ONE_THREAD = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "NPROC": "1"}
"""The environment of a process of one thread; with more devices NPROC, the threads of all together, is their number."""
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
"""XLA's flags for processes that compile for longer than they run."""


class EngineError(SystemExit):
    """An engine cannot run; the message says how to install it. Ends the command unless it is caught."""


def parts_reader(parts: Mapping[str, object]) -> Callable[[str], list[str]]:
    """Return what parses the parts named in `--only`."""

    def read_parts(text: str) -> list[str]:
        names = text.split(",")
        if unknown := set(names) - parts.keys():
            raise argparse.ArgumentTypeError(f"unknown {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
        return names

    return read_parts


def run_parts[Settings](
    parts: Mapping[str, Callable[[Report, Settings], None]],
    names: Sequence[str],
    report: Report,
    settings: Settings,
    json_file: Path | None,
) -> None:
    """Run parts of a benchmark by their names, and print the result. Exits if an engine could not run.

    The file is rewritten after every part.
    """
    failed = [error for name in names if (error := _run_part(name, parts[name], report, settings, json_file))]
    report.finish(json_file)
    if failed:
        raise SystemExit("\n".join(failed))


def part_parser(name: str, parts: Mapping[str, object], about: str | None, *, quick: str) -> argparse.ArgumentParser:
    """Make the parser of `benchmarks.NAME`, which runs parts on this machine alone.

    Args:
      about: the module's docstring.
      quick: what --quick makes smaller.
    """
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=about, formatter_class=formatter)
    parser.add_argument("--quick", action="store_true", help=f"a smoke test: {quick}")
    parser.add_argument("--only", type=parts_reader(parts), metavar="PART,...", help=f"of {', '.join(parts)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    parser.add_argument("--work-dir", type=Path, default=cache_folder() / "benchmarks" / name)
    return parser


def run_chosen_parts[Settings](
    parts: Mapping[str, Callable[[Report, Settings], None]], args: argparse.Namespace, settings: Settings
) -> None:
    """Run the parts that options of `part_parser` name, and print the result; exits as `run_parts` does."""
    names = args.only or list(parts)
    check_that_no_part_is_lost(args.json, names)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    report = Report()
    report.print_header()
    report.row(figure="settings", quick=args.quick)
    run_parts(parts, names, report, settings, args.json)


def _run_part[Settings](
    name: str,
    part: Callable[[Report, Settings], None],
    report: Report,
    settings: Settings,
    json_file: Path | None,
) -> str:
    """Run one part and save its result. Returns why an engine could not run; then the part has no figures."""
    start, absent = time.monotonic(), ""
    try:
        part(report, settings)
    except EngineError as error:
        absent = f"{name}: {error}"
        print(absent, flush=True)
    seconds = round(time.monotonic() - start, 1)
    report.row(
        figure="part", part=name, seconds=seconds, commit=report.commit, **({"absent": absent} if absent else {})
    )
    report.save(json_file)
    print(f"{name} took {seconds:.0f} s", flush=True)
    return absent


def run_module(name: str, *arguments: str, **environment: str) -> dict[str, Any]:
    """Run a module of this tree in its own process; return the JSON object that it prints last.

    Raises EngineError if it fails.
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-m", name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        raise EngineError(f"{name} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


class Worker:
    """The process of an engine; see `peers/worker.py` for its answers.

    Raises EngineError if the process ends, here and from `ask`.
    """

    def __init__(self, engine: str, dtype: str, command: list[str]):
        self.engine, self.dtype = engine, dtype
        self.is_ours = any(str(part).endswith(OUR_SCRIPT) for part in command)
        env = {**os.environ, "PYTHONPATH": str(ROOT)} if self.is_ours else None  # this tree, however installed
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=env)
        ready = self._answer()
        self.version: str = ready["version"]
        self.ways: list[dict[str, Any]] = ready["ways"]

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send `request` and return the answer."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # the process has ended, which reading its answer will tell
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return json.loads(line)
        raise EngineError(f"{self.engine} in {self.dtype} {self._end()}")

    def _end(self) -> str:
        """Describe how the process has ended, and what may help."""
        status = self.close()
        if status == -signal.SIGKILL:
            return "was killed (SIGKILL), perhaps because memory had run out."
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        remedy = "" if self.is_ours else f" If its packages are missing or damaged, {REMEDY}"
        return f"{how}; its own message is above.{remedy}"

    def close(self) -> int:
        """End the process; return its exit status."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):  # a request that the ended process has not read
            self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait()


LANGUAGE_MODULES = (
    "torch",
    "transformers",
    "accelerate",
    "ctranslate2",
    "llama_cpp",
    "gguf",
    "safetensors",
    "tokenizers",
)
"""Modules of the engines above."""


def find_peers(given: Path | None, modules: tuple[str, ...] = LANGUAGE_MODULES) -> Path:
    """Find the interpreter that has all of these modules. Exits if there is none, or if it lacks some."""
    python = given or Path(os.environ.get("JAXINFER_PEERS") or ROOT / ".venv-peers/bin/python")
    if not python.exists():
        raise EngineError(f"No interpreter at {python}: {REMEDY}")
    if missing := missing_modules(python, modules):
        raise EngineError(f"{python} lacks {', '.join(missing)}: {REMEDY}")
    return python


def missing_modules(python: Path, modules: tuple[str, ...]) -> list[str]:
    """The modules that an interpreter lacks."""
    code = f"import importlib.util as u; print(*[m for m in {modules} if u.find_spec(m) is None])"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def make_models(folder: Path, peer_python: Path, model: str = OWN_MODEL) -> None:
    """Write a model of `MODELS` in all formats unless it exists. An interrupted run leaves nothing behind.

    Raises EngineError if the peers' packages fail.
    """
    if not (folder / "hf").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            size = MODELS.get(model, "9 GB")
            print(f"Writing {model} in every engine's format to {folder} ({size})", flush=True)
            made = Path(temporary) / "models"
            if status := subprocess.run([peer_python, PEERS / "make_model.py", made, model]).returncode:
                raise EngineError(f"The peers could not write the model (status {status}; see above): {REMEDY}")
            made.rename(folder)
    if not (folder / "jaxinfer").exists():
        command = [JAXINFER, "convert", folder / "hf", folder / "jaxinfer"]
        subprocess.run(command, check=True)


def quantise_models(folder: Path, peer_python: Path) -> None:
    """Write the files of `INT4_ENGINES` unless they exist. Raises EngineError if llama.cpp fails."""
    types = [type_ for type_ in QUANTISED if not (folder / f"{type_}.gguf").exists()]
    if types:
        print(f"Quantising to {', '.join(types)} in {folder}", flush=True)
        command = [peer_python, PEERS / "quantise_gguf.py", folder / "f32.gguf", *types]
        if status := subprocess.run(command).returncode:
            raise EngineError(f"llama.cpp could not quantise the model (status {status}; see above): {REMEDY}")


@contextmanager
def workers(
    dtype: str, folder: Path, peer_python: Path, threads: int, engines: Engines = ENGINES
) -> Iterator[list[Worker]]:
    """Run the processes of all engines that run this dtype; they end on exit."""
    with ExitStack() as stack:
        processes = []
        for (engine, engine_dtype), (script, part, *more) in engines.items():
            if engine_dtype == dtype:
                python = sys.executable if script == OUR_SCRIPT else str(peer_python)
                command = [python, str(PEERS / script), str(folder / part), dtype, str(threads), *more]
                processes.append(Worker(engine, dtype, command))
                stack.callback(processes[-1].close)
        yield processes


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the peers and the models."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    parser.add_argument("--work-dir", type=Path, default=cache_folder() / "benchmarks" / "cpu_decode")
    parser.add_argument(
        "--peer-python", type=Path, help="interpreter with the peers (default: $JAXINFER_PEERS or make peers)"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of the peers")
    parser.add_argument("--demo", type=Path, default=ROOT / "examples/demo_model")
