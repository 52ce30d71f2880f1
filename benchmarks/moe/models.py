"""Whole models: a mixture of experts against dense ones, and against the same mixture in other engines."""

import argparse
import math
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cpu_decode.peers import check_agreement, print_rows, take_turns
from benchmarks.random_models import save_random
from benchmarks.report import Report
from benchmarks.workers import MOE_ENGINES, MOE_MODEL, OUR_SCRIPT, Engines, find_peers, make_models, workers
from jaxinfer.models import DecoderConfig, TokenRows
from jaxinfer.models import config as c
from jaxinfer.models.layers.moe import Moe
from jaxinfer.models.text.decoder import Decoder

EXPERTS, CHOSEN, HIDDEN, EMBED = 64, 2, 704, 1024
ROWS = 8
CONTEXT, STEPS = 352, 16
VOCAB = 32_000
BATCHES = (1, ROWS)


def decoder(mlp: c.MlpConfig) -> DecoderConfig:
    """A small Llama with this MLP in its four layers."""
    return DecoderConfig(
        vocab=VOCAB,
        embed=EMBED,
        layers=4,
        context=2048,
        pattern=(
            c.LayerConfig(
                mixer=c.AttentionConfig(
                    q_heads=16,
                    kv_heads=4,
                    head_dim=64,
                    positions=c.PositionsConfig(kind=c.PositionKind.ROTARY, rotary_dim=64),
                ),
                mlp=mlp,
            ),
        ),
        norm=c.NormConfig(kind=c.NormKind.RMS),
    )


def dense(experts: int) -> DecoderConfig:
    """The dense model as large as the mixture with so many experts."""
    return decoder(c.MlpConfig(hidden=experts * HIDDEN, activation=c.Activation.SILU, gated=True))


def mixture() -> DecoderConfig:
    """The mixture, 64 experts of which each token has two."""
    router = c.RouterConfig(experts=EXPERTS, experts_per_token=CHOSEN)
    moe = c.MoeConfig(router=router)
    return decoder(c.MlpConfig(hidden=HIDDEN, activation=c.Activation.SILU, gated=True, moe=moe))


def touched_experts(model: Decoder, rows: int, tokens: int = 64) -> float:
    """Count the experts that rows of random tokens choose together at a position, the mean over positions and layers.

    Args:
      model: a mixture in every layer.
      rows: sequences that decode side by side.
      tokens: of each.
    """
    ids = jax.random.randint(jax.random.key(0), (rows, tokens), 3, VOCAB)
    positions = jnp.broadcast_to(jnp.arange(tokens), ids.shape)
    x, context = model.enter((TokenRows(ids, positions),))
    counts = []
    for layer in model.layers:
        assert isinstance(layer.mlp, Moe)
        heads, _ = layer.mixer.heads(x, layer.norm_before_attention, context)
        x = layer.add_attention(x, heads)
        routing = layer.mlp.router(layer.before_mlp(x).reshape(rows * tokens, -1), None)
        chosen = np.asarray(routing.experts).reshape(rows, tokens, -1)
        counts += [len(np.unique(chosen[:, position])) for position in range(tokens)]
        x = layer.add_experts(x, context)
    return float(np.mean(counts))


def make_own(folder: Path) -> dict[str, float]:
    """Write the mixture and the dense models of random weights unless they exist; return the experts touched.

    Returns: by name of the folder of the dense model the number of experts that it is as large as.
    """
    file = folder / "touched.txt"
    if not file.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            made = Path(temporary) / "models"
            model = save_random(made / "mixture", mixture())
            touched = touched_experts(model, ROWS)
            del model
            for name, config in (("active", dense(CHOSEN)), ("touched", dense(round(touched)))):
                save_random(made / name, config)
            (made / file.name).write_text(str(touched))
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
    return {"active": CHOSEN, "touched": float(file.read_text())}


def against_dense(report: Report, args: argparse.Namespace) -> None:
    """Time decode steps of the mixture and of the dense models, which take turns."""
    folder = args.work_dir / "dense"
    experts = make_own(folder)
    report.row(
        figure="settings",
        part="dense",
        experts=EXPERTS,
        per_token=CHOSEN,
        hidden=HIDDEN,
        embed=EMBED,
        layers=4,
        **experts,
    )
    for batch, other in ((1, "active"), (ROWS, "touched")):
        rows = beside_dense(folder, batch, other, args.rounds, args.threads)
        for row in rows:
            report.row(**row)
        ours, theirs = (row["ms"] for row in rows)
        report.check(f"grouped_vs_dense_{other}", ours / theirs, "x", target=1.5, better="lower")
        report.save(args.json)


def beside_dense(folder: Path, batch: int, other: str, rounds: int, threads: int) -> list[dict[str, Any]]:
    """Time decode steps of the mixture and of a dense model in turns; return the rows of both."""
    engines: Engines = {(name, "float32"): (OUR_SCRIPT, name) for name in ("mixture", other)}
    with workers("float32", folder, Path(sys.executable), threads, engines) as processes:
        request = {"do": "decode", "batch": batch, "context": CONTEXT, "steps": STEPS}
        return take_turns(processes, rounds, f"decode batch {batch}", **request)


def against_engines(report: Report, args: argparse.Namespace) -> None:
    """Time decode steps of a Qwen3-MoE in our engine, in llama.cpp and in each of transformers' ways."""
    peer_python, folder = find_peers(args.peer_python), args.work_dir / MOE_MODEL
    make_models(folder, peer_python, MOE_MODEL)
    shown: list[dict[str, Any]] = []
    ratios: dict[tuple[str, int], float] = {}
    for dtype, others in (("float32", ("eager", "batched_mm", "grouped_mm")), ("int8", (None,))):
        for way in others:  # one at a time: each has the whole model in memory
            chosen = {"jaxinfer", "llama.cpp", f"transformers {way}"}
            engines = {key: value for key, value in MOE_ENGINES.items() if key[0] in chosen}
            with workers(dtype, folder, peer_python, args.threads, engines) as processes:
                report.versions |= {w.engine.split()[0]: w.version for w in processes if w.engine != "jaxinfer"}
                if dtype == "float32":
                    check_agreement(processes)
                for batch in BATCHES:
                    request = {"do": "decode", "batch": batch, "context": CONTEXT, "steps": STEPS}
                    rows = take_turns(processes, args.rounds, f"decode batch {batch}", **request)
                    ms = {row["engine"]: row["ms"] for row in rows}
                    for row in rows:
                        report.row(**row, beside=way or "llama.cpp")
                        if row["engine"] != "jaxinfer":
                            ratio = row["ms"] / ms["jaxinfer"]
                            key = f"{row['engine']} {dtype}", batch
                            ratios[key] = min(ratio, ratios.get(key, math.inf))
                    shown += [row for row in rows if row["engine"] != "jaxinfer" or way in (None, others[0])]
                    report.save(args.json)
    print_rows(list({(r["figure"], r["engine"], r["dtype"]): r for r in shown}.values()))
    for batch in BATCHES:
        best = min(ratio for (engine, size), ratio in ratios.items() if size == batch and "transformers" in engine)
        report.check(f"vs_transformers_b{batch}", best, "x", target=1.5)
        for dtype in ("float32", "int8"):
            ratio = ratios[f"llama.cpp {dtype}", batch]
            report.row(figure=f"vs_llamacpp_b{batch}", dtype=dtype, ratio=round(ratio, 3))


def run(report: Report, args: argparse.Namespace) -> None:
    """Measure both."""
    against_dense(report, args)
    against_engines(report, args)
