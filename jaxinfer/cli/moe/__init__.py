"""`jaxinfer moe`: what a mixture of experts does with its tokens."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxinfer.cli.bench.files import check_files
from jaxinfer.cli.common import (
    AdapterOption,
    ContextOption,
    DtypeOption,
    KernelsOption,
    KVDtypeOption,
    MaxTokensOption,
    MeshOption,
    MinPOption,
    ModelArgument,
    QuantizeOption,
    RepetitionPenaltyOption,
    SeedOption,
    SpeculationOption,
    StopOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    load_llm,
    read_prompts,
    read_text,
    sampling_options,
)
from jaxinfer.progress import long_work

if TYPE_CHECKING:
    from jaxinfer.models import DecoderConfig

app = typer.Typer(no_args_is_help=True, help="Show which experts of a model get the tokens.")


@app.callback()
def _group() -> None:
    """Show which experts of a model get the tokens."""


@app.command()
def load(
    ctx: typer.Context,
    model: ModelArgument,
    prompts_file: Annotated[
        Path,
        typer.Option(help="File with one prompt per line; .jsonl: one object per line with `prompt` or `token_ids`."),
    ],
    plot: Annotated[
        Path | None, typer.Option(help="Draw a heat map of layers and experts into this .png or .svg file.")
    ] = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    repetition_penalty: RepetitionPenaltyOption = None,
    stop: StopOption = None,
    seed: SeedOption = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue after the end-of-text token.")] = False,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    mesh: MeshOption = None,
    context: ContextOption = None,
    max_batch: Annotated[int, typer.Option(help="Maximum number of sequences in a batch.")] = 8,
    num_speculative_tokens: SpeculationOption = 0,
    kv_dtype: KVDtypeOption = None,
    kernels: KernelsOption = True,
    adapter: AdapterOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with all counts instead.")] = False,
) -> None:
    """Count the tokens that reach each expert.

    It continues prompts, and counts for each layer.
    """
    check_files(None, plot)
    if not read_text("--prompts-file", prompts_file).strip():
        raise ValueError(f"--prompts-file {prompts_file}: the file has no prompt; write one per line.")
    prompts = read_prompts([], prompts_file, [])
    with long_work(f"loading {model}"):
        config = _require_experts(model)
        from jaxinfer.generation import SamplingParams

        options = sampling_options(ctx, ignore_eos=ignore_eos)
        llm = load_llm(ctx, max_batch=max_batch, expert_load=True)
    llm.generate(prompts, SamplingParams.from_model(llm, **options))
    counted = llm.stats().expert_load
    assert counted is not None, "a prompt has at least one token"

    from jaxinfer.cli.moe import report

    if plot is not None:
        from jaxinfer.evaluation.figures import write_figure

        write_figure(plot, report.draw_load(counted, config, f"{model.resolve().name}, {len(prompts)} prompts"))
        typer.echo(f"Wrote {plot}", err=True)
    if as_json:
        typer.echo(json.dumps(report.as_json(counted, config)))
    else:
        report.print_load(counted, config)


def _require_experts(model: Path) -> "DecoderConfig":
    """Return the config of a mixture of experts. Raises ValueError for any other model."""
    from jaxinfer.hub import resolve
    from jaxinfer.models import DecoderConfig
    from jaxinfer.models.files.description import Description

    config = Description.read(resolve(model)).config
    if not isinstance(config, DecoderConfig) or not config.moe_layers:
        raise ValueError(f"{model} is not a mixture of experts; name a model with experts.")
    return config
