"""Model files: Orbax model directories in and out, Hugging Face safetensors in.

Knows leaves, dtypes and files, not models: `jaxinfer.models` knows what a leaf means. Start at `manifest.py`
(what a model directory holds), then `writing.py`, `reading.py`, and `huggingface.py` (the other format).
"""

from checkpoints.errors import CheckpointError
from checkpoints.manifest import Leaf, Manifest, read_manifest, verify_files
from checkpoints.reading import load, stream
from checkpoints.writing import Writer, save

__all__ = ["CheckpointError", "Leaf", "Manifest", "Writer", "load", "read_manifest", "save", "stream", "verify_files"]
