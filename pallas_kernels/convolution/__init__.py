"""Convolutions of images."""
