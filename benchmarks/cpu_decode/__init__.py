"""Prefill and decode on a CPU: start at `__main__.py`. A module for each part, and `profile.py`."""
