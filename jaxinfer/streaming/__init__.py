"""Weights that are streamed to the devices layer by layer, ahead of use (ZeRO-Inference, DeepSpeed Inference VI)."""
