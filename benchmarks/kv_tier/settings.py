"""The settings of all parts of the benchmark, and the engines that they run."""

import random
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.random_models import save_random
from jaxinfer import LLM
from jaxinfer.models import DecoderConfig
from jaxinfer.models.config import (
    Activation,
    AttentionConfig,
    LayerConfig,
    MlpConfig,
    NormConfig,
    NormKind,
    PositionKind,
    PositionsConfig,
)

PAGE = 16
HOST_KV = "4GiB"


class Settings(NamedTuple):
    """Options of the command.

    Attributes:
      quick: a smoke test: a small model, short prompts, few rounds.
      folder: folder of the models.
    """

    quick: bool
    folder: Path

    @property
    def tokens(self) -> int:
        """Tokens of a long prompt."""
        return 128 if self.quick else 2048

    def model(self) -> Path:
        """A model of 246M random weights in float32, written if it does not exist; a small one for a smoke test."""
        layers, width = (2, 128) if self.quick else (16, 1024)
        folder = self.folder / f"kv-tier-{layers}x{width}"
        if not folder.exists():
            save_random(folder, make_config(layers, width))
        return folder

    def engine(self, pages: int, **options: Any) -> LLM:
        """An engine with so many pages on the device, whose programs are compiled."""
        context = self.tokens + 128
        config = make_config(2, 128) if self.quick else make_config(16, 1024)
        page_bytes = sum(config.layer(layer).attention.kv_values for layer in range(config.layers)) * PAGE * 4
        options = {"max_batch": 8, "context": context, "cache_bytes": pages * page_bytes, **options}
        llm = LLM(self.model(), dtype="float32", page_size=PAGE, **options)
        llm.engine.compile_ahead()
        return llm


def make_config(layers: int, width: int) -> DecoderConfig:
    """A Llama with four query heads for each KV head; 16 layers of 1024 have 246M parameters."""
    return DecoderConfig(
        vocab=32_000 if width > 128 else 512,
        embed=width,
        layers=layers,
        context=4096,
        pattern=(
            LayerConfig(
                mixer=AttentionConfig(
                    q_heads=width // 64,
                    kv_heads=max(1, width // 256),
                    head_dim=64,
                    positions=PositionsConfig(kind=PositionKind.ROTARY, rotary_dim=64),
                ),
                mlp=MlpConfig(hidden=width * 11 // 4, activation=Activation.SILU, gated=True),
            ),
        ),
        norm=NormConfig(kind=NormKind.RMS),
    )


class Tokens:
    """Draws tokens of no meaning."""

    def __init__(self, llm: LLM, seed: int = 0):
        self._random, self._vocab = random.Random(seed), llm.model.transformer.vocab

    def draw(self, count: int) -> list[int]:
        """So many tokens."""
        return [self._random.randrange(3, self._vocab) for _ in range(count)]
