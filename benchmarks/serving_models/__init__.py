"""One server for several models, next to one process for each, which are swapped."""
