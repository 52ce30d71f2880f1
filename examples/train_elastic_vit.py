"""Train the backbone of the elastic examples, a small vision transformer on real images of 16 x 16 pixels, and tasks.

    python examples/train_elastic_vit.py --export examples/elastic_vit --seeds benchmarks/data/elastic_vit_seeds
    python examples/train_elastic_vit.py --size tiny --export benchmarks/data/elastic_vit_tiny

The backbone learns the rotation of images (by 0, 90, 180 or 270 degrees), and for digits, alone or in squares of four,
the digit divided by two, which no task asks for. Its images are scikit-learn's digits, a quarter of which is kept for
tests, and crops of photos: other digits, textures and faces are new to it. Its output is the mean of its tokens: a
class token would have read all of them in the first layer, before any is merged.

Then four tasks are registered with 2, 4 and 8 prompts, and in the folder of `--seeds` those of digits with 8 prompts
from four more seeds, which show how much of a difference is chance. The other sizes, which replace the levels where
models are switched instead, get heads alone. Existing parts are not trained again. Needs the extra `elastic`.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxinfer.elastic import Dataset, Division, Service, TrainingConfig, load_dataset
from jaxinfer.elastic.tasks.images import resize_images
from jaxinfer.models.config import Activation, AttentionConfig, ImagePooling, MlpConfig, NormConfig, NormKind, ViTConfig
from jaxinfer.models.files.loading import save_model
from jaxinfer.models.vision.vit import ViT
from jaxinfer.models.weight_format import WeightFormat

HEAD_DIM = 16


def config_of(layers: int, heads: int) -> ViTConfig:
    """Make a config of a small vision transformer for images of 16 x 16 pixels, in 64 patches."""
    embed = heads * HEAD_DIM
    return ViTConfig(
        labels=("unused",),
        image_size=16,
        patch_size=2,
        embed=embed,
        layers=layers,
        pooling=ImagePooling.MEAN,
        attention=AttentionConfig(q_heads=heads, kv_heads=heads, head_dim=HEAD_DIM, qkv_bias=True, out_bias=True),
        mlp=MlpConfig(hidden=2 * embed, activation=Activation.GELU_TANH, bias=True),
        norm=NormConfig(kind=NormKind.LAYER, eps=1e-6),
    )


SIZES = {"tiny": config_of(4, 2), "small": config_of(4, 3), "base": config_of(6, 4)}
"""Model sizes; a larger one would not keep up with any load at which levels matter."""
DIVISION = Division(test_share=0.25, test_seed=1)
"""Division of each task's images: nothing is trained on the images for tests."""

TASKS, PROMPTS = ("digits", "mnist", "textures", "faces"), (2, 4, 8)
SEEDS, SEEDED_TASKS = range(1, 5), ("digits", "mnist")

TURNS, HALVES, PLACES = 4, 5, 5
"""Number of rotations; of halves of digits; of places of a digit: all of the image, or one of four."""
SQUARES = 0.25
"""Share of images that show four digits."""


class Batch(NamedTuple):
    """The training data of the backbone.

    Attributes:
      pixels: uint8 [B, 16, 16, 3].
      turns: int [B], the image's rotation in units of 90 degrees; -1: not asked.
      halves: int [B, 5], the digit divided by two at each place; -1: none, or it is turned.
    """

    pixels: np.ndarray
    turns: np.ndarray
    halves: np.ndarray


def without_test(name: str, size: int) -> Dataset:
    """The images of a task that may be trained on."""
    return load_dataset(name, size).split(DIVISION.test_share, seed=DIVISION.test_seed)[0]


def photo_crops(size: int, *, crop: int = 32, stride: int = 16) -> np.ndarray:
    """Crop scikit-image's photos, uint8 [N, size, size, 3]."""
    from skimage import data

    crops = []
    for photo in (data.astronaut(), data.chelsea(), data.coffee(), data.rocket()):
        for top in range(0, photo.shape[0] - crop + 1, stride):
            crops += [photo[top : top + crop, x : x + crop] for x in range(0, photo.shape[1] - crop + 1, stride)]
    return resize_images(np.stack(crops), size)


class Images:
    """All images that the backbone sees."""

    def __init__(self, size: int):
        digits, photos = without_test("digits", size), photo_crops(size)
        photos = photos[np.random.default_rng(0).permutation(len(photos))[: len(digits)]]
        self._pixels = np.concatenate((digits.images, photos))
        self._halves = np.concatenate((digits.labels // 2, np.full(len(photos), -1)))
        self._small = without_test("digits", size // 2)

    def draw(self, batch: int, rng: np.random.Generator) -> Batch:
        """Draw a batch of `batch` images."""
        squares = round(SQUARES * batch)
        single, four = self._draw_single(batch - squares, rng), self._draw_squares(squares, rng)
        return Batch(*(np.concatenate(parts) for parts in zip(single, four, strict=True)))

    def _draw_squares(self, count: int, rng: np.random.Generator) -> Batch:
        """Draw images of four digits each."""
        chosen = rng.integers(0, len(self._small), (count, 4))
        digits = self._small.images[chosen]
        rows = [np.concatenate((digits[:, left], digits[:, left + 1]), axis=2) for left in (0, 2)]
        halves = np.pad(self._small.labels[chosen] // 2, ((0, 0), (1, 0)), constant_values=-1)
        return Batch(np.concatenate(rows, axis=1), np.full(count, -1), halves)

    def _draw_single(self, batch: int, rng: np.random.Generator) -> Batch:
        """Draw images, rotated (most digits are not) and shifted by a pixel at most."""
        chosen, turns = rng.integers(0, len(self._pixels), batch), rng.integers(0, TURNS, batch)
        turns[(self._halves[chosen] >= 0) & (rng.random(batch) < 0.6)] = 0
        shifts, rows = rng.integers(-1, 2, (batch, 2)), zip(chosen, turns, strict=True)
        turned = [np.rot90(self._pixels[index], turn) for index, turn in rows]
        pixels = np.stack([np.roll(image, shift, (0, 1)) for image, shift in zip(turned, shifts, strict=True)])
        halves = np.full((batch, PLACES), -1)
        halves[:, 0] = np.where(turns == 0, self._halves[chosen], -1)
        return Batch(pixels, turns, halves)


class Model(nnx.Module):
    """The backbone, with heads that are dropped after training."""

    def __init__(self, cfg: ViTConfig, rngs: nnx.Rngs):
        self.backbone = ViT(cfg, WeightFormat(), rngs=rngs)
        self.turns = nnx.Linear(cfg.embed, TURNS, rngs=rngs)
        self.halves = nnx.Linear(cfg.embed, PLACES * HALVES, rngs=rngs)

    def loss(self, pixels: jax.Array, turns: jax.Array, halves: jax.Array) -> jax.Array:
        """Sum the losses of both heads, each over its own images."""
        features = self.backbone.features(pixels)
        places = self.halves(features).reshape(-1, PLACES, HALVES)
        alone = _mean_loss(places[:, 0], halves[:, 0])
        in_squares = _mean_loss(places[:, 1:].reshape(-1, HALVES), halves[:, 1:].reshape(-1))
        return _mean_loss(self.turns(features), turns) + alone + 2 * in_squares


def _mean_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Average the loss over labels that are not -1."""
    losses, asked = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0)), labels >= 0
    return jnp.sum(jnp.where(asked, losses, 0)) / jnp.maximum(jnp.sum(asked), 1)


def train(args: argparse.Namespace, cfg: ViTConfig) -> ViT:
    """Train for a time; the learning rate falls with the time left."""
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


def register_tasks(folder: Path, steps: int, *, prompts: Sequence[int] = PROMPTS) -> None:
    """Register the tasks that are not registered yet."""
    service = Service.from_checkpoint(folder, merge_levels=None if prompts else ())
    for name in TASKS:
        if name not in service.tasks:
            dataset = load_dataset(name, service.config.image_size, service.config.preprocessing)
            training = TrainingConfig(steps=steps)
            service.register_task(name, dataset, prompts=prompts, division=DIVISION, training=training, progress=say)


def register_seeds(folder: Path, repository: Path, steps: int) -> None:
    """Register tasks from other seeds, with the most prompts, in a repository of their own, unless they are there."""
    # A few programs are enough to see how much seeds differ.
    seeds = Service.from_checkpoint(folder, repository=repository, merge_levels=(-8,), schedule="constant")
    for name in SEEDED_TASKS:
        for seed in SEEDS:
            if (seeded := f"{name}-{seed}") not in seeds.tasks:
                training = TrainingConfig(steps=steps, seed=seed)
                dataset = load_dataset(name, seeds.config.image_size, seeds.config.preprocessing)
                seeds.register_task(
                    seeded, dataset, prompts=PROMPTS[-1:], division=DIVISION, training=training, progress=say
                )


def say(what: str, done: int, total: int) -> None:
    """Print a finished step."""
    if done == total:
        print(f"{time.strftime('%H:%M:%S')} {what}", flush=True)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--export", type=Path, required=True, help="the model directory to write")
    parser.add_argument("--seeds", type=Path, help="a folder for tasks from other seeds (default: none are trained)")
    parser.add_argument("--size", choices=SIZES, default="base", help="of the model")
    parser.add_argument("--minutes", type=float, default=12, help="of training; sets the learning rate")
    parser.add_argument("--max-steps", type=int, default=10**9, help="stop earlier")
    parser.add_argument("--batch", type=int, default=64, help="images per step")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="maximum learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of what is drawn")
    parser.add_argument("--log-every", type=int, default=200, help="steps between log lines")
    parser.add_argument("--prompt-steps", type=int, default=600, help="training steps of each number of prompts")
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> None:
    if not args.export.exists():
        save_model(args.export, train(args, SIZES[args.size]), family="vit", layout="single-file")
        print(f"Wrote {args.export}")
    register_tasks(args.export, args.prompt_steps, prompts=PROMPTS if args.size == "base" else ())
    if args.seeds:
        register_seeds(args.export, args.seeds, args.prompt_steps)


if __name__ == "__main__":
    main(parse())
