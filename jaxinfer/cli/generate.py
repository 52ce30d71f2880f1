"""`jaxinfer generate`: continue prompts from the command line."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from jaxinfer.cli.common import DtypeOption, MeshOption, QuantizeOption, parse_mesh

if TYPE_CHECKING:
    from jaxinfer.generation import LLM, RequestOutput, SamplingParams
    from jaxinfer.generation.text import Prompt


def generate(
    model: Annotated[Path, typer.Argument(metavar="DIR", help="A model directory.", show_default=False)],
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be given several times.")] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(help="One prompt a line; in a .jsonl file, one object a line with `prompt` or `token_ids`."),
    ] = None,
    token_ids: Annotated[list[str] | None, typer.Option(help="A prompt as token ids: 5,17,3.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the smallest set of tokens with this probability.")] = 0.95,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this fraction of the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 discourages tokens seen before.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the text; may be repeated.")] = None,
    n: Annotated[int, typer.Option("--n", help="Completions of each prompt.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-text token.")] = False,
    logprobs: Annotated[int | None, typer.Option(help="Log probabilities of this many likeliest tokens.")] = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    mesh: MeshOption = None,
    context: Annotated[int | None, typer.Option(help="Most tokens of a sequence.")] = None,
    max_batch: Annotated[int, typer.Option(help="Most sequences that run together.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line per request.")] = False,
) -> None:
    """Continue prompts, streaming the text as it comes.

    With --json, a request that cannot run becomes a line with its `error`; the others run, and the exit code is 1.
    """
    prompts = _read_prompts(prompt or [], prompts_file, token_ids or [])
    from jaxinfer.generation import LLM, SamplingParams

    params = SamplingParams(
        max_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=tuple(stop or ()),
        n=n,
        seed=seed,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
    )
    start = time.perf_counter()
    llm = LLM(model, mesh=parse_mesh(mesh), dtype=dtype, quantize=quantize, context=context, max_batch=max_batch)
    loaded = time.perf_counter() - start
    if as_json:
        _print_json(llm, prompts, params)
    else:
        _print_text(llm, prompts, params)
        _note(f"[model loaded in {loaded:.2f} s]")


def _read_prompts(texts: list[str], file: Path | None, token_ids: list[str]) -> "list[Prompt]":
    """The prompts of all three options. Raises ValueError naming the option or line that is wrong."""
    prompts: list[Prompt] = list(texts)
    if file is not None:
        lines = file.read_text().splitlines()
        if file.suffix == ".jsonl":
            prompts += [_json_prompt(f"{file}:{number}", line) for number, line in enumerate(lines, 1)]
        else:
            prompts += lines
    for ids in token_ids:
        try:
            prompts.append([int(i) for i in ids.split(",")])
        except ValueError:
            raise ValueError(f"--token-ids must be integers separated by commas, got {ids!r}.") from None
    if not prompts:
        raise ValueError("No prompt: give --prompt, --prompts-file or --token-ids.")
    return prompts


class _PromptLine(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str | None = None
    token_ids: list[int] | None = None


def _json_prompt(where: str, line: str) -> "Prompt":
    try:
        given = msgspec.json.decode(line, type=_PromptLine)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{where}: {error}; each line must be an object with `prompt` or `token_ids`.") from error
    if (given.prompt is None) == (given.token_ids is None):
        raise ValueError(f"{where}: give exactly one of `prompt` and `token_ids`.")
    return given.prompt if given.prompt is not None else given.token_ids or []


def _note(text: str) -> None:
    """Beside the generated text, which alone goes to stdout."""
    typer.secho(text, err=True, dim=True)


def _print_text(llm: "LLM", prompts: "list[Prompt]", params: "SamplingParams") -> None:
    """A single completion is streamed; several are printed one after the other."""
    for prompt in prompts:
        llm.check(prompt, params)
    for prompt in prompts:
        shown = prompt if isinstance(prompt, str) else ",".join(map(str, prompt))
        if params.n > 1:
            output = llm.generate([prompt], params)[0]
            for completion in output.completions:
                _note(f"{shown} ({completion.index + 1} of {params.n})")
                print(completion.text if llm.tokenizer else completion.token_ids)
        else:
            typer.secho(shown, err=True, bold=True, nl=False)
            output = _stream(llm, prompt, params)
        _note(_summary(output))


def _stream(llm: "LLM", prompt: "Prompt", params: "SamplingParams") -> "RequestOutput":
    printed, output = 0, None
    for output in llm.stream([prompt], params):
        completion = output.completions[0]
        text = completion.text if llm.tokenizer else "".join(f",{i}" for i in completion.token_ids)
        print(text[printed:], end="", flush=True)
        printed = len(text)
    print(flush=True)
    assert output is not None, "a request that was checked yields at least once"
    return output


def _summary(output: "RequestOutput") -> str:
    completion = output.completions[0]
    timings = completion.timings
    rate = f", {timings.tokens_per_s:.1f} tokens/s" if timings.tokens_per_s else ""
    first = f", first token after {timings.first_token_s:.3f} s" if timings.first_token_s is not None else ""
    return f"[{len(completion.token_ids)} tokens, {completion.finish_reason}{rate}{first}]"


def _print_json(llm: "LLM", prompts: "list[Prompt]", params: "SamplingParams") -> None:
    failed = False
    runnable: list[tuple[int, Prompt]] = []
    for index, prompt in enumerate(prompts):
        try:
            llm.check(prompt, params)
            runnable.append((index, prompt))
        except ValueError as error:
            failed = True
            print(json.dumps({"index": index, "error": str(error)}), flush=True)
    if runnable:
        outputs = llm.generate([prompt for _, prompt in runnable], params)
        for (index, _), output in zip(runnable, outputs, strict=True):
            print(json.dumps({"index": index, **_as_json(output)}), flush=True)
    if failed:
        raise typer.Exit(1)


def _as_json(output: "RequestOutput") -> dict[str, Any]:
    """The first completion's fields at the top level; all of them under `completions` when there are several."""
    fields = msgspec.to_builtins(output, str_keys=True)
    completions = fields.pop("completions")
    first = {k: v for k, v in completions[0].items() if k != "index"}
    return {**fields, **first, **({"completions": completions} if len(completions) > 1 else {})}
