"""Train the demo model with experts: as `train_demo_model`, with 8 experts in every layer, of which each token uses 2.

python -m examples.train_moe_demo_model --work-dir moe-demo --max-steps 1300
python -m examples.train_moe_demo_model --work-dir moe-demo --length 512 --batch 8 --export examples/moe_demo_model

The router learns by the weights that it gives the experts, by the load-balancing loss of Switch Transformer
(arXiv:2101.03961, section 2.2) and by the z-loss of ST-MoE (arXiv:2202.08906, equation 5). In training every expert
takes so many rows, and drops what does not fit; the exported model drops nothing.

`examples/moe_demo_model` was trained this way on two shared CPU cores (Intel, with AMX) in 28 minutes: 1300 steps of 16
sequences of 256 tokens, then 825 of 8 of 512, 8.7 million tokens in all. It has 3.8 million parameters, of which a
token uses 1.8 million. Bits per byte on the held-out modules: 1.21, against 2.01 of `xz -9` on each file; with windows
of the whole context of 1024 tokens, longer than any it was trained on, 3 percent more. In what was trained on, the
least used of a layer's experts gets 7 to 10 percent of the choices, the most used 15 to 17; and 0.9 percent do not fit
at the capacity factor of training.
"""

import argparse
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from examples.train_demo_model import (
    Trainer,
    as_stored,
    batch_at,
    cross_entropy,
    encode,
    evaluate,
    export,
    logits,
    parse,
    prepare,
    product,
    train,
)
from jaxinfer.models.config import (
    Activation,
    AttentionConfig,
    DecoderConfig,
    LayerConfig,
    MlpConfig,
    MoeConfig,
    NormConfig,
    NormKind,
    PositionKind,
    PositionsConfig,
    RouterConfig,
)
from jaxinfer.models.layers.moe import Moe
from jaxinfer.models.text.decoder import Decoder
from jaxinfer.pallas_kernels.moe import top_k_gating

CONFIG = DecoderConfig(
    vocab=2048,
    embed=192,
    layers=6,
    context=1024,
    pattern=(
        LayerConfig(
            mixer=AttentionConfig(
                q_heads=4,
                kv_heads=1,
                head_dim=64,
                positions=PositionsConfig(kind=PositionKind.ROTARY, rotary_dim=64),
            ),
            mlp=MlpConfig(
                hidden=96,
                activation=Activation.SILU,
                gated=True,
                moe=MoeConfig(router=RouterConfig(experts=8, experts_per_token=2)),
            ),
        ),
    ),
    norm=NormConfig(kind=NormKind.RMS),
    tied=True,
)

CAPACITY_FACTOR = 1.25
"""In training an expert takes this many times its even share of a batch's choices."""
BALANCE, ROUTER_Z = 0.01, 0.001
"""Factors of the losses by which the router learns to use its experts evenly, and to keep its logits small."""


# --- model --------------------------------------------------------------------------------------------------------


@jax.custom_vjp
def rows_of(x: jax.Array, index: jax.Array, inverse: jax.Array) -> jax.Array:
    """Copy rows, whose gradient is as cheap: it copies rows too, where that of `x[index]` would scatter them.

    x [N, D]; index int [R], N or more for rows of zeros; inverse int [N, k], the places in `index` of each row of x,
    R or more for none -> [R, D].
    """
    return x.at[index].get(mode="fill", fill_value=0)


def _rows_forward(x: jax.Array, index: jax.Array, inverse: jax.Array):
    return rows_of(x, index, inverse), inverse


def _rows_backward(inverse: jax.Array, dy: jax.Array):
    return sum(rows_of(dy, places, inverse) for places in inverse.T), None, None


rows_of.defvjp(_rows_forward, _rows_backward)


class Routed(NamedTuple):
    """The choices of the tokens of one layer.

    Attributes:
      load: float32 [E], each expert's share of all choices.
      dropped: float32 [], the share of those that did not fit.
      balance: float32 [], E times the sum over the experts of load * mean probability; 1 if all are even.
      z: float32 [], mean squared log of the sum of exp(logits).
    """

    load: jax.Array
    dropped: jax.Array
    balance: jax.Array
    z: jax.Array


def mixture(module: Moe, x: jax.Array, capacity: int) -> tuple[jax.Array, Routed]:
    """Compute the block `module`, [B, T, D] -> [B, T, D], with at most `capacity` rows for each expert."""
    cfg, rows = module.cfg.router, x.reshape(-1, x.shape[-1])
    scores = rows.astype(jnp.float32) @ module.router.weight[...].T
    routing = top_k_gating(scores, cfg.experts_per_token, capacity=capacity, normalize=cfg.normalize)
    by_expert = rows_of(rows, routing.tokens, routing.rows).reshape(cfg.experts, capacity, -1)
    gate_up = module.experts.gate_up.weight[...].astype(x.dtype)
    gate, up = (product(by_expert, gate_up[:, side::2]).astype(jnp.float32) for side in (0, 1))
    down = module.experts.down.weight[...].astype(x.dtype)
    outputs = product((jax.nn.silu(gate) * up).astype(x.dtype), down).reshape(-1, x.shape[-1])
    choice_of_row = jnp.full(len(outputs), routing.rows.size)
    choice_of_row = choice_of_row.at[routing.rows.reshape(-1)].set(jnp.arange(routing.rows.size), mode="drop")
    chosen = rows_of(outputs, routing.rows.reshape(-1), choice_of_row[:, None]).reshape(*routing.rows.shape, -1)
    y = jnp.einsum("nk,nkd->nd", routing.weights, chosen.astype(jnp.float32)).astype(x.dtype)

    load = jnp.mean(routing.experts.reshape(-1, 1) == jnp.arange(cfg.experts), axis=0)
    balance = cfg.experts * jnp.sum(load * jax.nn.softmax(scores).mean(axis=0))
    z = jnp.mean(jax.nn.logsumexp(scores, axis=-1) ** 2)
    return y.reshape(x.shape), Routed(load, jnp.mean(routing.rows >= len(outputs)), balance, z)


def routed_logits(
    model: Decoder, tokens: jax.Array, dtype=jnp.bfloat16, capacity_factor: float = CAPACITY_FACTOR
) -> tuple[jax.Array, Routed]:
    """Compute the model's logits, and how each layer routed: int32 [B, T] -> float32 [B, T, V], [layers, ...]."""
    layers = []

    def mlp(module: nnx.Module, x: jax.Array) -> jax.Array:
        assert isinstance(module, Moe)
        capacity = dataclasses.replace(module.cfg.router, capacity_factor=capacity_factor).capacity(tokens.size)
        assert capacity is not None
        y, routed = mixture(module, x, capacity)
        layers.append(routed)
        return y

    scores = logits(model, tokens, dtype, mlp)
    return scores, jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


class MoeTrainer(Trainer):
    """A trainer of routers too."""

    def loss(self, params: dict[str, jax.Array], batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Compute what a step makes smaller, and the nats per token."""
        scores, routed = routed_logits(self.model(params), batch[:, :-1])
        nats = cross_entropy(scores, batch[:, 1:])
        return nats + BALANCE * routed.balance.mean() + ROUTER_Z * routed.z.mean(), nats


# --- evaluation ---------------------------------------------------------------------------------------------------


@nnx.jit
def route(model: Decoder, tokens: jax.Array) -> Routed:
    """Return how each layer routes int32 [B, T] in training, stacked by layer."""
    return routed_logits(model, tokens)[1]


def print_routing(model: Decoder, stream: np.ndarray, args: argparse.Namespace, batches: int = 32) -> None:
    """Print how evenly each layer uses its experts on a text, and how much batches of it would drop in training."""
    batches = min(batches, ((len(stream) - 1) // args.length - 1) // args.batch)
    tokens = [batch_at(stream, step, args.batch, args.length)[:, :-1] for step in range(batches)]
    routed = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *(route(model, jnp.asarray(x)) for x in tokens))
    print(f"layer  least and most used expert's share of the choices ({1 / routed.load.shape[1]:.3f} is even)  dropped")
    for layer, (load, dropped) in enumerate(zip(routed.load, routed.dropped, strict=True)):
        print(f"{layer:5d}  {load.min():.3f} {load.max():.3f}  {dropped:.2%}")
    print(f"  all  {routed.load.min():.3f} {routed.load.max():.3f}  {routed.dropped.mean():.2%}", flush=True)


def run(args: argparse.Namespace, cfg: DecoderConfig = CONFIG) -> Decoder:
    """Train the tokenizer and the model, export and evaluate it."""
    corpus, tokenizer, stream = prepare(args, cfg.vocab)
    trainer = MoeTrainer(cfg, args.learning_rate)
    model = as_stored(trainer.model(train(trainer, stream, args).params))
    if args.export:
        export(args.export, model, tokenizer, layout="single-file")
    evaluate(model, tokenizer, corpus.held_out)
    print("Of what was trained on:")
    print_routing(model, stream, args)
    print("Of the held-out modules:")
    print_routing(model, encode(tokenizer, list(corpus.held_out.values())), args)
    return model


if __name__ == "__main__":
    run(parse(description=__doc__, minutes=28, length=256))
