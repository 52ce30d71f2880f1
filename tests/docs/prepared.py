"""What pages take for granted: files that their reader has beside a clone."""

import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]


def save_adapters(folder: Path) -> None:
    """Write two adapters of the demo model that change what it writes."""
    from tests.peft import random_pair, save_adapter

    for seed, name in enumerate(("upper", "tests")):
        rng = np.random.default_rng(seed)
        save_adapter(folder / "adapters" / name, {"model.layers.0.self_attn.q_proj": random_pair(256, 256, 4, rng)})


def save_mixture(folder: Path) -> None:
    """Write a tiny mixture of experts."""
    from tests.tiny import MOE_CONFIGS, save_tiny

    save_tiny(folder / "moe", config=MOE_CONFIGS["shared"])


def save_gguf(folder: Path) -> None:
    """Write a tiny Llama in GGUF."""
    with zipfile.ZipFile(ROOT / "tests/goldens/gguf/models.zip") as archive:
        (folder / "tiny.gguf").write_bytes(archive.read("llama.BF16.gguf"))


PREPARED: dict[Path, Callable[[Path], None]] = {
    Path("docs/how-to/adapters.md"): save_adapters,
    Path("docs/how-to/gguf.md"): save_gguf,
    Path("docs/moe.md"): save_mixture,
}
