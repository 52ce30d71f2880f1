"""A load on a server that speaks the OpenAI API, and what it makes of it: arrivals, a client, figures.

Start at `load.py`, which runs requests; `figures.py` defines what is reported.
"""
