"""Serve many tasks at once from one model: stream a text, run a batch of tasks, and give one up.

python examples/async_generate.py examples/demo_model
"""

import argparse
import asyncio
import time

from jaxinfer import AsyncLLM, RequestOutput, SamplingParams

PROMPTS = [
    f"def test_{name}(self):\n" for name in ("read", "write", "append", "seek", "close", "flush", "mode", "name")
]


async def stream(llm: AsyncLLM, prompt: str, params: SamplingParams) -> str:
    """Print a text while it is generated."""
    text = ""
    async for piece in llm.generate(prompt, params).text():
        print(piece, end="", flush=True)
        text += piece
    print()
    return text


async def run_together(llm: AsyncLLM, params: SamplingParams) -> list[RequestOutput]:
    """Await all tasks' texts; the engine runs them in one batch, as far as it has room."""
    began = time.perf_counter()
    outputs = await asyncio.gather(*[llm.generate(prompt, params).final() for prompt in PROMPTS])
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"{len(outputs)} tasks: {tokens} tokens in {time.perf_counter() - began:.1f} s")
    return outputs


async def give_up(llm: AsyncLLM) -> int:
    """Cancel a task, here by a timeout, which withdraws its request."""
    endless = SamplingParams(max_tokens=None, ignore_eos=True)
    read = 0
    try:
        async with asyncio.timeout(0.5):
            while True:
                async for _ in llm.generate(PROMPTS[0], endless):
                    read += 1
    except TimeoutError:
        print(f"given up after {read} outputs")
    return read


async def run(model: str, max_tokens: int) -> tuple[str, list[RequestOutput]]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    # Small sizes need fewer programs; all are compiled first, as for a server, so that no task waits for one.
    async with AsyncLLM(model, max_batch=4, context=128, token_budget=32, compile_ahead=True) as llm:
        print("A stream:")
        text = await stream(llm, PROMPTS[0], params)
        outputs = await run_together(llm, params)
        await give_up(llm)
    return text, outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="examples/demo_model", help="a model directory")
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args()
    asyncio.run(run(args.model, args.max_tokens))


if __name__ == "__main__":
    main()
