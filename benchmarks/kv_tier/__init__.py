"""What the tiers of the KV cache gain, and cost. Start at `__main__.py`."""
