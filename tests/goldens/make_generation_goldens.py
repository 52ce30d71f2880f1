"""Writes `generation_fields.json`: the fields of transformers' GenerationConfig, and what `generate` takes for each.

Run in the environment of the peers; it needs no PyTorch:

    .venv-peers/bin/python tests/goldens/make_generation_goldens.py
"""

import json
import pathlib

from transformers import GenerationConfig

FILE = pathlib.Path(__file__).parent / "generation_fields.json"


def main() -> None:
    """Write the file."""
    fields = {name: None for name in vars(GenerationConfig()) if name != "_original_object_hash"}
    defaults = fields | GenerationConfig._get_default_generation_params()
    FILE.write_text(json.dumps(defaults, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
