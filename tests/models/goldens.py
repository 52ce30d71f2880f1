"""Goldens and the models converted from them, for the tests of this directory."""

import dataclasses
import functools
import json
import pathlib

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from jaxinfer.checkpoints.manifest import part_of
from jaxinfer.models import (
    Cache,
    Decoder,
    DecoderConfig,
    Encoder,
    EncoderConfig,
    KVPages,
    ModelConfig,
    TokenRows,
    WeightFormat,
)
from jaxinfer.models.abstract import leaf_name
from jaxinfer.models.config import AttentionConfig, Mixer
from jaxinfer.models.families import Source, family_of, plan
from jaxinfer.models.files.gguf_config import ARCHITECTURES
from jaxinfer.models.layers.forward_context import ForwardContext
from jaxinfer.models.leaves import recurrent_shapes
from tests.goldens.expected import read_expected

DIRECTORY = pathlib.Path(__file__).parents[1] / "goldens"
NAMES = sorted(path.parent.name for path in DIRECTORY.glob("*/config.json"))


def read_config(name: str) -> dict:
    """The golden's `config.json`."""
    return json.loads((DIRECTORY / name / "config.json").read_text())


def config_of(name: str) -> ModelConfig:
    """The golden's config, which its family makes."""
    hf = read_config(name)
    return family_of(hf).config(hf)


ENCODERS = [name for name in NAMES if isinstance(config_of(name), EncoderConfig)]
DECODERS = [name for name in NAMES if isinstance(config_of(name), DecoderConfig)]
EXPERTS = [name for name in DECODERS if config_of(name).moe_layers]

WITH_STATES = [name for name in DECODERS if config_of(name).state_layers]
"""Decoders that have layers with recurrent states."""

IN_STAGES = [
    name
    for name in DECODERS
    if len({kind.attention.scale for kind in config_of(name).pattern if kind.has_attention}) == 1
    and not config_of(name).shares_kv
    and config_of(name).layer_inputs is None
]
"""Decoders with layers that compute the same with other weights, on their own, which stages need."""

_GGUF = {architecture.model_type for architecture in ARCHITECTURES.values()}

FEATURES = {
    "streamed": NAMES,
    "on a mesh": NAMES,
    "in stages": IN_STAGES,
    "speculation": DECODERS,
    "int8 KV": DECODERS,
    "int8, int4, fp8": NAMES,
    "LoRA": DECODERS,
    "GGUF": [name for name in NAMES if not _GGUF.isdisjoint(family_of(read_config(name)).model_types)],
}
"""The goldens that the tests of a feature run with: docs/families.md says that it works with their families."""

PAGE_SIZE = 4


@dataclasses.dataclass(frozen=True)
class Golden:
    """A converted model and what `transformers` computed from the same tensors."""

    config: ModelConfig
    leaves: dict[str, np.ndarray]
    tokens: np.ndarray  # [B, T]
    token_types: np.ndarray  # [B, T]
    positions: np.ndarray  # [B, T], -1 behind each row's length
    expected: np.ndarray  # [real tokens, V or D]


@functools.cache
def load(name: str) -> Golden:
    """Convert one golden in memory."""
    directory = DIRECTORY / name
    hf = read_config(name)
    tensors = load_file(directory / "model.safetensors")
    family = family_of(hf)
    config = family.config(hf)
    sources = plan(family, config, {key: tensor.shape for key, tensor in tensors.items()})
    leaves = combined(tensors, sources)
    expected = read_expected(directory)
    tokens, lengths = expected["tokens"], expected["lengths"]
    places = np.arange(tokens.shape[1], dtype=np.int32)[None]
    return Golden(
        config=config,
        leaves=leaves,
        tokens=tokens,
        token_types=expected.get("token_types", np.zeros_like(tokens)),
        positions=np.where(places < lengths[:, None], places, -1),
        expected=expected["hidden" if name in ENCODERS else "logits"],
    )


def combined(tensors: dict[str, np.ndarray], sources: dict[str, Source]) -> dict[str, np.ndarray]:
    """The leaves that the sources make of the tensors; those with a part for each expert stacked."""
    leaves, parts = {}, {}
    for name, source in sources.items():
        read = (tensors[key] if source.index is None else tensors[key][source.index] for key in source.names)
        leaf, part = part_of(name)
        if part is None:
            leaves[leaf] = source.combine(*read)
        else:
            parts.setdefault(leaf, {})[part] = source.combine(*read)
    return leaves | {leaf: np.stack([by_expert[i] for i in range(len(by_expert))]) for leaf, by_expert in parts.items()}


@functools.cache
def abstract(config: ModelConfig, weights: WeightFormat) -> Decoder | Encoder:
    """The model without its weights: one for all tests, which leave it as it is."""
    kind = Decoder if isinstance(config, DecoderConfig) else Encoder
    return nnx.eval_shape(lambda: kind(config, weights, rngs=nnx.Rngs(0)))


def leaf_shapes(model: nnx.Module) -> dict[str, tuple[int, ...]]:
    """Leaf name -> shape."""
    return {leaf_name(path): leaf.get_value().shape for path, leaf in nnx.to_flat_state(nnx.state(model))}


def build(golden: Golden, *, int8: bool = False) -> tuple[nnx.GraphDef, nnx.State]:
    """The model with the golden's weights in float32, split for `jax.jit`."""
    weights = WeightFormat(quantized="int8" if int8 else None)
    graph, state = nnx.split(abstract(golden.config, weights))
    leaves = golden.leaves
    if int8:
        leaves = quantized(leaves, leaf_shapes(nnx.merge(graph, state)))
    flat = [
        (path, leaf.replace(jax.device_put(np.asarray(leaves[leaf_name(path)], leaf.get_value().dtype))))
        for path, leaf in nnx.to_flat_state(state)
    ]
    return graph, nnx.from_flat_state(flat)


def quantized(leaves: dict[str, np.ndarray], shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The leaves with int8 rows and a scale beside every matrix that the int8 model scales."""
    stored = dict(leaves)
    for leaf in leaves:
        scale = f"{leaf.rpartition('.')[0]}.scale"
        if leaves[leaf].ndim == 2 and scale in shapes:
            matrix = leaves[leaf].astype(np.float32)
            scales = np.abs(matrix).max(axis=1) / 127
            stored |= {leaf: np.round(matrix / scales[:, None]).astype(np.int8), scale: scales}
    return stored


# A hundred programs that run once each: compile quickly rather than well.
_jit = functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})


@_jit
def forward(graph, state, tokens, positions, caches=None, page_table=None):
    """Logits [B, T, V] and the caches."""
    model = nnx.merge(graph, state)
    hidden, caches = model(tokens, positions, caches, page_table)
    return model.logits(hidden), caches


def forward_by_layers(graph, state, tokens, positions, caches=None, page_table=None):
    """Logits [B, T, V] and the caches, from a program for each kind of layer: layers that are alike share theirs."""
    model, slot = nnx.merge(graph, state), np.arange(len(tokens), dtype=np.int32)
    rows = TokenRows(tokens, positions, page_table, slot=slot)
    (x, rows), used = _enter(graph, state, rows), list(caches or [None] * len(model.cfg.cached_layers))
    for number, (layer, place) in enumerate(zip(model.layers, model.cfg.cache_places, strict=True)):
        layer_graph, layer_state = nnx.split(layer)
        x, used[place] = _run_layer((layer_graph, model.cfg.positions), layer_state, x, rows, number, used[place])
    return _leave(graph, state, x, rows), used


@_jit
def _enter(graph, state, rows):
    x, context = nnx.merge(graph, state).enter((rows,))
    return x, context.groups[0]


@_jit
def _run_layer(graph_and_positions, state, x, rows, number, cache):
    graph, kinds = graph_and_positions
    return nnx.merge(graph, state)(x, ForwardContext.from_groups((rows,), kinds).of_layer(number), cache)


@_jit
def _leave(graph, state, x, rows):
    model = nnx.merge(graph, state)
    return model.logits(model.leave(x, ForwardContext((rows,), {}))[0])


def greedy_after(graph, state, prompts: list[list[int]], tokens: list[list[int]]) -> list[list[int]]:
    """The token of the largest logit after each prompt, and after each of the tokens that follow it but the last.

    They are the tokens themselves if these are what is generated greedily.
    """
    rows = [prompt + following[:-1] for prompt, following in zip(prompts, tokens, strict=True)]
    ids, places = np.zeros((2, len(rows), max(map(len, rows))), np.int32)
    for row, row_ids, row_places in zip(rows, ids, places, strict=True):
        row_ids[: len(row)] = row
        row_places[:] = [*range(len(row)), *[-1] * (len(row_places) - len(row))]
    best = np.asarray(forward_by_layers(graph, state, ids, places)[0]).argmax(-1)
    return [
        best[i, len(prompt) - 1 : len(row)].tolist() for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True))
    ]


@_jit
def encode(graph, state, tokens, positions, token_types):
    """Hidden vectors [B, T, D] and the pooled ones [B, D]."""
    model = nnx.merge(graph, state)
    hidden = model(tokens, positions, token_types)
    return hidden, model.pool(hidden, positions >= 0)


def program(function, *arguments) -> tuple[str, list]:
    """What a function computes: its operations, and the constants in them."""
    traced = jax.make_jaxpr(function)(*arguments)
    return str(traced.jaxpr), [np.asarray(constant).tolist() for constant in traced.consts]


def empty_cache(config: DecoderConfig, batch: int, tokens: int) -> tuple[list[Cache], np.ndarray]:
    """Caches filled with noise, of slots as many as rows, and a page table with its pages in random order."""
    pages_per_row = -(-tokens // PAGE_SIZE)
    count = batch * pages_per_row + 1
    rng = np.random.default_rng(0)
    table = rng.permutation(count)[: batch * pages_per_row].reshape(batch, pages_per_row).astype(np.int32)

    def shapes(mixer: Mixer) -> Cache:
        if isinstance(mixer, AttentionConfig):
            return KVPages.shapes(count, PAGE_SIZE, mixer.kv_heads, mixer.head_dim, np.dtype(np.float32))
        return recurrent_shapes(mixer, batch, np.dtype(np.float32))

    def noise(x: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(rng.normal(size=x.shape).astype(np.float32))

    return jax.tree.map(noise, [shapes(config.layer(layer).mixer) for layer in config.cached_layers]), table


def through_cache(golden: Golden, model: tuple[nnx.GraphDef, nnx.State], chunk: int) -> np.ndarray:
    """Logits of every real token, with the prompt fed in chunks through the paged cache, layer by layer."""
    batch, tokens = golden.tokens.shape
    caches, page_table = empty_cache(golden.config, batch, tokens)
    chunks = []
    for start in range(0, tokens, chunk):
        columns = np.s_[:, start : start + chunk]
        logits, caches = forward_by_layers(
            *model, golden.tokens[columns], golden.positions[columns], caches, page_table
        )
        chunks.append(np.asarray(logits))
    return np.concatenate(chunks, axis=1)[golden.positions >= 0]
