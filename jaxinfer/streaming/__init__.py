"""Weights that are not on the devices all the time: brought there layer by layer, ahead of their use (ZeRO-Inference)."""
