"""Writes `defaults.json`: what transformers takes where a `config.json` of a golden lacks a field.

Run in the environment of the peers; it needs no PyTorch:

    .venv-peers/bin/python tests/goldens/make_default_goldens.py

For each golden and each of its fields, also those of `text_config`: the fields whose values change if the field is left
out, with their new values. A field that transformers requires is left out.
"""

import copy
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from transformers import CONFIG_MAPPING

FOLDER = pathlib.Path(__file__).parent
NAMED = {"architectures", "dtype", "model_type", "text_config", "torch_dtype", "transformers_version", "vision_config"}
"""Fields that say which model it is, or hold the others."""


def read(config: dict[str, Any]) -> dict[str, Any]:
    """What transformers makes of a `config.json`."""
    return json.loads(
        CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(config)).to_json_string(use_diff=False)
    )


def paths(config: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The fields of a config, and those of its text model."""
    yield from ((name,) for name in config if name not in NAMED)
    yield from (("text_config", name) for name in config.get("text_config", {}) if name not in NAMED)


def changes(config: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any] | None:
    """The values that differ, of the config or of its text model, if a field is left out; None: it has no default."""
    shorter = copy.deepcopy(config)
    *outer, name = path
    del (shorter[outer[0]] if outer else shorter)[name]
    before, after = (value.get(outer[0], {}) if outer else value for value in (read(config), read(shorter)))
    if name not in after:  # an old spelling; or the model, not its config, has a default
        return None
    return {key: value for key, value in after.items() if key not in NAMED and value != before.get(key)}


def main() -> None:
    """Write the file."""
    defaults = {}
    for file in sorted(FOLDER.glob("*/config.json")):
        config = json.loads(file.read_text())
        if config.get("model_type") not in CONFIG_MAPPING:
            continue
        found = {}
        for path in paths(config):
            try:
                if (changed := changes(config, path)) is not None:
                    found["/".join(path)] = changed
            except Exception as error:  # required, or the rest does not fit without it
                print(f"{file.parent.name}: {'/'.join(path)}: {type(error).__name__}")
        defaults[file.parent.name] = found
    (FOLDER / "defaults.json").write_text(json.dumps(defaults, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
