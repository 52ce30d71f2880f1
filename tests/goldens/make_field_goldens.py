"""Writes `fields.json`: the fields of `config.json` whose values change what transformers computes, one at a time.

Run in an environment with PyTorch:

    python tests/goldens/make_field_goldens.py

For each golden of a text model: the fields that its config class knows, with another value that changes the result on
the same weights. Sizes of weights are left out, as other values do not fit; so are numbers of layers, whose weights
would be random, and what is returned beside the logits.
"""

import copy
import json
import pathlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM

FOLDER = pathlib.Path(__file__).parent
LEFT_OUT = {
    *("architectures", "dtype", "torch_dtype", "model_type", "transformers_version", "text_config", "vision_config"),
    *("id2label", "label2id", "num_labels", "output_router_logits"),
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
}


def compute(folder: pathlib.Path, fields: dict[str, Any]) -> torch.Tensor:
    """Compute logits, or an encoder's hidden vectors, of the weights in a folder with these fields."""
    config = CONFIG_MAPPING[fields["model_type"]].from_dict(copy.deepcopy(fields))
    config._attn_implementation = "eager"
    encoder = fields["model_type"] in ("bert", "roberta", "distilbert")
    kind = AutoModel if encoder else AutoModelForCausalLM
    model = kind.from_pretrained(folder, config=config, dtype=torch.float32, local_files_only=True).eval()
    tokens = torch.arange(5, 17)[None] % min(config.vocab_size, 50)
    with torch.no_grad():
        return (model(tokens) if encoder else model(tokens, use_cache=False))[0].float()


def others(name: str, value: Any) -> Iterator[Any]:
    """Other values for a field."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (value * 2 if value else 0.5, value / 2 if isinstance(value, float) else value // 2)
    elif isinstance(value, str):
        yield from ["relu"] if "act" in name else []
    elif value is None:
        yield from (True, 0.5, 2)


def changing(folder: pathlib.Path, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with values that change the result."""
    plain, found = compute(folder, fields), {}
    known = CONFIG_MAPPING[fields["model_type"]].from_dict(copy.deepcopy(fields)).to_dict()
    for name, value in known.items():
        for other in others(name, value) if name not in LEFT_OUT else ():
            try:
                result = compute(folder, fields | {name: other})
            except Exception:  # the weights do not fit
                continue
            if result.shape != plain.shape or (result - plain).abs().max() > 1e-3 * plain.abs().max():
                found[name] = other
                break
    return found


def main() -> None:
    """Write the file."""
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    goldens = {}
    for file in sorted(FOLDER.glob("*/config.json")):
        fields = json.loads(file.read_text())
        if fields["model_type"] in CONFIG_MAPPING and "text_config" not in fields:
            try:
                goldens[file.parent.name] = changing(file.parent, fields)
            except RuntimeError as error:  # PyTorch's grouped products want other strides
                print(f"{file.parent.name}: {error}")
    (FOLDER / "fields.json").write_text(json.dumps(goldens, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
