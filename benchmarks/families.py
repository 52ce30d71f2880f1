"""The page docs/families.md: which families there are, what works with each, and which fields are refused.

Nothing of it is written by hand: families are those of `FAMILIES` and `STATE_DICTS`, features those whose tests run for
a family's goldens (`tests/models/goldens.py`), and refused fields what `Fields.expect` is asked for when the goldens
are read. `python -m benchmarks.pages --write` writes the page, and `tests/benchmarks/test_families_page.py` checks it.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.prose import wrapped
from benchmarks.report import ROOT
from jaxinfer.models.config import ModelConfig, VisionConfig, kind_of
from jaxinfer.models.families import FAMILIES, REFUSED, STATE_DICTS, Family
from jaxinfer.models.families.fields import Fields, surveyed
from jaxinfer.models.files.conversion import HuggingFaceModel

PAGE = ROOT / "docs/families.md"
BEGIN = "<!-- Written by `python -m benchmarks.pages --write`, from the families and their tests. -->"
END = "<!-- End of what benchmarks.families writes. -->"

GGUF = "GGUF"
"""The feature that few families have."""


@dataclasses.dataclass(frozen=True)
class Golden:
    """A tiny model of a family: its config, and the fields of `config.json` that only one value is implemented of."""

    model_type: str
    config: ModelConfig
    expected: Mapping[str, object]


def render() -> str:
    """Write the tables and the markers around them."""
    families = tuple(dict.fromkeys((*FAMILIES.values(), *STATE_DICTS)))
    images = [family for family in families if isinstance(_kind(family), VisionConfig)]
    rows = [_row(family) for family in families if family not in images]
    refused = [line for family in families if (line := _refused(family))]
    parts = [
        BEGIN,
        "## Text",
        wrapped(
            f"A family works with all of these, except for what its row names under *except*: {', '.join(_common())}. "
            f"*{GGUF}* says whether GGUF files of the family can be read."
        ),
        _table(["family", "`model_type`", "kind", "except", GGUF], rows),
        "## Images",
        _table(["family", "`model_type`", "kind"], [_names(family) for family in images]),
        "## Refused fields",
        wrapped(
            f"Every `config.json` is refused for {_others(expected_always())}. It is also refused for "
            "another `is_causal` than its family's, an activation, "
            "a kind of layer or a rope type that is not implemented. Some families refuse fields that depend on "
            "others. In addition:"
        ),
        "\n".join(refused),
        "## Refused families",
        "These families are known, but not supported; each names the missing parts:",
        "\n".join(wrapped(f"- `{name}`: {', '.join(missing)}.", indent=2) for name, missing in REFUSED.items()),
        END,
    ]
    return "\n\n".join(parts)


def _names(family: Family) -> list[str]:
    types = ", ".join(f"`{name}`" for name in family.model_types) if family in FAMILIES.values() else ""
    return [", ".join(family.published), types, kind_of(_kind(family)).replace("_", " ")]


def _row(family: Family) -> list[str]:
    names = [name for name, golden in _goldens().items() if golden.model_type in family.model_types]
    works = {feature for feature, goldens in _features().items() if all(name in goldens for name in names)}
    exceptions = ", ".join(feature for feature in _common() if feature not in works)
    return [*_names(family), exceptions, "yes" if GGUF in works else ""]


def _refused(family: Family) -> str:
    first, *others = (golden.expected for golden in _goldens().values() if golden.model_type in family.model_types)
    own = {
        name: value
        for name, value in first.items()
        if name not in expected_always() and all(name in other and other[name] == value for other in others)
    }
    return wrapped(f"- {family.published[0]}: {_others(own)}.", indent=2) if own else ""


def _others(fields: Mapping[str, object]) -> str:
    return ", ".join(f"`{name}` other than `{value!r}`" for name, value in fields.items())


def _kind(family: Family) -> ModelConfig:
    return next(golden.config for golden in _goldens().values() if golden.model_type in family.model_types)


def expected_always() -> dict[str, object]:
    """The fields that every config is refused for."""
    with surveyed() as survey:
        Fields({})
    return survey.expected


def _common() -> list[str]:
    """The features that most families work with."""
    return [feature for feature in _features() if feature != GGUF]


def _features() -> Mapping[str, Sequence[str]]:
    from tests.models.goldens import FEATURES

    return FEATURES


@functools.cache
def _goldens() -> dict[str, Golden]:
    """Read all goldens, by name."""
    from tests.models import goldens, vision

    read = {}
    for folder in (
        *(goldens.DIRECTORY / name for name in goldens.NAMES),
        *(vision.DIRECTORY / name for name in vision.GOLDENS),
    ):
        with surveyed() as survey:
            model = HuggingFaceModel(folder)
        read[folder.name] = Golden(model.model_type, model.config, survey.expected)
    return read


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
