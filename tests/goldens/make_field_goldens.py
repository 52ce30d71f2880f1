"""Writes `fields.json`: the fields of `config.json` whose values change what transformers computes, one at a time.

Run in an environment with PyTorch:

    python tests/goldens/make_field_goldens.py [GOLDEN...]

For each golden of a text model: the fields that its config class knows, those of `text_config` and `rope_parameters`
too, with another value that changes the result on the same weights. Sizes of weights are left out, as other values do
not fit; so are numbers of layers, whose weights would be random, and what is returned beside the logits.
"""

import copy
import json
import pathlib
import resource
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as SEEING

FOLDER = pathlib.Path(__file__).parent
MOST_MEMORY = 9 << 30
"""Bytes of addresses that a model may take: some values ask for more than a machine has."""
LEFT_OUT = {
    *("architectures", "dtype", "torch_dtype", "model_type", "transformers_version", "vision_config"),
    *("id2label", "label2id", "num_labels", "output_router_logits"),
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
}


def compute(folder: pathlib.Path, fields: dict[str, Any]) -> torch.Tensor:
    """Compute logits, or an encoder's hidden vectors, of the weights in a folder with these fields."""
    config = CONFIG_MAPPING[fields["model_type"]].from_dict(copy.deepcopy(fields))
    config._attn_implementation = "eager"
    encoder = fields["model_type"] in ("bert", "roberta", "distilbert")
    kind = (
        AutoModel
        if encoder
        else AutoModelForImageTextToText
        if fields["model_type"] in SEEING
        else AutoModelForCausalLM
    )
    options = {"dtype": torch.float32, "experts_implementation": "eager", "local_files_only": True}
    model = kind.from_pretrained(folder, config=config, **options).eval()
    tokens = torch.arange(5, 17)[None] % min(config.get_text_config().vocab_size, 50)
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


def paths(known: dict[str, Any], outer: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All fields with their values, those of inner objects too."""
    for name, value in known.items():
        if isinstance(value, dict):
            yield from paths(value, (*outer, name)) if name not in LEFT_OUT else ()
        elif name not in LEFT_OUT:
            yield (*outer, name), value


def with_value(fields: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Copy the fields, with one changed."""
    name, *inner = path
    return fields | {name: with_value(fields.get(name) or {}, tuple(inner), value) if inner else value}


def changing(folder: pathlib.Path, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with values that change the result."""
    plain, found = compute(folder, fields), {}
    known = CONFIG_MAPPING[fields["model_type"]].from_dict(copy.deepcopy(fields)).to_dict()
    for path, value in paths(known):
        for other in others(path[-1], value):
            try:
                result = compute(folder, with_value(fields, path, other))
            except Exception:  # the weights do not fit, or take too much memory
                continue
            if result.shape != plain.shape or (result - plain).abs().max() > 1e-3 * plain.abs().max():
                found["/".join(path)] = other
                break
    return found


def main() -> None:
    """Write the file anew, or what it has of the goldens that are named."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    target, names = FOLDER / "fields.json", sys.argv[1:]
    goldens = json.loads(target.read_text()) if names else {}
    for file in sorted(FOLDER.glob("*/config.json")):
        fields, name = json.loads(file.read_text()), file.parent.name
        if fields.get("model_type") in CONFIG_MAPPING and (not names or name in names):
            goldens[name] = changing(file.parent, fields)
    target.write_text(json.dumps(goldens, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
