"""What the host tier of the KV cache gains, and costs. Start at `__main__.py`."""
