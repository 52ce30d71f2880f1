"""Generate with a model sharded over a device mesh that a TOML file describes.

    python examples/generate_on_mesh.py examples/demo_model --mesh examples/mesh.toml
    python examples/generate_on_mesh.py examples/demo_model --mesh examples/pipeline_mesh.toml
    python examples/generate_on_mesh.py examples/moe_demo_model --mesh examples/moe_mesh.toml

On a machine without several accelerators the mesh consists of virtual CPU devices: nothing gets faster, but the
shardings and collectives are the real ones.
"""

import argparse
import os

# Read by JAX when its backend starts. Collectives of virtual devices need more threads than there are cores.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("NPROC", "32")

from jax.sharding import NamedSharding

from jaxinfer import LLM, SamplingParams

PROMPTS = ['def read_lines(path):\n    """Return the lines of a file."""\n', "import os\nimport sys\n"]
"""Lanes (`data = 2`) have one each, and so have the stages of a pipeline at any time."""


def run(model: str, mesh_file: str, max_tokens: int) -> tuple[list[list[int]], list[list[int]]]:
    """Generate on the mesh and on one device; return the token ids of both."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    llm = LLM(model, mesh=mesh_file, max_batch=len(PROMPTS))
    if llm.model.stages is not None:
        print(llm.model.stages)
    for name, leaf in list(llm.model.leaves.items())[:12]:
        assert isinstance(leaf.sharding, NamedSharding)
        print(f"{name:<32} {leaf.shape!s:<13} {leaf.sharding.spec}")
    on_mesh = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
    if (pipeline := llm.stats().pipeline) is not None:
        print(f"--- stages were idle for {pipeline.idle_share:.0%} of the time")
    print(f"--- on {len(llm.model.leaves['embed.table'].devices())} devices")
    for prompt, completion in zip(PROMPTS, on_mesh, strict=True):
        print(f"{prompt}{completion.text}\n---")
    alone = LLM(model, max_batch=len(PROMPTS)).generate(PROMPTS, params)
    tokens = [completion.token_ids for completion in on_mesh]
    expected = [output.outputs[0].token_ids for output in alone]
    print("one device generates", "the same" if tokens == expected else "something else")
    return tokens, expected


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="examples/demo_model", help="a model directory")
    parser.add_argument("--mesh", default="examples/mesh.toml", help="a TOML file with a [mesh] table")
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args()
    run(args.model, args.mesh, args.max_tokens)


if __name__ == "__main__":
    main()
