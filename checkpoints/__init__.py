"""Model files: model directories in and out, Hugging Face safetensors in.

Knows leaves, dtypes and files, not models: `jaxinfer.models` knows what a leaf means. Start at `manifest.py`
(what a model directory holds) and its two layouts, `orbax_folder.py` and `single_file.py`, then `writing.py`,
`reading.py`, and `huggingface.py` (the other format).
"""

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.layouts import Layout, is_complete, list_files, read_file, read_manifest, verify_files
from jaxinfer.checkpoints.manifest import Leaf, Manifest
from jaxinfer.checkpoints.reading import load, stream
from jaxinfer.checkpoints.writing import Writer, save

__all__ = [
    "CheckpointError",
    "Layout",
    "Leaf",
    "Manifest",
    "Writer",
    "is_complete",
    "list_files",
    "load",
    "read_file",
    "read_manifest",
    "save",
    "stream",
    "verify_files",
]
