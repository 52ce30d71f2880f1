"""The engine under many requests: `python -m benchmarks.engine`. One module per part; start at `__main__.py`."""
