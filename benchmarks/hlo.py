"""Compares the programs that two checkouts compile, for changes that should change no number.

    git worktree add ../before COMMIT
    python -m benchmarks.hlo ../before                           # StableHLO, some minutes
    python -m benchmarks.hlo ../before --optimised --only demo   # and what XLA makes of it, longer

Each checkout writes its programs in its own process. They are those of the demo models on one device, streamed, in two
lanes, split over two devices and in two stages of a pipeline; of the demo model with every kind of block; and of an
encoder. Shapes suffice, so no weights are read and nothing runs. Kernels for CPUs are left out. `--only` takes those
whose names contain a text.

Names, source locations and the places of constants do not count. For each program it prints "identical", "reordered"
(the same operations in another order) or how many lines differ, and the first of these. The exit status is 1 if a
program has other operations, or is in one checkout only. Both checkouts must have the modules that `worker` imports.
"""

import argparse
import dataclasses
import difflib
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxinfer.compiled import ProgramSpec, Sizes
    from jaxinfer.models import DecoderConfig, EncoderConfig

HERE = Path(__file__).resolve().parents[1]
SHOWN = 12
"""Lines of a difference that are printed."""
DEVICES = 2
CONTEXT = 128
SPECULATIVE = 2

_METADATA = re.compile(r", (?:metadata|origin)=\{(?:[^{}\"]|\"[^\"]*\"|\{[^{}]*\})*\}")
_NAME = re.compile(r"[%@][\w.-]+")
_CONSTANT = re.compile(r"^\s*(?P<name>%[\w.-]+) = (?P<value>stablehlo\.constant .*|\S+ constant\(.*)$")
_FILES = re.compile(r"^(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:\d+ .*\n)*", re.MULTILINE)


# What a checkout writes


class Case(NamedTuple):
    """A program to lower."""

    name: str
    spec: "ProgramSpec[Any, Any]"
    sizes: "Sizes"
    mesh: "Mesh | None" = None


def worker(folder: Path, only: str, *, optimised: bool) -> None:
    """Write the programs of the checkout that is imported whose names contain a text, a file for each."""
    import jax

    jax.config.update("jax_num_cpu_devices", DEVICES)
    for case in itertools.chain(decoder_cases(), encoder_cases()):
        if only not in case.name:
            continue
        lowered = case.spec.lower(case.sizes, case.mesh)
        (folder / f"{case.name}.stablehlo").write_text(lowered.as_text())
        if optimised:
            compiled = lowered.compile(compiler_options=case.spec.options(case.sizes))
            (folder / f"{case.name}.hlo").write_text(compiled.as_text() or "")


def decoder_cases() -> Iterator[Case]:
    """Yield the programs of the demo models on one device and on meshes, streamed, and with other blocks."""
    from jaxinfer.models.config import BlockKind, DecoderConfig
    from jaxinfer.models.files.description import Description
    from jaxinfer.sharding import MeshConfig

    demo, mixture = (Description.read(HERE / "examples" / name).config for name in ("demo_model", "moe_demo_model"))
    assert isinstance(demo, DecoderConfig)
    assert isinstance(mixture, DecoderConfig)
    meshes = {
        "lanes": MeshConfig(data=DEVICES),
        "tensor": MeshConfig(tensor=DEVICES),
        "ring": MeshConfig(pipeline=DEVICES),
    }
    for name, config in {"demo": demo, "mixture": mixture}.items():
        yield from largest_programs(name, config, speculative=SPECULATIVE)
        yield from largest_programs(f"{name}-streamed", config, speculative=SPECULATIVE, streamed=True)
    for name, mesh in meshes.items():
        yield from largest_programs(f"demo-{name}", demo, mesh, speculative=SPECULATIVE)
    yield from largest_programs("demo-ring-adapters", dataclasses.replace(demo, layers=3), meshes["ring"], adapters=1)
    small = dataclasses.replace(demo, layers=2)
    yield from largest_programs("scaled", dataclasses.replace(small, residual_scale=0.5))
    for block in BlockKind:
        blocks = small.with_block(block)
        yield from largest_programs(f"{block}", blocks, adapters=1)
        yield from largest_programs(f"{block}-tensor", blocks, meshes["tensor"])
        if block not in (BlockKind.PARALLEL, BlockKind.PARALLEL_TWO_NORMS):
            yield from largest_programs(f"{block}-mixture", dataclasses.replace(mixture, layers=2).with_block(block))


def largest_programs(
    name: str,
    config: "DecoderConfig",
    mesh: Any = None,
    *,
    adapters: int = 0,
    speculative: int = 0,
    streamed: bool = False,
) -> Iterator[Case]:
    """Yield the programs of a model's passes in their largest sizes: with chunks of prompts, without, speculative.

    Args:
      mesh: a `MeshConfig`; None: one device.
      adapters: how many there is room for.
      speculative: the most speculative tokens of a row.
      streamed: whether layers come one by one.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxinfer.generation.engine.buckets import Buckets
    from jaxinfer.generation.engine.config import EngineConfig
    from jaxinfer.generation.execution.layout import DeviceLayout
    from jaxinfer.generation.execution.programs import pass_programs, whole_programs
    from jaxinfer.models import WeightFormat
    from jaxinfer.models.leaves import leaves_of_part
    from jaxinfer.streaming.config import LayerRange

    engine = EngineConfig(
        max_batch=2, context=CONTEXT, num_speculative_tokens=speculative, max_adapters=adapters, max_lora_rank=4
    )
    devices = None if mesh is None else mesh.build(jax.devices()[:DEVICES])
    weights = WeightFormat(dtype=np.dtype(jnp.bfloat16))
    rest = leaves_of_part(config, weights, None).values() if streamed else ()  # of no layer: always on the device
    layout = DeviceLayout(
        config,
        weights,
        engine,
        num_pages=16,
        platform="cpu",
        mesh=devices,
        leaves=[jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype)) for x in rest] if streamed else None,
        family="llama",
    )
    if streamed:
        specs = pass_programs(layout, [LayerRange(first=0, count=1, kind=0, streamed=True)])
    else:
        specs = whole_programs(layout)
    buckets = Buckets.from_config(engine)
    for spec in specs:
        largest = {}  # reachable sizes ascend
        for sizes in spec.reachable(buckets if layout.stages is None else buckets.for_stages(layout.num_stages)):
            bucket = dict(sizes.bucket)
            largest[spec.name, bool(bucket.get("chunks")), bool(bucket.get("speculative"))] = sizes
        for (program, with_chunks, speculates), sizes in largest.items():
            kind = "-chunks" if with_chunks else "-speculative" if speculates else ""
            yield Case(f"{name}.{program}{kind}", spec, sizes, devices)


def encoder_cases() -> Iterator[Case]:
    """Yield the program of a small encoder."""
    import jax
    import jax.numpy as jnp

    from jaxinfer.compiled import ProgramSpec
    from jaxinfer.generation.execution.programs import embed
    from jaxinfer.models import WeightFormat
    from jaxinfer.models.leaves import canonical_leaves
    from jaxinfer.sharding import ShardingRules

    config, weights = encoder_config(), WeightFormat()
    leaves = [
        jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype)) for leaf in canonical_leaves(config, weights).values()
    ]
    tokens = jax.ShapeDtypeStruct((4, 16), jnp.int32)
    spec = ProgramSpec(
        sizes=embed.Embed,
        build=embed.build,
        static=embed.EncoderStatic(config, weights, ShardingRules()),
        arguments=lambda sizes: (leaves, tokens, tokens),
        reachable=lambda buckets: (),
    )
    yield Case("encoder.embed", spec, embed.Embed(batch=4, tokens=16))


def encoder_config() -> "EncoderConfig":
    """Return the sizes of an encoder like BERT."""
    from jaxinfer.models import EncoderConfig
    from jaxinfer.models.config import (
        Activation,
        AttentionConfig,
        LearnedPositions,
        MlpConfig,
        NormConfig,
        NormKind,
    )

    return EncoderConfig(
        vocab=1024,
        embed=64,
        layers=2,
        context=CONTEXT,
        attention=AttentionConfig(q_heads=4, kv_heads=4, head_dim=16, qkv_bias=True, out_bias=True),
        learned_positions=LearnedPositions(),
        mlp=MlpConfig(hidden=128, activation=Activation.GELU, gated=False, bias=True),
        norm=NormConfig(kind=NormKind.LAYER),
        token_types=2,
    )


# What is compared


def normalised(text: str) -> list[str]:
    """Return the lines of a module without locations, with values numbered in the order in which they appear.

    A constant stands where it is used, so that its own line does not count.

    text: of StableHLO, or of optimised HLO.

    >>> normalised("%c = stablehlo.constant dense<1> : tensor<i32>\\n%7 = stablehlo.add %arg0, %c : tensor<i32>")
    ['%1 = stablehlo.add %2, (stablehlo.constant dense<1> : tensor<i32>) : tensor<i32>']
    """
    names: dict[str, str] = {}

    def number(name: re.Match[str]) -> str:
        return names.setdefault(name[0], f"{name[0][0]}{len(names)}")

    lines = []
    for line in _FILES.sub("", _METADATA.sub("", text)).splitlines():
        if "func.func" in line:  # values are named anew in each function
            names = {name: value for name, value in names.items() if name.startswith("@")}
        if constant := _CONSTANT.match(line):
            names[constant["name"]] = f"({constant['value']})"
        elif line.strip() and not line.startswith(("HloModule", "module @")):
            lines.append(_NAME.sub(number, line.strip()))
    return lines


def compare(old: str, new: str) -> tuple[str, list[str]]:
    """Return how two modules compare, and the first lines that differ.

    >>> compare("%a = f32[] add(%b, %c)", "%x = f32[] add(%y, %z)")
    ('identical', [])
    """
    before, after = normalised(old), normalised(new)
    if before == after:
        return "identical", []
    if Counter(_NAME.sub("", line) for line in before) == Counter(_NAME.sub("", line) for line in after):
        return "reordered", []
    # Without names, so that one line more does not make all lines after it differ.
    before, after = ([_NAME.sub("%", line) for line in lines] for lines in (before, after))
    changed = [line for line in difflib.unified_diff(before, after, n=0, lineterm="") if line[0] in "+-"][2:]
    return f"{len(changed)} of {len(after)} lines differ", [line[:160] for line in changed[:SHOWN]]


def write_programs(checkout: Path, folder: Path, *options: str) -> None:
    """Have a checkout write its programs into a new folder."""
    folder.mkdir()
    command = [sys.executable, "-P", str(Path(__file__).resolve()), str(folder), "--worker", *options]
    environment = os.environ | {"PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu"}
    subprocess.run(command, cwd=checkout, env=environment, check=True)


def main() -> int:
    """Compare a checkout's programs with those of this one, and print a line for each. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, metavar="OLD_CHECKOUT")
    parser.add_argument("--optimised", action="store_true", help="compare XLA's optimised HLO, too")
    parser.add_argument("--only", default="", metavar="TEXT", help="compare programs whose names contain it")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(given.old, given.only, optimised=given.optimised)
        return 0
    others = 0
    with tempfile.TemporaryDirectory(prefix="jaxinfer-hlo-") as folder:
        old, new = Path(folder, "old"), Path(folder, "new")
        for checkout, written in ((given.old.resolve(), old), (HERE, new)):
            write_programs(checkout, written, "--only", given.only, *["--optimised"] * given.optimised)
        for name in sorted({file.name for written in (old, new) for file in written.iterdir()}):
            here = [written for written in (old, new) if (written / name).exists()]
            if len(here) == 1:
                outcome, lines = f"only in the {here[0].name} checkout", []
            else:
                outcome, lines = compare((old / name).read_text(), (new / name).read_text())
            others += outcome not in ("identical", "reordered")
            print(f"{name:56} {outcome}", *lines, sep="\n    ", flush=True)
    return int(others > 0)


if __name__ == "__main__":
    sys.exit(main())
