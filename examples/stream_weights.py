"""Generate with a model whose layers are not in memory: every pass streams them from disk, ahead of use.

    python examples/stream_weights.py examples/demo_model --weights disk

The first use writes the layers to the cache (`jaxinfer cache`), in the format in which they are read. For a model that
does not fit your memory, `--weights auto --device-memory 12GiB` keeps as many layers as fit.
"""

import argparse

from jaxinfer import LLM, SamplingParams

PROMPTS = ["def main():\n", "import os\n", "class Point:\n"]


def run(model: str, weights: str, device_memory: str | None, max_tokens: int) -> list[str]:
    """Return the text after each prompt. One fetch of a layer serves all of them."""
    llm = LLM(model, weights=weights, device_memory=device_memory, max_batch=len(PROMPTS))
    print(llm.placement or "all layers are on the device")
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=max_tokens))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        print(f"---\n{prompt}{output.outputs[0].text}")
    if llm.streaming is not None:
        print(f"---\n{llm.streaming}")
    return [output.outputs[0].text for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="examples/demo_model", help="a model directory")
    parser.add_argument("--weights", default="disk", help="host, disk or auto")
    parser.add_argument("--device-memory", help="limit of device memory, such as 12GiB")
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args()
    run(args.model, args.weights, args.device_memory, args.max_tokens)


if __name__ == "__main__":
    main()
