"""Tasks: their images (`datasets.py`, `images.py`), training, and the repository that keeps them."""
