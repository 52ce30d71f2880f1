"""Merging similar tokens of an encoder."""
