"""Runs chat templates and grammars, which may come from strangers, in a process with limits of time and memory.

`Sandbox` (process.py) starts `program.py`, which runs a function of `templates.py` or `grammars.py`. They import
little, so that it starts within a fraction of a second.
"""
