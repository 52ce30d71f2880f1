"""Presets against the parameter counts that their authors publish."""

import pytest

from jaxinfer.models.presets import PRESETS, parameter_count, preset

# Counts of the published checkpoints, exactly; of our own shape, by hand.
EXACT = {
    "gpt2-1.5b": 1_557_611_200,
    "gpt-neo-2.7b": 2_651_307_520,
    "gpt-j-6b": 6_050_882_784,
    "gpt-neox-20b": 20_554_567_680,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    # table and head, layers of (qkv, out, gate, up and down, two norms), the last norm
    "llama-213m": 2 * 32_000 * 1024 + 16 * (1536 * 1024 + 1024 * 1024 + 3 * 2816 * 1024 + 2 * 1024) + 1024,
}
# The DeepSpeed Inference paper's Table I in billions, rounded there: within 1.2 %.
ROUNDED = {"gpt-13b": 13, "gpt-50b": 50, "gpt-87b": 87, "lm-175b": 175, "lm-530b": 530}


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_count(name):
    count = parameter_count(PRESETS[name])
    if name in EXACT:
        assert count == EXACT[name]
    else:
        assert count == pytest.approx(ROUNDED[name] * 1e9, rel=0.012)


def test_unknown_preset_names_the_known():
    with pytest.raises(ValueError, match=r"preset='gpt-5'.*gpt2-1\.5b"):
        preset("gpt-5")
