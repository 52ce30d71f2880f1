"""Runs what strangers may have written in a process with limits of time and memory.

`Sandbox` (process.py) starts `program.py`, which runs a function of `templates.py` (chat templates), `grammars.py` or
`tokenizer_files.py`. They import little, so that it starts within a fraction of a second.
"""
