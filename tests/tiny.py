"""Tiny random models with a byte-level tokenizer, as model directories: a dense one, and mixtures of experts."""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxinfer.checkpoints import Layout
from jaxinfer.models import Decoder, DecoderConfig, WeightFormat
from jaxinfer.models.config import (
    Activation,
    AttentionConfig,
    DeltaRuleConfig,
    GroupScore,
    LayerConfig,
    MlpConfig,
    MoeConfig,
    NormConfig,
    NormKind,
    PositionKind,
    PositionsConfig,
    RouterConfig,
    RouterKind,
    SharedMix,
)
from jaxinfer.models.files.loading import save_model

CONFIG = DecoderConfig(
    vocab=257,
    embed=32,
    layers=2,
    context=128,
    pattern=(
        LayerConfig(
            mixer=AttentionConfig(
                q_heads=4,
                kv_heads=2,
                head_dim=8,
                positions=PositionsConfig(kind=PositionKind.ROTARY, rotary_dim=8),
            ),
            mlp=MlpConfig(hidden=48, activation=Activation.SILU, gated=True),
        ),
    ),
    norm=NormConfig(kind=NormKind.RMS),
).with_windows((None, 20))
TWO_WIDTHS = dataclasses.replace(
    CONFIG, pattern=(CONFIG.layer(0), CONFIG.layer(1).with_attention(kv_heads=1, head_dim=32))
)
"""Layers whose pages differ: in their KV heads, their head size, and the bytes of a token."""
SHARED_KV = dataclasses.replace(
    TWO_WIDTHS,
    layers=4,
    pattern=tuple(
        kind.with_attention(qk_norm=True, shares_kv=shares) for shares in (False, True) for kind in TWO_WIDTHS.pattern
    ),
)
"""Two layers that use the keys and values of the two before them."""
HYBRID = dataclasses.replace(
    CONFIG,
    layers=3,
    pattern=(
        dataclasses.replace(
            CONFIG.layer(0),
            mixer=DeltaRuleConfig(key_heads=2, value_heads=4, key_dim=8, value_dim=6),
        ),
        CONFIG.layer(0).with_attention(output_gate=True),
    ),
)
"""Layers with recurrent states around one with attention, whose output is gated."""
ONE_KIND = CONFIG.with_windows((None,))
"""Layers of one kind, which streaming runs by the same programs."""


def _with_experts(router: RouterConfig, **moe: object) -> MlpConfig:
    return dataclasses.replace(CONFIG.layer(0).mlp, hidden=24, moe=MoeConfig(router=router, **moe))


_SHARED = _with_experts(RouterConfig(experts=4, experts_per_token=2), shared_hidden=16, shared_mix=SharedMix.GATED)
_SIGMOID = _with_experts(
    RouterConfig(
        experts=8,
        experts_per_token=2,
        kind=RouterKind.SIGMOID,
        selection_bias=True,
        groups=2,
        groups_per_token=1,
        group_score=GroupScore.TOP_2_SUM,
        scale=1.5,
    ),
    shared_hidden=16,
)
_CAPACITY = _with_experts(RouterConfig(experts=4, experts_per_token=2, capacity_factor=1.0))

MOE_CONFIGS = {
    "shared": CONFIG.with_mlps((_SHARED,)),
    "sigmoid": CONFIG.with_mlps((CONFIG.layer(0).mlp, _SIGMOID)),
    "capacity": CONFIG.with_mlps((_CAPACITY,)),
}
"""Mixtures of experts: with a gated shared one; with DeepSeek V3's router after a dense layer; that drop tokens."""


def byte_tokenizer() -> Tokenizer:
    """One token a byte, and <end> = 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def fill[Model: nnx.Module](make: Callable[[], Model], rng: np.random.Generator) -> Model:
    """A model of random matrices, whose other biases are 0 and scales 1. Nothing is compiled to make it.

    Its outputs are far from uniform, so that mistakes show.
    """
    model = nnx.eval_shape(make)
    for name, variable in nnx.to_flat_state(nnx.state(model)):
        if len(variable.shape) >= 2 or name[-1] in ("selection_bias", "decay", "step_bias"):
            value = rng.normal(0, 0.4, variable.shape)
        else:
            value = np.full(variable.shape, {"bias": 0, "scale": 1, "output_scale": 1, "expert_scale": 1}[name[-1]])
        variable.set_value(jax.device_put(value.astype(variable.dtype), jax.devices()[0]))
    return model


def random_model(config: DecoderConfig, seed: int = 0) -> Decoder:
    """A decoder of `fill`."""
    return fill(lambda: Decoder(config, WeightFormat(), rngs=nnx.Rngs(0)), np.random.default_rng(seed))


CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}assistant:"
AGENT_TEMPLATE = (
    "{% if tools %}system:{{ tools | tojson }};{% endif %}"
    "{% for m in messages %}{{ m.role }}:"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% if m.role == 'assistant' %}<end>{% endif %};{% endfor %}assistant:{% if enable_thinking %}<think>{% endif %}"
)
"""Of a model that calls tools and reasons."""


def save_tiny(
    path: Path,
    layout: Layout = "orbax",
    config: DecoderConfig = CONFIG,
    chat_template: str = CHAT_TEMPLATE,
    seed: int = 0,
    family: str = "tiny",
) -> Path:
    """Write the model directory; <end> is its end of text. family: whose names adapters have."""
    files = {
        "tokenizer.json": byte_tokenizer().to_str().encode(),
        "tokenizer_config.json": json.dumps({"chat_template": chat_template}).encode(),
    }
    save_model(path, random_model(config, seed), family=family, tokenizer=files, eos_ids=(256,), layout=layout)
    return path


def name_sampling(source: Path, path: Path, **values: float) -> Path:
    """Copy a model directory, with sampling defaults in its `config.json`."""
    shutil.copytree(source, path)
    config, manifest = path / "config.json", path / "manifest.json"
    content = json.dumps(json.loads(config.read_bytes()) | {"sampling": values}).encode()
    config.write_bytes(content)
    listed = json.loads(manifest.read_bytes())
    listed["files"]["config.json"] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest.write_text(json.dumps(listed))
    return path
