"""`jaxinfer info`: whether a model is supported, what it is and needs, and the measured costs of its programs."""

import os
from typing import Annotated

import typer

from jaxinfer.cli.common import DtypeOption, MeshOption, ModelArgument, QuantizeOption, SpeculationOption, parse_mesh
from jaxinfer.progress import long_work


def info(
    model: ModelArgument,
    mesh: MeshOption = None,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens per request (default: the model's).")] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Maximum number of requests in a batch.")] = 8,
    num_speculative_tokens: SpeculationOption = 0,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    target: Annotated[
        str | None, typer.Option(help="List the kernels for this GPU, such as h200, which need not be present.")
    ] = None,
    costs: Annotated[
        bool, typer.Option("--costs", help="Also show measured times of the model's programs on this machine.")
    ] = False,
) -> None:
    """Show whether a model runs here, and what it needs.

    That is its sizes, its memory, and the kernels it would use. The command reads config.json and small files next to
    it: no weights are downloaded, and nothing is converted. Memory per device is for the chosen mesh, context and
    batch; the default dtype is this machine's. For a model that is not supported, it lists all reasons and exits with
    status 1.
    """
    if target is not None:
        os.environ["JAX_PLATFORMS"] = "cpu"  # nothing runs, so no GPU is looked for
    with long_work(f"reading {model}"):
        from jaxinfer.cli.display import kept_tokens, say, show
        from jaxinfer.cli.info.costs import print_costs
        from jaxinfer.cli.info.description import look_at, table_of
        from jaxinfer.cli.info.formats import print_formats
        from jaxinfer.cli.info.kernels import print_kernels
        from jaxinfer.cli.info.memory import memory_of
        from jaxinfer.compiled.target import Target
        from jaxinfer.models import VisionConfig
        from jaxinfer.models.devices import default_dtype
        from jaxinfer.models.files.description import weight_format
        from jaxinfer.pallas_kernels.target import gpu_or_none
        from jaxinfer.sharding import MeshConfig, ShardingRules

        gpu = Target.load(target).gpu if target is not None else gpu_or_none()
    known, file = look_at(str(model)), parse_mesh(mesh)
    if target is not None and file.mesh is not None:
        raise ValueError("--target with --mesh is not implemented: kernels are listed for one device; leave one out.")
    config = known.description.config
    dtype = dtype or (default_dtype(None) if target is None else None)
    weights = weight_format(known.description, dtype=dtype, quantize=quantize)
    longest = 0 if isinstance(config, VisionConfig) else config.context
    context = context or longest
    if context > longest:
        raise ValueError(f"--context {context} is more than the model's {longest}; lower it.")

    layout, rules = file.mesh or MeshConfig(), file.rules or ShardingRules()
    sizes = {"max_batch": max_batch, "context": context, "window": num_speculative_tokens}
    memory = memory_of(known.description, weights, layout, rules, **sizes)
    show(table_of(str(model), known, layout, memory.stages), memory.table(model.resolve().name))
    if memory.token:
        say(kept_tokens(memory.token))
    print_formats(known.description, dtype)
    if not isinstance(config, VisionConfig) and file.mesh is None:
        print_kernels(config, weights, gpu, batch=max_batch, context=context)
    if costs:
        print_costs(config)
