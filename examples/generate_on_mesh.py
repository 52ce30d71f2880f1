"""Generate with a model sharded over a device mesh that a TOML file describes.

    python examples/generate_on_mesh.py examples/demo_model --mesh examples/mesh.toml

On a machine without several accelerators the mesh consists of virtual CPU devices: nothing gets faster, but the
shardings and collectives are the real ones.
"""

import argparse
import os

# Read by JAX when its backend starts. Collectives of virtual devices need more threads than there are cores.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("NPROC", "32")

import jax

from jaxinfer import LLM, SamplingParams

PROMPT = 'def read_lines(path):\n    """Return the lines of a file."""\n'


def run(model: str, mesh_file: str, max_tokens: int) -> tuple[list[int], list[int]]:
    """Generate on the mesh and on one device; return the token ids of both."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    llm = LLM(model, mesh=mesh_file, max_batch=1)
    for path, leaf in jax.tree.leaves_with_path(llm.model.state)[:12]:
        name = jax.tree_util.keystr(path[:-1], simple=True, separator=".")
        print(f"{name:<36} {leaf.shape!s:<14} {leaf.sharding.spec}")
    on_mesh = llm.generate(PROMPT, params)[0].outputs[0]
    print(f"--- on {len(llm.model.leaves['embed.table'].devices())} devices\n{PROMPT}{on_mesh.text}")
    alone = LLM(model, max_batch=1).generate(PROMPT, params)[0].outputs[0]
    print("--- one device generates", "the same" if alone.token_ids == on_mesh.token_ids else "something else")
    return on_mesh.token_ids, alone.token_ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="examples/demo_model", help="a model directory")
    parser.add_argument("--mesh", default="examples/mesh.toml", help="a TOML file with a [mesh] table")
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args()
    run(args.model, args.mesh, args.max_tokens)


if __name__ == "__main__":
    main()
