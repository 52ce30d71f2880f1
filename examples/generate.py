"""Load a model directory and generate text, in a batch and as a stream.

python examples/generate.py examples/demo_model
"""

import argparse

from jaxinfer import LLM, SamplingParams

PROMPTS = [
    "import argparse\n\n\ndef main():\n    parser = argparse.",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    'def read_lines(path):\n    """Return the lines of a file."""\n',
]


def run(model: str, max_tokens: int) -> list[str]:
    llm = LLM(model)

    print("A batch, each prompt with its own options:")
    params = [
        SamplingParams(max_tokens=max_tokens, temperature=0),
        SamplingParams(max_tokens=max_tokens, temperature=0.7, top_p=0.9, seed=1),
        SamplingParams(max_tokens=max_tokens, temperature=0.7, seed=2, stop=("\n\n",)),
    ]
    outputs = llm.generate(PROMPTS, params)
    for output in outputs:
        completion = output.outputs[0]
        print(f"--- {len(completion.token_ids)} tokens, {completion.finish_reason}\n{output.prompt}{completion.text}")

    print("\nA stream:")
    printed = ""
    for output in llm.stream(PROMPTS[0], params[0]):
        text = output.outputs[0].text
        print(text[len(printed) :], end="", flush=True)
        printed = text
    print()
    return [output.outputs[0].text for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="examples/demo_model", help="a model directory")
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args()
    run(args.model, args.max_tokens)


if __name__ == "__main__":
    main()
