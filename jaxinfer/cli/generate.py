"""`jaxinfer generate`: continue prompts from the command line."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from jaxinfer.cli.common import (
    AdapterOption,
    ContextOption,
    DeviceMemoryOption,
    DiskKVLimitOption,
    DiskKVOption,
    DtypeOption,
    HostKVOption,
    HostMemoryOption,
    KernelsOption,
    KVDtypeOption,
    KVOffloadOption,
    LayerFilesOption,
    MaxTokensOption,
    MeshOption,
    MinPOption,
    ModelArgument,
    PrefetchOption,
    PromptsFileOption,
    QuantizeOption,
    RepetitionPenaltyOption,
    SeedOption,
    SpeculationOption,
    StopOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    WeightsOption,
    compile_for,
    length_note,
    load_llm,
    note,
    read_prompts,
    read_text,
    sampling_options,
)
from jaxinfer.progress import long_work

if TYPE_CHECKING:
    from jaxinfer import StructuredOutputsParams
    from jaxinfer.generation import LLM, Request, RequestOutput, SamplingParams
    from jaxinfer.text import Prompt


def generate(
    ctx: typer.Context,
    model: ModelArgument,
    texts: Annotated[list[str] | None, typer.Argument(metavar="[TEXT]...", help="Prompts.", show_default=False)] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="Prompt; repeatable.")] = None,
    prompts_file: PromptsFileOption = None,
    token_ids: Annotated[list[str] | None, typer.Option(help="Prompt as token ids, such as 5,17,3.")] = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    repetition_penalty: RepetitionPenaltyOption = None,
    stop: StopOption = None,
    n: Annotated[int, typer.Option("--n", help="Number of completions per prompt.")] = 1,
    seed: SeedOption = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue after the end-of-text token.")] = False,
    logprobs: Annotated[
        int | None, typer.Option(help="Return log probabilities of the N likeliest tokens at each position.")
    ] = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    mesh: MeshOption = None,
    context: ContextOption = None,
    max_batch: Annotated[int, typer.Option(help="Maximum number of sequences in a batch.")] = 8,
    num_speculative_tokens: SpeculationOption = 0,
    kv_dtype: KVDtypeOption = None,
    kernels: KernelsOption = True,
    weights: WeightsOption = None,
    device_memory: DeviceMemoryOption = None,
    host_memory: HostMemoryOption = None,
    host_kv: HostKVOption = None,
    disk_kv: DiskKVOption = None,
    disk_kv_limit: DiskKVLimitOption = None,
    kv_offload: KVOffloadOption = None,
    prefetch: PrefetchOption = None,
    layer_files: LayerFilesOption = None,
    adapter: AdapterOption = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="File with a JSON schema that the generated text must satisfy.")
    ] = None,
    whitespace_pattern: Annotated[
        str | None,
        typer.Option(help="With --json-schema: regex for whitespace between JSON tokens (default: no whitespace)."),
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="Regex that the complete generated text must match (Rust syntax).")
    ] = None,
    grammar: Annotated[
        Path | None, typer.Option(help="File with a Lark grammar that the generated text must follow.")
    ] = None,
    choice: Annotated[list[str] | None, typer.Option(help="A permitted text; repeat for each choice.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per request, one per line.")] = False,
) -> None:
    """Continue prompts, and stream the text.

    With --json, a request that cannot run prints a line with its `error`. The other requests run, and the exit status
    is 1.
    """
    prompts = read_prompts([*(texts or ()), *(prompt or ())], prompts_file, token_ids or [])
    with long_work(f"loading {model}"):
        from jaxinfer.generation import SamplingParams

        structured = _structured_outputs(json_schema, regex, grammar, choice, whitespace_pattern)
        options = sampling_options(ctx, n=n, ignore_eos=ignore_eos, logprobs=logprobs, structured_outputs=structured)
        start = time.perf_counter()
        llm = load_llm(ctx, max_batch=max_batch)
        loaded = time.perf_counter() - start
        params = SamplingParams.from_model(llm, **options)
    if as_json:
        _print_json(llm, prompts, params)
    else:
        _print_text(llm, prompts, params)
        note(f"[model loaded in {loaded:.2f} s; {_memory(llm)}]")
        if llm.streaming is not None:
            note(f"[{llm.placement}; {llm.streaming}]")


def _structured_outputs(
    json_schema: Path | None,
    regex: str | None,
    grammar: Path | None,
    choice: list[str] | None,
    whitespace_pattern: str | None,
) -> "StructuredOutputsParams | None":
    """Build the parameters from the options; more than one of the first four is a ValueError."""
    from jaxinfer import StructuredOutputsParams

    given = {
        "json": json_schema and _read_schema(json_schema),
        "regex": regex,
        "grammar": grammar and read_text("--grammar", grammar),
        "choice": tuple(choice) if choice else None,
        "whitespace_pattern": whitespace_pattern,
    }
    if all(value is None for value in given.values()):
        return None
    from jaxinfer.generation.sampling.structured_outputs import check_grammar

    params = StructuredOutputsParams(**given)
    check_grammar(params)  # before the weights are read
    return params


def _read_schema(file: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(read_text("--json-schema", file), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ValueError(f"--json-schema {file}: {error}; the file must contain a JSON object.") from error


def _memory(llm: "LLM") -> str:
    from rich.filesize import decimal

    return f"memory planned: {llm.memory}; programs used {decimal(llm.engine.executor.report().workspace_bytes)}"


def _print_text(llm: "LLM", prompts: "list[Prompt]", params: "SamplingParams") -> None:
    """Stream a single completion; print several one after the other. No prompt runs if one is invalid."""
    for request in [llm.prepare(prompt, params) for prompt in prompts]:
        shown = ",".join(map(str, request.prompt_token_ids)) if request.prompt is None else request.prompt
        compile_for(llm, request)
        if params.n > 1:
            output = llm.generate([request])[0]
            for completion in output.outputs:
                note(f"{shown} ({completion.index + 1} of {params.n})")
                print(completion.text if llm.tokenizer else completion.token_ids)
        else:
            typer.secho(shown, err=True, bold=True, nl=False)
            output = _stream(llm, request)
        note(_summary(output, params, llm.engine.config.context))


def _stream(llm: "LLM", request: "Request") -> "RequestOutput":
    printed, output = 0, None
    for output in llm.stream([request]):
        completion = output.outputs[0]
        text = completion.text if llm.tokenizer else "".join(f",{i}" for i in completion.token_ids)
        print(text[printed:], end="", flush=True)
        printed = len(text)
    print(flush=True)
    assert output is not None, "a prepared request yields at least once"
    return output


def _summary(output: "RequestOutput", params: "SamplingParams", context: int) -> str:
    completion, ended = output.outputs[0], length_note(output, params, context)
    timings, drafted, accepted = completion.timings, completion.num_draft_tokens, completion.num_accepted_tokens
    rate = f", {timings.tokens_per_s:.1f} tokens/s" if timings.tokens_per_s else ""
    speculation = f", {accepted} of {drafted} speculative tokens accepted" if drafted else ""
    first = f", first token after {timings.first_token_s:.3f} s" if timings.first_token_s is not None else ""
    return f"[{len(completion.token_ids)} tokens, {ended}{rate}{first}{speculation}]"


def _print_json(llm: "LLM", prompts: "list[Prompt]", params: "SamplingParams") -> None:
    requests: dict[int, Request] = {}
    for index, prompt in enumerate(prompts):
        try:
            requests[index] = llm.prepare(prompt, params)
        except ValueError as error:
            print(json.dumps({"index": index, "error": str(error)}), flush=True)
    for index, output in zip(requests, llm.generate(list(requests.values())), strict=True):
        print(json.dumps({"index": index, **_as_json(output)}), flush=True)
    if len(requests) < len(prompts):
        raise typer.Exit(1)


def _as_json(output: "RequestOutput") -> dict[str, Any]:
    """Put the first completion's fields at the top level, and all under `outputs` when there are several."""
    fields = msgspec.to_builtins(output, str_keys=True)
    outputs = fields.pop("outputs")
    first = {k: v for k, v in outputs[0].items() if k != "index"}
    return {**fields, **first, **({"outputs": outputs} if len(outputs) > 1 else {})}
