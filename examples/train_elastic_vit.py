"""Train the backbone of the elastic examples, a small vision transformer on real images of 16 x 16 pixels, and tasks.

python examples/train_elastic_vit.py --export examples/elastic_vit

The backbone learns how images are turned (by 0, 90, 180 or 270 degrees), and of digits the digit divided by two, which
no task asks for. Its images are scikit-learn's digits, of which a quarter is kept for tests, and crops of photos: other
digits, textures and faces are new to it. Then four tasks are registered with 2, 4 and 8 prompts, and in `seeds` those
of digits with 8 prompts from four more seeds, which say how much of a difference is chance. What is there already is
not trained again. Needs the extra `elastic`.
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

TASKS, PROMPTS = ("digits", "mnist", "textures", "faces"), (2, 4, 8)
SEEDS, SEEDED_TASKS = range(1, 5), ("digits", "mnist")

TURNS, HALVES = 4, 5


class Batch(NamedTuple):
    """What the backbone learns from.

    Attributes:
      pixels: uint8 [B, 16, 16, 3].
      turns: int [B], by how many times 90 degrees an image is turned.
      halves: int [B], the digit divided by two; -1: none, or it is turned.
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


class Images:
    """All images that the backbone sees."""

    def __init__(self, size: int):
        digits, photos = without_test("digits", size), photo_crops(size)
        photos = photos[np.random.default_rng(0).permutation(len(photos))[: len(digits)]]
        self._pixels = np.concatenate((digits.images, photos))
        self._halves = np.concatenate((digits.labels // 2, np.full(len(photos), -1)))

    def draw(self, batch: int, rng: np.random.Generator) -> Batch:
        """Images turned, most digits not, and moved by a pixel at most."""
        chosen, turns = rng.integers(0, len(self._pixels), batch), rng.integers(0, TURNS, batch)
        turns[(self._halves[chosen] >= 0) & (rng.random(batch) < 0.6)] = 0
        shifts, rows = rng.integers(-1, 2, (batch, 2)), zip(chosen, turns, strict=True)
        turned = [np.rot90(self._pixels[index], turn) for index, turn in rows]
        pixels = np.stack([np.roll(image, shift, (0, 1)) for image, shift in zip(turned, shifts, strict=True)])
        return Batch(pixels, turns, np.where(turns == 0, self._halves[chosen], -1))


class Model(nnx.Module):
    """The backbone, with heads that are dropped after training."""

    def __init__(self, cfg: ViTConfig, rngs: nnx.Rngs):
        self.backbone = ViT(cfg, WeightFormat(), rngs=rngs)
        self.turns, self.halves = nnx.Linear(cfg.embed, TURNS, rngs=rngs), nnx.Linear(cfg.embed, HALVES, rngs=rngs)

    def loss(self, pixels: jax.Array, turns: jax.Array, halves: jax.Array) -> jax.Array:
        """Of both heads, each over what it is asked."""
        features = self.backbone.features(pixels)
        return _mean_loss(self.turns(features), turns) + _mean_loss(self.halves(features), halves)


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
