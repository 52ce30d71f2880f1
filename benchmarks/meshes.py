"""Tensor parallelism: the tokens of every family, what devices exchange, a 70B model on eight H200s, two CPU devices.

    python -m benchmarks.meshes [--quick] [--json benchmarks/results/KIND/meshes.json]

Families are the tiny models of `tests/goldens` with random weights, on virtual CPU devices. The H200s are compiled for,
not run (extra `aot`). The last part has two CPU devices of one thread each against one device with one or all threads.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.report import ROOT, Report
from jaxinfer import LLM, MeshConfig, SamplingParams
from jaxinfer.cli.inspect import decode_program
from jaxinfer.compiled.dumps import Collective, read_collectives
from jaxinfer.compiled.target import Target, compile_program
from jaxinfer.extras import MissingExtraError
from jaxinfer.generation.execution.programs.decode import Decode
from jaxinfer.models import Decoder, WeightFormat
from jaxinfer.models.config import BlockKind, DecoderConfig
from jaxinfer.models.devices import bytes_per_device
from jaxinfer.models.files.conversion import convert
from jaxinfer.models.files.description import Description
from jaxinfer.models.files.loading import save_model
from jaxinfer.models.leaves import canonical_leaves
from jaxinfer.models.presets import preset
from jaxinfer.sharding import ShardingRules

SIZES: dict[str, Any] = {"max_batch": 2, "token_budget": 8, "chunk_size": 8, "max_decode_passes": 4}
GATHER_BYTES = 64 * 8
"""Maximum bytes that a row's sampling may exchange with one device of the mesh."""


def greedy_tokens(llm: LLM) -> list[list[int]]:
    """Generate from two prompts together."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    return [o.outputs[0].token_ids for o in llm.generate([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7]], params)]


def sums_of_a_pass(config: DecoderConfig) -> int:
    """Count a pass's sums: the embedding's, and those after attention and MLP, or after both together."""
    parallel = config.layer(0).block in (BlockKind.PARALLEL, BlockKind.PARALLEL_TWO_NORMS)
    return (1 if parallel else 2) * config.layers + 1


def is_exact(collectives: list[Collective], config: DecoderConfig) -> bool:
    """Check whether a greedy pass exchanges its sums, the best token of each row, and nothing else."""
    always = [collective for collective in collectives if not collective.conditions]
    sums = [collective for collective in always if collective.kind == "all-reduce"]
    rest = [collective.kind for collective in always if collective.kind != "all-reduce"]
    return len(sums) == sums_of_a_pass(config) and rest == ["all-gather"]


def sampled_bytes(collectives: list[Collective], config: DecoderConfig) -> int:
    """Count the bytes that rows with all sampling options exchange beside the model's sums.

    Cut-offs are within the candidates.
    """
    fallbacks = ("top_k", "top_p", "logits_processor")
    return sum(
        collective.bytes
        for collective in collectives
        if not (collective.kind == "all-reduce" and collective.shape[-1] in (config.embed, config.output_width))
        and not any(name in scope for scope in collective.conditions for name in fallbacks)
    )


def families(report: Report, *, quick: bool) -> None:
    """Compare every decoder of the goldens on one device and on meshes."""
    equal, exact, gathered = [], [], []
    folders = sorted(path.parent for path in (ROOT / "tests" / "goldens").glob("*/config.json"))
    with tempfile.TemporaryDirectory() as temporary:
        for folder in folders[::6] if quick else folders:
            path = Path(temporary) / folder.name
            convert(folder, path)
            if Description.read(path).kind != "decoder":
                continue
            alone = greedy_tokens(LLM(path, **SIZES))
            for tensor in (2, 4):
                llm = LLM(path, mesh=MeshConfig(tensor=tensor), **SIZES)
                same = greedy_tokens(llm) == alone
                program = llm.engine.executor.programs.get(Decode(batch=2, speculative=0, pages=8))
                hlo = program.executable.as_text()
                assert hlo is not None
                collectives = read_collectives(hlo, tensor)
                assert isinstance(llm.model.config, DecoderConfig)
                sampled = sampled_bytes(collectives, llm.model.config)
                equal.append(same)
                exact.append(is_exact(collectives, llm.model.config))
                gathered.append(sampled / (GATHER_BYTES * 2 * tensor))
                report.row(
                    figure="family",
                    family=folder.name,
                    tensor=tensor,
                    equal=same,
                    exact=exact[-1],
                    sums=sums_of_a_pass(llm.model.config),
                    sampling_of_bound=round(gathered[-1], 3),
                )
    report.check("families_equal", statistics.mean(equal), "of the runs", target=1)
    report.check("collectives_exact", statistics.mean(exact), "of the runs", target=1)
    report.check("logits_gather_bytes", max(gathered), "of the bound", target=1, better="lower")


def eight_h200s(report: Report, *, quick: bool) -> None:
    """Compile a decode step of Llama 3 70B, split eight ways, for H200s."""
    config = dataclasses.replace(preset("llama3-70b"), **({"layers": 4} if quick else {}))
    weights, target = WeightFormat(dtype=np.dtype(jnp.bfloat16)), Target.load("h200")
    try:
        mesh = target.mesh(MeshConfig(tensor=8))
    except MissingExtraError as error:
        print(f"Not compiled for H200s: {error}", flush=True)
        return
    spec, sizes = decode_program(config, weights, batch=1, context=2048, passes=16, mesh=mesh)
    compiled = compile_program(target, spec, sizes, mesh=mesh)
    whole = bytes_per_device(canonical_leaves(config, weights), None, ShardingRules())
    cache = compiled.alias_bytes
    per_layer = len(compiled.of_layer(config.layers - 1))
    report.row(
        figure="h200",
        model="llama3-70b",
        layers=config.layers,
        kernels_and_sums_per_layer=per_layer,
        graphs=compiled.graphs,
        host_launches=list(compiled.host_launches),
        temp_bytes=compiled.temp_bytes,
    )
    report.check("tp8_memory_ratio", (compiled.argument_bytes - cache) * 8 / whole, "x", target=1.01, better="lower")
    report.check("compile_seconds_tp8", compiled.compile_seconds, "s", target=60, better="lower")


# Two devices of one thread each, in their own processes: the number of threads is fixed when JAX starts.

WAYS: dict[str, dict[str, Any]] = {
    "one device, one thread": {"cores": 1, "devices": 1},
    "one device, all threads": {"cores": None, "devices": 1},
    "two devices, one thread each": {"cores": None, "devices": 2},
}


def decode_rate(model: str, devices: int) -> float:
    """Measure tokens per second of four requests that decode together."""
    llm = LLM(model, mesh=MeshConfig(tensor=devices) if devices > 1 else None, max_batch=4, context=256)
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    rates = []
    for _ in range(3):
        outputs = llm.generate([[1, 2, 3, 4]] * 4, params)
        rate = outputs[0].outputs[0].timings.tokens_per_s
        assert rate is not None
        rates.append(4 * rate)
    return max(rates[1:])


def two_devices(report: Report, *, quick: bool) -> None:
    """Measure decode throughput of the same random model in every way, in turns."""
    config = dataclasses.replace(preset("llama-213m"), layers=4 if quick else 8)
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "model"
        save_model(path, Decoder(config, WeightFormat(), rngs=nnx.Rngs(0)), family="llama")
        for _ in range(1 if quick else 3):
            for way, sizes in WAYS.items():
                rates[way].append(_rate_in_process(path, **sizes))
    medians = {way: round(statistics.median(samples), 2) for way, samples in rates.items()}
    for way, rate in medians.items():
        report.row(figure="two_devices", way=way, tokens_per_s=rate)
    single, every, two = medians.values()
    report.row(figure="two_devices", gain_over_all_threads=round(two / every, 3))
    report.check("tensor2_gain", two / single, "x", target=1)


def _rate_in_process(path: Path, cores: int | None, devices: int) -> float:
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1" if devices > 1 else ""
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "XLA_FLAGS": flags, "NPROC": "8"}
    if devices == 1:
        del environment["NPROC"]
    command = [sys.executable, "-m", "benchmarks.meshes", "--decode", str(path), "--devices", str(devices)]
    if cores is not None:
        command += ["--cores", str(cores)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


PARTS = {"families": families, "h200": eight_h200s, "two_devices": two_devices}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few families, few layers, one round")
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    for name in ("--decode", "--devices", "--cores"):
        parser.add_argument(name, help=argparse.SUPPRESS)  # for the processes that two_devices starts
    args = parser.parse_args()
    if args.decode:
        with contextlib.suppress(AttributeError):  # only Linux has it
            if args.cores:
                os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(args.cores)])
        print(json.dumps(decode_rate(args.decode, int(args.devices))))
        return
    os.environ.setdefault("NPROC", "32")  # threads; read, like the number of devices, when JAX's backend starts
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    report = Report()
    report.print_header()
    for name, part in PARTS.items():
        if args.only in (None, name):
            part(report, quick=args.quick)
            report.save(args.json)
    report.finish(args.json)


if __name__ == "__main__":
    main()
