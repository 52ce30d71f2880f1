"""What tests of schedulers share."""

import numpy as np
import pytest

from jaxinfer.generation.lora.cache import AdapterCache
from tests.peft import random_pair, save_adapter
from tests.tiny import CONFIG


@pytest.fixture
def adapters(tmp_path):
    """One slot for two adapters, and a third that cannot be read."""
    slots = AdapterCache(1, 4, 1 << 20, "tiny", CONFIG)
    for name in ("one", "other", "broken"):
        pair = random_pair(32, 32, 2, np.random.default_rng(0))
        slots.register(name, save_adapter(tmp_path / name, {"model.layers.0.self_attn.q_proj": pair}))
    (tmp_path / "broken" / "adapter_model.safetensors").write_bytes(b"nothing")
    return slots
