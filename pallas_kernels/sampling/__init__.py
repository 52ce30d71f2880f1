"""Choosing tokens from scores."""
