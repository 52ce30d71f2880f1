"""Sizes of models: what decides how long a pass takes and how much memory it needs."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

WORD = 32
"""Tokens of a word of a bitmask, of which devices have whole ones."""
RULE_CHUNK = 64
"""Tokens whose part of a recurrent state is computed together."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Layers of one kind.

    Attributes:
      count: how many layers of this kind the model has.
      params: parameters that every token multiplies with: attention, dense MLPs, shared experts.
      kv_params: those of them that go with the KV heads, of which devices may have copies.
      whole_params: parameters that every device has, in 32 bits: norms, routers, biases.
      kv_values: numbers in the KV cache that attention reads, per token and layer.
      shares_kv: whether they are another layer's, so that this one keeps none.
      kv_heads: the parts into which the KV cache divides over devices; more devices keep copies.
      pair_flops: operations of attention per token and token of its context.
      window: the longest context that attention sees; None: all.
      state_values: numbers of a recurrent state per sequence and layer, in 32 bits, read and written by each pass.
      conv_values: the same of a convolution's last inputs, in the size of the activations.
      state_flops: operations of a recurrent state per token.
      experts: experts of a mixture; 0 for a dense layer.
      chosen: experts per token.
      expert_params: parameters of one expert.
      capacity_factor: the most tokens of an expert, relative to its even share; None: it takes all that choose it.
      sums: sums over devices that finish the layer: after attention and after the MLP, or one after both.
    """

    count: int
    params: int
    kv_values: int
    kv_heads: int
    pair_flops: int
    window: int | None = None
    shares_kv: bool = False
    state_values: int = 0
    conv_values: int = 0
    state_flops: int = 0
    experts: int = 0
    chosen: int = 0
    expert_params: int = 0
    kv_params: int = 0
    whole_params: int = 0
    capacity_factor: float | None = None
    sums: int = 2

    @property
    def all_params(self) -> int:
        """The parameters of one layer, with all experts."""
        return self.params + self.whole_params + self.experts * self.expert_params

    @property
    def active_params(self) -> int:
        """The parameters of one layer that a token multiplies with."""
        return self.params + self.whole_params + self.chosen * self.expert_params

    def params_of(self, slices: int) -> float:
        """The parameters of `params` that each of so many devices has: a KV head goes to one of them as a whole."""
        copies = math.ceil(self.kv_heads / slices) / self.kv_heads
        return (self.params - self.kv_params) / slices + self.kv_params * copies

    def kv_values_of(self, slices: int) -> float:
        """The numbers in the KV cache per token and layer that each of so many devices has."""
        return self.kv_values * math.ceil(self.kv_heads / slices) / self.kv_heads

    def even_share(self, tokens: float) -> float:
        """The choices of each expert, if so many tokens choose all equally."""
        return tokens * self.chosen / self.experts

    def capacity(self, tokens: float) -> float:
        """The most of so many tokens that an expert takes."""
        if self.capacity_factor is None:
            return tokens
        return min(tokens, math.ceil(self.even_share(tokens) * self.capacity_factor))

    def seen(self, context: float) -> float:
        """The tokens of a context that attention sees."""
        return context if self.window is None else min(context, self.window)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder-only model.

    Attributes:
      hidden: width of the residual stream.
      vocab: token ids.
      heads: query heads, which tensor parallelism divides.
      tied: whether the head's matrix is the embedding's.
      whole_params: parameters of no layer that every device has, in 32 bits: the last norm, learned positions.
      word_width: width of the embedding and the head, if not `hidden`.
      inputs_width: width of a second table, which all layers take vectors of; 0: there is none.
      layers: kinds of layers; order does not matter, since stages get equal shares of each kind.
    """

    name: str
    hidden: int
    vocab: int
    heads: int
    tied: bool
    layers: tuple[LayerShape, ...]
    whole_params: int = 0
    word_width: int = 0
    inputs_width: int = 0

    @property
    def depth(self) -> int:
        """The number of layers."""
        return sum(layer.count for layer in self.layers)

    @property
    def experts(self) -> int:
        """Experts of the mixture with the fewest; 0 for a dense model."""
        return min((layer.experts for layer in self.layers if layer.experts), default=0)

    @property
    def has_equal_pages(self) -> bool:
        """Whether all layers have pages of their own, and of one size."""
        sizes = {(layer.kv_values, layer.kv_heads) for layer in self.layers}
        return len(sizes) == 1 and not self.has_states and not self.shares_kv

    @property
    def shares_kv(self) -> bool:
        """Whether some layers use the keys and values of others."""
        return any(layer.shares_kv for layer in self.layers)

    @property
    def has_stages(self) -> bool:
        """Whether it runs in stages: not if layers share keys and values, or take vectors of a second table."""
        return not self.shares_kv and not self.inputs_width

    @property
    def has_states(self) -> bool:
        """Whether some layers have a recurrent state."""
        return any(layer.state_values for layer in self.layers)

    @property
    def head_params(self) -> int:
        """Parameters of the head."""
        return (self.word_width or self.hidden) * self.vocab

    def head_params_of(self, slices: int) -> int:
        """The parameters of the head that each of so many devices has: rows of whole words of the tokens' bitmask."""
        words = math.ceil(self.vocab / WORD / slices)
        return (self.word_width or self.hidden) * (self.vocab if slices == 1 else words * WORD)

    @property
    def params(self) -> int:
        """All parameters; of models in `data/models.toml` without norms and biases."""
        layers = sum(layer.count * layer.all_params for layer in self.layers)
        tables = self.head_params * (1 if self.tied else 2) + self.inputs_width * self.vocab
        return layers + tables + self.whole_params

    @classmethod
    def from_fields(cls, name: str, fields: Mapping[str, Any]) -> "ModelShape":
        """Make a shape from an entry of `data/models.toml`, whose head explains the fields. Raises ValueError.

        >>> ModelShape.from_fields("tiny", {"hidden": 8, "layers": 2, "heads": 2, "vocab": 100}).params
        2336
        """
        try:
            return _Fields(**fields).shape(name)
        except TypeError as error:
            raise ValueError(f"model {name!r}: {str(error).partition('() ')[2] or error}") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Fields:
    """An entry of `data/models.toml`; its head explains the fields."""

    hidden: int
    layers: int
    heads: int
    vocab: int
    kv_heads: int = 0
    head_dim: int = 0
    mlp: int = 0
    gated: bool = False
    tied: bool = True
    window: int = 0
    window_every: int = 1
    experts: int = 0
    chosen: int = 1
    expert_mlp: int = 0
    shared_mlp: int = 0
    dense_layers: int = 0
    expert_every: int = 1
    latent: Mapping[str, int] = dataclasses.field(default_factory=dict)
    delta: Mapping[str, int] = dataclasses.field(default_factory=dict)
    attention_every: int = 1
    output_gate: bool = False
    source: str = ""

    def shape(self, name: str) -> ModelShape:
        """Count the layers of each kind: with or without experts, a window, a recurrent state."""
        counts: dict[tuple[bool, bool, bool], int] = {}
        for number in range(self.layers):
            mixture = bool(self.experts) and number >= self.dense_layers and (number + 1) % self.expert_every == 0
            windowed = bool(self.window) and number % self.window_every == 0
            recurrent = bool(self.delta) and (number + 1) % self.attention_every != 0
            counts[mixture, windowed, recurrent] = counts.get((mixture, windowed, recurrent), 0) + 1
        layers = tuple(self._layer(count, *kind) for kind, count in sorted(counts.items()))
        heads = math.gcd(self.heads, self.delta.get("key_heads", 0))
        return ModelShape(name=name, hidden=self.hidden, vocab=self.vocab, heads=heads, tied=self.tied, layers=layers)

    def _layer(self, count: int, mixture: bool, windowed: bool, recurrent: bool) -> LayerShape:
        mixer: dict[str, Any] = self._delta_rule() if recurrent else self._attention()
        if mixture:
            mixer["params"] += self._mlp_params(self.shared_mlp)
            expert: dict[str, Any] = {"whole_params": self.hidden * self.experts}
            expert |= {"experts": self.experts, "chosen": self.chosen}
            expert["expert_params"] = self._mlp_params(self.expert_mlp or self.mlp or 4 * self.hidden)
        else:
            mixer["params"] += self._mlp_params(self.mlp or 4 * self.hidden)
            expert = {}
        return LayerShape(count=count, window=self.window if windowed else None, **mixer, **expert)

    def _attention(self) -> dict[str, int]:
        if self.latent:
            return self._latent_attention(**self.latent)
        kv_heads, head_dim = self.kv_heads or self.heads, self.head_dim or self.hidden // self.heads
        q_heads = self.heads * (2 if self.output_gate else 1)
        return {
            "params": self.hidden * head_dim * (q_heads + self.heads + 2 * kv_heads),
            "kv_values": 2 * kv_heads * head_dim,
            "kv_heads": kv_heads,
            "kv_params": 2 * self.hidden * head_dim * kv_heads,
            "pair_flops": 4 * self.heads * head_dim,
        }

    def _delta_rule(self) -> dict[str, int]:
        sizes = delta_rule(**self.delta)
        outputs = self.delta["value_heads"] * self.delta["value_dim"]
        keys = self.delta["key_heads"] * self.delta["key_dim"]
        # Queries, keys, values, the gate and the way back; beta and the step of each head.
        return sizes | {"params": self.hidden * (2 * keys + 3 * outputs + 2 * self.delta["value_heads"])}

    def _mlp_params(self, width: int) -> int:
        return (3 if self.gated else 2) * self.hidden * width

    def _latent_attention(self, q_rank: int, kv_rank: int, nope: int, rope: int, value: int) -> dict[str, int]:
        """Compute the sizes of multi-head latent attention, as prompts compute it (DeepSeek-V2, arXiv:2405.04434)."""
        queries = self.hidden * q_rank + q_rank * self.heads * (nope + rope)
        keys = self.hidden * (kv_rank + rope) + kv_rank * self.heads * (nope + value)
        return {
            "params": queries + keys + self.heads * value * self.hidden,
            "kv_values": kv_rank + rope,
            "kv_heads": 1,
            "pair_flops": 2 * self.heads * (nope + rope + value),
        }


def delta_rule(*, key_heads: int, value_heads: int, key_dim: int, value_dim: int, conv: int) -> dict[str, int]:
    """Compute the fields of a layer with the gated delta rule (Gated DeltaNet, arXiv:2412.06464), but its parameters.

    Operations are those of prompts, in chunks (section 3.3); a single token takes fewer.

    Args:
      key_dim, value_dim: of a head; its state has their product.
      conv: tokens that the convolution before the rule sees.

    >>> delta_rule(key_heads=1, value_heads=2, key_dim=4, value_dim=8, conv=4)["state_values"]
    64
    """
    features, states = 2 * key_heads * key_dim + value_heads * value_dim, value_heads * key_dim * value_dim
    within = RULE_CHUNK * value_heads * (5 * key_dim + 3 * value_dim)
    return {
        "kv_values": 0,
        "kv_heads": key_heads,
        "pair_flops": 0,
        "state_values": states,
        "conv_values": (conv - 1) * features,
        "state_flops": 6 * states + within + 2 * conv * features,
    }


def stage_share(model: ModelShape, stages: int) -> float:
    """The share of all layers that the largest stage has."""
    return math.ceil(model.depth / stages) / model.depth


def stage_places(layer: LayerShape, stages: int) -> int:
    """The places that each stage has for layers of a kind, whether or not it has such layers."""
    return math.ceil(layer.count / stages)
