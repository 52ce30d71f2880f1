"""Model files: Orbax model directories in and out, Hugging Face safetensors in.

Knows leaves, dtypes and files, not models: `jaxinfer.models` knows what a leaf means. Start at `manifest.py`
(what a model directory holds), then `writing.py`, `reading.py`, and `huggingface.py` (the other format).
"""

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.manifest import Leaf, Manifest, read_manifest, verify_files
from jaxinfer.checkpoints.reading import load, stream
from jaxinfer.checkpoints.writing import Writer, save

__all__ = ["CheckpointError", "Leaf", "Manifest", "Writer", "load", "read_manifest", "save", "stream", "verify_files"]
