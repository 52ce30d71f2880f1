"""Streaming of layers from disk and host memory, against memory caps, the disk's own speed, and peers."""
