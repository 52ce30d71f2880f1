"""Weights that come to the devices layer by layer, ahead of their use (ZeRO-Inference, DeepSpeed Inference VI)."""
