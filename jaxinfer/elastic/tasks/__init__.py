"""Tasks: their images (`datasets.py`, `images.py`), how they are trained, and the repository that keeps them."""
