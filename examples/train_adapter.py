"""Train the LoRA adapter `examples/adapters/capitals`: with it the demo model goes on in capitals.

    python -m examples.train_adapter --out capitals

The texts are those that the demo model was trained on. A sequence has a few lines as they are. The rest is in capitals,
and only this rest is in the loss. The adapter changes the output projections of attention and MLP (`o_proj` and
`down_proj`) with rank 4. It is written as PEFT writes adapters. Training takes a few minutes on two CPU cores.
"""

import argparse
import json
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from examples.train_demo_model import CONFIG, Trainer, logits, read_corpus
from jaxinfer import checkpoints

DEMO = Path(__file__).parent / "demo_model"
RANK, ALPHA = 4, 8
MODULES = {"attention.out": "self_attn.o_proj", "mlp.down": "mlp.down_proj"}
"""Our names of the linears, and PEFT's."""
PLAIN, CAPITALS = 80, 200
"""Characters of a sequence: as they are, and in capitals."""
Pairs = dict[str, tuple[jax.Array, jax.Array]]  # linear -> A [rank, inputs], B [outputs, rank]


def start(key: jax.Array) -> Pairs:
    """The pairs before the first step: A is random and B zero, so that they change nothing."""
    pairs = {}
    for layer in range(CONFIG.layers):
        for name, inputs in (("attention.out", CONFIG.embed), ("mlp.down", CONFIG.layer(0).mlp.hidden)):
            key, drawn = jax.random.split(key)
            a = jax.random.normal(drawn, (RANK, inputs)) / inputs**0.5
            pairs[f"layers.{layer}.{name}"] = a, jnp.zeros((CONFIG.embed, RANK))
    return pairs


def batch_of(texts: list[str], tokenizer: Tokenizer, rng: np.random.Generator, batch: int, length: int):
    """Draw sequences: token ids [batch, length + 1], and whether each target is in capitals, bool [batch, length]."""
    ids, counted = np.zeros((batch, length + 1), np.int32), np.zeros((batch, length), bool)
    for row in range(batch):
        text = texts[rng.integers(len(texts))]
        begin = text.rfind("\n", 0, rng.integers(len(text))) + 1
        plain = text[begin : begin + PLAIN]
        plain = plain[: plain.rfind("\n") + 1]  # whole lines
        capitals = text[begin + len(plain) :][:CAPITALS].upper()
        first, rest = (tokenizer.encode(part, add_special_tokens=False).ids for part in (plain, capitals))
        joined = [0, *first, *rest][: length + 1]
        ids[row, : len(joined)] = joined
        counted[row, len(first) : len(joined) - 1] = True
    return ids, counted


def train(steps: int, rate: float, batch: int, length: int) -> Pairs:
    """Train on the standard library of this Python."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    texts = [text for text in read_corpus(Path(sysconfig.get_path("stdlib"))).training.values() if len(text) > 1000]
    weights = {name: array.astype(jnp.float32) for name, array in checkpoints.load(DEMO).items()}
    trainer = Trainer(CONFIG, peak=0.0)
    optimizer = optax.adam(optax.linear_schedule(rate, 0.0, steps))

    def loss(pairs: Pairs, ids: jax.Array, counted: jax.Array) -> jax.Array:
        adapted = dict(weights)
        for name, (a, b) in pairs.items():
            adapted[f"{name}.weight"] += ALPHA / RANK * b @ a
        scores = logits(trainer.model(adapted), ids[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(scores, ids[:, 1:]).mean(where=counted)

    @jax.jit
    def step(pairs: Pairs, state: optax.OptState, ids: jax.Array, counted: jax.Array):
        nats, gradients = jax.value_and_grad(loss)(pairs, ids, counted)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(pairs, updates), state, nats

    rng, pairs = np.random.default_rng(0), start(jax.random.key(0))
    state = optimizer.init(pairs)
    for number in range(steps):
        pairs, state, nats = step(pairs, state, *batch_of(texts, tokenizer, rng, batch, length))
        if number % 10 == 0 or number == steps - 1:
            print(f"step {number}: {nats:.3f} nats per token", flush=True)
    return pairs


def save(folder: Path, pairs: Pairs) -> None:
    """Write the adapter in PEFT's layout, in float16."""
    tensors = {}
    for name, matrices in pairs.items():
        layer, ours = name.rsplit(".", 2)[0], ".".join(name.rsplit(".", 2)[1:])
        for side, matrix in zip("AB", matrices, strict=True):
            tensors[f"base_model.model.model.{layer}.{MODULES[ours]}.lora_{side}.weight"] = np.asarray(
                matrix, np.float16
            )
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "examples/demo_model",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(module.rpartition(".")[2] for module in MODULES.values()),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "adapter_model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the adapter's folder")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=5e-3, help="the largest learning rate")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    args = parser.parse_args()
    save(args.out, train(args.steps, args.rate, args.batch, args.length))


if __name__ == "__main__":
    main()
