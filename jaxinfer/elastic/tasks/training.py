"""Training of a task's head and prompts. The backbone is frozen (VPT, arXiv:2203.12119, section 3)."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxinfer.compiled.interruptible import interruptible
from jaxinfer.elastic.tasks.datasets import Dataset
from jaxinfer.elastic.tasks.repository import Head
from jaxinfer.fields import AtLeast1, Positive, Seed, check_fields
from jaxinfer.models.config import ViTConfig
from jaxinfer.models.devices import run_on
from jaxinfer.models.layers.token_adaptation import PromptMode, TokenAdaptation
from jaxinfer.models.weight_format import WeightFormat
from jaxinfer.progress import long_work

Leaves = list[jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Training options of prompts.

    Attributes:
      steps: number of steps, each of a batch.
      batch: images per step, drawn anew each time.
      learning_rate: Adam's learning rate of prompts; it falls to 0 along a cosine.
      head_rate: the head's learning rate, as a share of it: a fitted head should follow slowly.
      seed: seed of the initial prompts and of the batches.
    """

    steps: AtLeast1 = 600
    batch: AtLeast1 = 64
    learning_rate: Positive = 2e-2
    head_rate: Positive = 0.1
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_fields(self)


STEPS_AT_ONCE = 20
"""Training steps per call: enough that calls cost nothing, few enough that progress shows."""

_FEATURES_BATCH = 64
_PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1)
"""Penalties on the head's weights, the best of which is found on a fifth of the images."""


class Trainer:
    """Trainer of tasks on one backbone.

    Args:
      config: the model's config.
      weights: the format of its leaves.
      leaves: the model's leaves, in the order in which programs take them.
      mesh: the devices that they are on; None: one device.
    """

    def __init__(self, config: ViTConfig, weights: WeightFormat, leaves: Leaves, mesh: Mesh | None):
        self._config, self._weights, self._leaves, self._mesh = config, weights, leaves, mesh

    def train(
        self,
        dataset: Dataset,
        prompts: Iterable[int],
        mode: PromptMode,
        options: TrainingConfig,
    ) -> tuple[dict[int, Head], dict[int, np.ndarray]]:
        """Train a task: return a head by number of prompts (0: without any), and each layer's prompts.

        Args:
          dataset: images and labels.
          prompts: numbers of prompts.
          mode: how a layer's prompts continue in the next one.
          options: the training options.
        """
        features = self.features(dataset.images)
        with long_work("fitting the head"):
            head = fit_head(features, dataset.labels, len(dataset.names), seed=options.seed)
        heads, learnt = {0: head}, dict[int, np.ndarray]()
        for count in sorted(set(prompts)):
            learnt[count], heads[count] = self.prompts(dataset.images, dataset.labels, head, count, mode, options)
        return heads, learnt

    def _run(self, program: Callable[..., Any], *arguments: Any) -> Any:
        """Call a program and wait for its results; Ctrl-C ends the wait."""
        return interruptible(lambda: jax.block_until_ready(run_on(self._mesh, program, *arguments)))

    def features(self, images: np.ndarray) -> np.ndarray:
        """Compute the head's inputs at level 0, float32 [N, D]."""
        run, features = _features(self._config, self._weights), []
        with long_work("computing features", total=len(images)) as work:
            for first in range(0, len(images), _FEATURES_BATCH):
                part = images[first : first + _FEATURES_BATCH]
                padded = np.pad(part, ((0, _FEATURES_BATCH - len(part)), (0, 0), (0, 0), (0, 0)))
                features.append(np.asarray(self._run(run, self._leaves, padded))[: len(part)])
                work.advance(len(part))
        return np.concatenate(features)

    def prompts(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        head: Head,
        prompts: int,
        mode: PromptMode,
        options: TrainingConfig,
    ) -> tuple[np.ndarray, Head]:
        """Train the prompts of each layer, float32 [layers, prompts, D], and with them a head.

        Args:
          images: uint8 [N, H, W, 3].
          labels: int [N].
          head: the initial head.
          prompts: number of prompts per layer.
          mode: how a layer's prompts continue in the next one.
          options: the training options.
        """
        config = self._config
        rng = np.random.default_rng(options.seed)
        initial = 0.02 * rng.standard_normal((config.layers, prompts, config.embed))
        params: Mapping[str, Any] = {
            "prompts": jnp.asarray(initial, jnp.float32),
            "weight": jnp.zeros_like(head.weight),  # added to the head, as a share
            "bias": jnp.zeros_like(head.bias),
        }
        step, optimizer = _prompt_step(
            config, self._weights, TokenAdaptation(prompts=prompts, prompt_mode=mode), options
        )
        state = optimizer.init(params)
        with long_work(f"training {prompts} prompts", total=options.steps) as work:
            for done in range(0, options.steps, STEPS_AT_ONCE):
                drawn = rng.integers(0, len(images), (STEPS_AT_ONCE, options.batch))
                given = head.weight, head.bias, images[drawn], labels[drawn]
                params, state = self._run(step, params, state, self._leaves, *given)
                work.update(done=min(done + STEPS_AT_ONCE, options.steps))
        weight, bias = (
            np.array(start + options.head_rate * params[name])
            for name, start in (("weight", head.weight), ("bias", head.bias))
        )
        return np.array(params["prompts"]), Head(weight, bias)


def fit_head(features: np.ndarray, labels: np.ndarray, classes: int, *, seed: int = 0) -> Head:
    """Fit the linear classifier of features with the least cross-entropy, choosing the penalty on its weights.

    Args:
      features: float32 [N, D].
      labels: int [N].
      classes: number of classes.
      seed: draws the fifth on which penalties are tried.
    """
    order = np.random.default_rng(seed).permutation(len(labels))
    tried, rest = np.split(order, [len(order) // 5])
    scores = []
    for penalty in _PENALTIES:
        head = _fit(features[rest], labels[rest], classes, penalty)
        logits = features[tried] @ head.weight.T + head.bias
        losses = optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(logits), jnp.asarray(labels[tried]))
        scores.append(float(jnp.sum(losses)))
    return _fit(features, labels, classes, _PENALTIES[int(np.argmin(scores))])


def _fit(features: np.ndarray, labels: np.ndarray, classes: int, penalty: float) -> Head:
    given = jnp.asarray(features), jnp.asarray(labels), jnp.float32(penalty)
    weight, bias = interruptible(lambda: jax.block_until_ready(_minimise(*given, classes=classes)))
    return Head(np.array(weight), np.array(bias))


@functools.partial(jax.jit, static_argnames=("classes", "steps"))
def _minimise(
    features: jax.Array, labels: jax.Array, penalty: jax.Array, *, classes: int, steps: int = 200
) -> tuple[jax.Array, jax.Array]:
    """Minimise the loss by L-BFGS; return weight [classes, D] and bias [classes]."""
    # Features of unit deviation give a penalty the same meaning for every backbone.
    mean, deviation = jnp.mean(features, axis=0), jnp.std(features, axis=0) + 1e-6
    scaled = (features - mean) / deviation

    def loss(params: tuple[jax.Array, jax.Array]) -> jax.Array:
        logits = scaled @ params[0].T + params[1]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(losses) + penalty * jnp.mean(jnp.sum(params[0] ** 2, axis=0))

    solver = optax.lbfgs()
    value_and_grad = optax.value_and_grad_from_state(loss)

    def step(carry: Any, _: None) -> tuple[Any, None]:
        params, state = carry
        value, gradient = value_and_grad(params, state=state)
        updates, state = solver.update(gradient, state, params, value=value, grad=gradient, value_fn=loss)
        return (optax.apply_updates(params, updates), state), None

    start = (jnp.zeros((classes, features.shape[1])), jnp.zeros(classes))
    ((weight, bias), _), _ = jax.lax.scan(step, (start, solver.init(start)), length=steps)
    weight = weight / deviation
    return weight, bias - weight @ mean


@functools.cache
def _features(config: ViTConfig, weights: WeightFormat) -> Callable[[Leaves, np.ndarray], jax.Array]:
    from jaxinfer.models.abstract import merge_model

    return jax.jit(lambda leaves, images: merge_model(config, weights, leaves).features(images).astype(jnp.float32))


@functools.cache
def _prompt_step(
    config: ViTConfig, weights: WeightFormat, adaptation: TokenAdaptation, options: TrainingConfig
) -> tuple[Callable[..., Any], optax.GradientTransformation]:
    """A function of `STEPS_AT_ONCE` steps, and the optimiser whose state it takes."""
    from jaxinfer.models.abstract import merge_model

    schedule = optax.cosine_decay_schedule(options.learning_rate, options.steps)
    optimizer = optax.adam(schedule)

    def loss(params: Any, leaves: Leaves, weight: jax.Array, bias: jax.Array, images: Any, labels: Any) -> jax.Array:
        prompts = jnp.broadcast_to(params["prompts"], (len(images), *params["prompts"].shape))
        features = merge_model(config, weights, leaves).features(images, adaptation, prompts).astype(jnp.float32)
        weight = weight + options.head_rate * params["weight"]
        logits = features @ weight.T + bias + options.head_rate * params["bias"]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    @jax.jit
    def steps(params: Any, state: Any, leaves: Leaves, weight: Any, bias: Any, images: Any, labels: Any) -> Any:
        def step(carry: Any, batch: Any) -> tuple[Any, None]:
            params, state = carry
            gradient = jax.grad(loss)(params, leaves, weight, bias, *batch)
            updates, state = optimizer.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, state), (images, labels))[0]

    return steps, optimizer
