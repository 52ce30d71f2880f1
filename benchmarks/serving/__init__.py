"""The HTTP server: its own cost, and its speed against other servers. Start at `__main__.py`."""
