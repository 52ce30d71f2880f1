"""Choosing the next token: options as arrays, the sampler, log probabilities, structured outputs.

Start at `sampler.py`.
"""
