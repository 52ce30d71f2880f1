"""Train the backbone of the elastic examples, a small vision transformer on real images of 16 x 16 pixels, and tasks.

python examples/train_elastic_vit.py --export examples/elastic_vit

The backbone learns how images are turned (by 0, 90, 180 or 270 degrees), and of digits, alone or four in a square, the
digit divided by two, which no task asks for. Nothing that a task is tested with is among its images. Then five tasks
are registered with 2, 4 and 8 prompts, and in `seeds` those of digits with 8 prompts from four more seeds, which say
how much of a difference is chance. What is there already is not trained again. Needs the extra `elastic`.
"""

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxinfer.elastic import Dataset, Service, TrainingConfig, load_dataset
from jaxinfer.elastic.datasets import make_mosaics, mosaic_members
from jaxinfer.elastic.images import resize_images
from jaxinfer.models.config import Activation, AttentionConfig, MlpConfig, NormConfig, NormKind, ViTConfig
from jaxinfer.models.loading import save_model
from jaxinfer.models.vit import ViT
from jaxinfer.models.weight_format import WeightFormat

CONFIG = ViTConfig(
    labels=("unused",),
    image_size=16,
    patch_size=2,
    embed=64,
    layers=4,
    attention=AttentionConfig(q_heads=4, kv_heads=4, head_dim=16, qkv_bias=True, out_bias=True),
    mlp=MlpConfig(hidden=128, activation=Activation.GELU_TANH, bias=True),
    norm=NormConfig(kind=NormKind.LAYER, eps=1e-6),
)
TEST, TEST_SEED = 0.25, 1
"""The share of each task's images that nothing is trained on, and the seed that draws them."""

TASKS, PROMPTS = ("digits", "mnist", "mosaics", "textures", "faces"), (2, 4, 8)
SEEDS, SEEDED_TASKS = range(1, 5), ("digits", "mnist")

TURNS, HALVES, CORNERS = 4, 5, 4
MOSAICS = 0.4
"""The share of squares of four digits in a batch."""


class Batch(NamedTuple):
    """What the backbone learns from.

    Attributes:
      pixels: uint8 [B, 16, 16, 3].
      turns: int [B], by how many times 90 degrees an image is turned; -1: not asked.
      halves: int [B, 4], of each corner the digit divided by two, of a single digit in all of them; -1: none there.
    """

    pixels: np.ndarray
    turns: np.ndarray
    halves: np.ndarray


def without_test(name: str, size: int) -> Dataset:
    """The images of a task that may be trained on."""
    return load_dataset(name, size).split(TEST, seed=TEST_SEED)[0]


def photo_crops(size: int, *, crop: int = 32, stride: int = 16) -> np.ndarray:
    """Crops of scikit-image's photos, uint8 [N, size, size, 3]."""
    from skimage import data

    crops = []
    for photo in (data.astronaut(), data.chelsea(), data.coffee(), data.rocket()):
        for top in range(0, photo.shape[0] - crop + 1, stride):
            crops += [photo[top : top + crop, x : x + crop] for x in range(0, photo.shape[1] - crop + 1, stride)]
    return resize_images(np.stack(crops), size)


def mnist_for_training(size: int) -> Dataset:
    """The digits of MNIST that neither alone nor in a square are in a test."""
    mnist, mosaics = load_dataset("mnist", size), load_dataset("mosaics", 16)
    tested = mosaic_members()[mosaics.split_indices(TEST, seed=TEST_SEED)[1]]
    return mnist.take(np.setdiff1d(mnist.split_indices(TEST, seed=TEST_SEED)[0], tested))


class Images:
    """All images that the backbone sees, every source often enough."""

    def __init__(self, size: int):
        digits, mnist = without_test("digits", size), mnist_for_training(size)
        faces, photos = without_test("faces", size).images, photo_crops(size)
        chosen = np.random.default_rng(0).permutation(len(photos))[:2000]
        others = (without_test("textures", size).images, np.tile(faces, (4, 1, 1, 1)), photos[chosen])
        self._pixels = np.concatenate((digits.images, mnist.images, *others))
        none = np.full(sum(map(len, others)), -1)
        self._halves = np.concatenate((digits.labels // 2, mnist.labels // 2, none))
        self._small = mnist_for_training(size // 2)

    def draw(self, batch: int, rng: np.random.Generator) -> Batch:
        """Squares of digits, and other images turned; all moved by a pixel at most."""
        squares = round(MOSAICS * batch)
        members = rng.integers(0, len(self._small), (squares, CORNERS))
        mosaics, halves = make_mosaics(self._small.images[members]), self._small.labels[members] // 2
        chosen, turns = rng.integers(0, len(self._pixels), batch - squares), rng.integers(0, TURNS, batch - squares)
        upright = self._halves[chosen] >= 0
        turns[upright & (rng.random(len(turns)) < 0.6)] = 0
        single = np.where(turns == 0, self._halves[chosen], -1)
        turned = [np.rot90(self._pixels[index], turn) for index, turn in zip(chosen, turns, strict=True)]
        pixels = np.concatenate((mosaics, np.stack(turned)))
        shifts = rng.integers(-1, 2, (batch, 2))
        moved = np.stack([np.roll(image, shift, (0, 1)) for image, shift in zip(pixels, shifts, strict=True)])
        corners = np.repeat(single[:, None], CORNERS, axis=1)
        return Batch(moved, np.concatenate((np.full(squares, -1), turns)), np.concatenate((halves, corners)))


class Model(nnx.Module):
    """The backbone, with heads that are dropped after training."""

    def __init__(self, cfg: ViTConfig, rngs: nnx.Rngs):
        self.backbone = ViT(cfg, WeightFormat(), rngs=rngs)
        self.turns = nnx.Linear(cfg.embed, TURNS, rngs=rngs)
        self.halves = nnx.Linear(cfg.embed, CORNERS * HALVES, rngs=rngs)

    def loss(self, pixels: jax.Array, turns: jax.Array, halves: jax.Array) -> jax.Array:
        """Of both heads, each over what it is asked."""
        features = self.backbone.features(pixels)
        corners = self.halves(features).reshape(len(pixels), CORNERS, HALVES)
        return _mean_loss(self.turns(features), turns) + _mean_loss(corners, halves)


def _mean_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Over labels that are not -1."""
    losses, asked = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0)), labels >= 0
    return jnp.sum(jnp.where(asked, losses, 0)) / jnp.maximum(jnp.sum(asked), 1)


def train(args: argparse.Namespace, cfg: ViTConfig = CONFIG) -> ViT:
    """Train for a time; the learning rate falls with what is left of it."""
    images, rng = Images(cfg.image_size), np.random.default_rng(args.seed)
    model = Model(cfg, nnx.Rngs(args.seed))
    graph, params = nnx.split(model)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(), optax.add_decayed_weights(1e-2))
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any, rate: jax.Array, *batch: jax.Array) -> Any:
        loss, gradient = jax.value_and_grad(lambda p: nnx.merge(graph, p).loss(*batch))(params)
        updates, state = optimizer.update(gradient, state, params)
        return jax.tree.map(lambda p, u: p - rate * u, params, updates), state, loss

    begun, done, losses = time.monotonic(), 0, []
    while (spent := (time.monotonic() - begun) / (60 * args.minutes)) < 1 and done < args.max_steps:
        rate = args.learning_rate * min(1.0, (done + 1) / 100) * 0.5 * (1 + np.cos(np.pi * spent))
        params, state, loss = step(params, state, jnp.float32(rate), *images.draw(args.batch, rng))
        losses.append(loss)
        done += 1
        if done % args.log_every == 0:
            print(f"step {done:5d}  {spent:6.1%}  loss {np.mean(jax.device_get(losses)):.3f}", flush=True)
            losses = []
    return nnx.merge(graph, params).backbone


def register_tasks(folder: Path, steps: int) -> None:
    """Register the tasks that are not registered yet."""
    service = Service.from_checkpoint(folder)
    for name in TASKS:
        if name not in service.tasks:
            dataset = without_test(name, service.config.image_size)
            service.register_task(name, dataset, prompts=PROMPTS, training=TrainingConfig(steps=steps), progress=say)
    # A few programs are enough to see how much seeds differ.
    seeds = Service.from_checkpoint(folder, repository=folder / "seeds", merge_levels=(-8,), schedule="constant")
    for name in SEEDED_TASKS:
        for seed in SEEDS:
            if (seeded := f"{name}-{seed}") not in seeds.tasks:
                training = TrainingConfig(steps=steps, seed=seed)
                dataset = without_test(name, seeds.config.image_size)
                seeds.register_task(seeded, dataset, prompts=PROMPTS[-1:], training=training, progress=say)


def say(what: str, done: int, total: int) -> None:
    """Print what is done."""
    if done == total:
        print(f"{time.strftime('%H:%M:%S')} {what}", flush=True)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--export", type=Path, required=True, help="the model directory to write")
    parser.add_argument("--minutes", type=float, default=12, help="of training; sets the learning rate")
    parser.add_argument("--max-steps", type=int, default=10**9, help="stop earlier")
    parser.add_argument("--batch", type=int, default=64, help="images per step")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="its maximum")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of what is drawn")
    parser.add_argument("--log-every", type=int, default=200, help="steps")
    parser.add_argument("--prompt-steps", type=int, default=600, help="training steps of each number of prompts")
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> None:
    if not args.export.exists():
        save_model(args.export, train(args), family="vit")
        print(f"Wrote {args.export}")
    register_tasks(args.export, args.prompt_steps)


if __name__ == "__main__":
    main(parse())
