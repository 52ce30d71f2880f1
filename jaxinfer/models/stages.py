"""The layers of a model as stages of a pipeline, which all run one program (DeepSpeed Inference, section IV-B).

Stage s has consecutive layers of the model. Layers at the same position of all stages are of one kind, so that their
weights can lie side by side: a position at which a stage has no such layer is left out there, an identity layer.
"""

import dataclasses
import functools
import types
from collections.abc import Mapping, Sequence

from jax.sharding import AbstractMesh, Mesh

from jaxinfer.checkpoints import Leaf
from jaxinfer.models.config import DecoderConfig, ModelConfig
from jaxinfer.models.leaves import canonical_leaves, layer_of
from jaxinfer.models.weight_format import WeightFormat
from jaxinfer.sharding import ShardingRules

ENDS = {"embed.table": "head.weight", "embed.scale": "head.scale"}
"""Leaves that the first stage alone needs -> those of which the last one has as many: they take the same place."""


@dataclasses.dataclass(frozen=True)
class StageLeaf:
    """A leaf of the program that all stages run.

    Attributes:
      leaf: of each stage.
      parts: for each stage the leaf of the model that it is there; None: zeros. Empty: it is one leaf for all.
    """

    leaf: Leaf
    parts: tuple[str | None, ...] = ()


@dataclasses.dataclass(frozen=True)
class Stages:
    """The layers of each stage.

    Attributes:
      config: of the layers of one stage, by position, and of all that is there once.
      layers: for each stage the layer of the model at each position; None: the identity.
    """

    config: DecoderConfig
    layers: tuple[tuple[int | None, ...], ...]

    @property
    def count(self) -> int:
        """The number of stages."""
        return len(self.layers)

    def at(self, position: int) -> tuple[int | None, ...]:
        """The layer that each stage has at a position."""
        return tuple(stage[position] for stage in self.layers)

    def there(self, position: int) -> tuple[bool, ...]:
        """Return whether each stage has a layer at a position."""
        return tuple(layer is not None for layer in self.at(position))

    def example(self, position: int) -> int:
        """The index of a layer of the kind that a position has."""
        return next(layer for layer in self.at(position) if layer is not None)

    @functools.cache  # noqa: B019  # stages are few, and are kept by `divide` anyway
    def leaves(self, weights: WeightFormat) -> Mapping[str, StageLeaf]:
        """The leaves that programs take, by name and position, in their order."""
        canonical, ends = canonical_leaves(self.config, weights), self._ends(weights)
        between = (None,) * (self.count - 2)
        leaves = dict[str, StageLeaf]()
        for name, leaf in canonical.items():
            if (position := layer_of(name)) is not None:
                rest = name.removeprefix(f"layers.{position}.")
                names = (None if layer is None else f"layers.{layer}.{rest}" for layer in self.at(position))
                leaves[name] = StageLeaf(leaf, tuple(names))
            elif name in ends:
                leaves[name] = StageLeaf(leaf, (name, *between, ends[name]))
            elif name not in ends.values():
                leaves[name] = StageLeaf(leaf)
        return types.MappingProxyType(leaves)

    def _ends(self, weights: WeightFormat) -> dict[str, str]:
        """Return those of `ENDS` that can take the same place: all of them, or none."""
        leaves = canonical_leaves(self.config, weights)
        ends = {first: last for first, last in ENDS.items() if first in leaves or last in leaves}
        alike = all(first in leaves and leaves.get(first) == leaves.get(last) for first, last in ends.items())
        return ends if alike else {}

    def order(self, weights: WeightFormat) -> tuple[int, ...]:
        """The place of each of the model's leaves, in their order, among `leaves`."""
        places = {name: place for place, name in enumerate(self.leaves(weights))}
        firsts = {last: first for first, last in self._ends(weights).items()}
        return tuple(places[firsts.get(name, name)] for name in canonical_leaves(self.config, weights))

    def stage_of(self, weights: WeightFormat) -> dict[str, int]:
        """The stage of each leaf of the model that one stage alone has, by name."""
        parts = [leaf.parts for leaf in self.leaves(weights).values()]
        return {name: stage for part in parts for stage, name in enumerate(part) if name is not None}

    def __str__(self) -> str:
        counts = [sum(layer is not None for layer in stage) for stage in self.layers]
        return f"{self.count} stages of {', '.join(map(str, counts))} layers"


def stages_on(config: ModelConfig, mesh: Mesh | AbstractMesh | None, rules: ShardingRules) -> Stages | None:
    """The stages of a model on a mesh; None: each device has parts of all layers.

    Raises ValueError for a model whose layers cannot be divided so.
    """
    count = rules.num_stages(mesh)
    if count == 1:
        return None
    if not isinstance(config, DecoderConfig):
        raise ValueError(f"mesh pipeline={count}: only decoders run in stages; set pipeline = 1 and split by tensor.")
    return divide(config, count)


@functools.cache
def divide(config: DecoderConfig, count: int) -> Stages:
    """Divide the layers of a model into so many stages, as evenly as they go, the first ones larger.

    Raises ValueError if there are fewer layers than stages, so many kinds of layers that each device would have as many
    positions as the model has layers, layers that use keys and values of another stage, or layers that take vectors of
    a second table.
    """
    if count > config.layers:
        raise ValueError(
            f"mesh pipeline={count}: the model has {config.layers} layers, fewer than stages; lower pipeline to at "
            f"most {config.layers}."
        )
    if config.layer_inputs is not None:
        raise ValueError(
            f"mesh pipeline={count}: vectors of a second table for each layer (`DecoderConfig.layer_inputs`) are not "
            "implemented in stages; set pipeline = 1 and split by tensor."
        )
    kinds, sizes = config.layer_kinds, [len(range(stage, config.layers, count)) for stage in range(count)]
    first = [sum(sizes[:stage]) for stage in range(count)]
    parts = [range(start, start + size) for start, size in zip(first, sizes, strict=True)]
    for layer, owner in _owners(config).items():
        if not any(layer in part and owner in part for part in parts):
            raise _misfit(
                config, count, f"layer {layer} uses the keys and values of layer {owner}, which is in another stage"
            )
    pattern, placed = _side_by_side(parts, kinds)
    if len(pattern) >= config.layers and count > 1:
        raise _misfit(
            config,
            count,
            "the layers of its stages differ in kind (`DecoderConfig.pattern`), and side by side they would need "
            f"{len(pattern)} positions on each device, as many as the model has layers",
        )
    stages = Stages(config.with_layers(pattern), placed)
    at_positions = _owners(stages.config)
    for stage in stages.layers:
        for position, owner in at_positions.items():
            if (layer := stage[position]) is not None and stage[owner] != _owners(config)[layer]:
                raise _misfit(
                    config, count, f"side by side, layer {layer} would use the keys and values of another one"
                )
    return stages


def _owners(config: DecoderConfig) -> dict[int, int]:
    """The layers that use the keys and values of others -> those others."""
    places, cached = config.cache_places, config.cached_layers
    return {layer: owner for layer, place in enumerate(places) if (owner := cached[place]) != layer}


def _misfit(config: DecoderConfig, count: int, why: str) -> ValueError:
    nearest = next(n for n in range(count - 1, 0, -1) if n == 1 or _divides(config, n))
    return ValueError(f"mesh pipeline={count}: {why}; set pipeline = {nearest}.")


def _divides(config: DecoderConfig, count: int) -> bool:
    try:
        divide(config, count)
    except ValueError:
        return False
    return True


def _side_by_side(
    parts: Sequence[Sequence[int]], kinds: Sequence[int]
) -> tuple[tuple[int, ...], tuple[tuple[int | None, ...], ...]]:
    """The kind of layer at each position, and the layer that each stage has there."""
    pattern: tuple[int, ...] = ()
    for part in parts:
        pattern = _shortest_common(pattern, tuple(kinds[layer] for layer in part))
    placed = [_place(part, kinds, pattern) for part in parts]
    # With more than two stages the sequence may not be the shortest, and have positions that all layers do without.
    used = [position for position, there in enumerate(zip(*placed, strict=True)) if any(x is not None for x in there)]
    return tuple(pattern[i] for i in used), tuple(tuple(layers[i] for i in used) for layers in placed)


def _place(layers: Sequence[int], kinds: Sequence[int], pattern: Sequence[int]) -> tuple[int | None, ...]:
    """Put layers at positions of their kinds, in order."""
    rest, placed = list(layers), list[int | None]()
    for kind in pattern:
        placed.append(rest.pop(0) if rest and kinds[rest[0]] == kind else None)
    return tuple(placed)


def _shortest_common(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """The shortest sequence that has both within it, in their order."""
    # length[i][j]: of the shortest one for a[i:] and b[j:]
    length = [[len(a) - i + len(b) - j for j in range(len(b) + 1)] for i in range(len(a) + 1)]
    for i in reversed(range(len(a))):
        for j in reversed(range(len(b))):
            if a[i] == b[j]:
                length[i][j] = 1 + length[i + 1][j + 1]
            else:
                length[i][j] = 1 + min(length[i + 1][j], length[i][j + 1])
    common, i, j = list[int](), 0, 0
    while i < len(a) and j < len(b):
        both, skip_a = a[i] == b[j], length[i + 1][j] < length[i][j + 1]
        common.append(a[i] if both or skip_a else b[j])
        i, j = i + (both or skip_a), j + (both or not skip_a)
    return (*common, *a[i:], *b[j:])
