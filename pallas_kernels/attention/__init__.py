"""Attention over contiguous keys and over the pages of a KV cache."""
