"""LoRA adapters: which are on the device and in host memory."""
