"""One server for several models of several kinds: what that costs. Start at `__main__.py`."""
