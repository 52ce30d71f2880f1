"""The family that docs/adding-a-family.md shows is one of ours, in full."""

from pathlib import Path

from jaxinfer.models.families import FAMILIES, starcoder2
from tests.docs.snippets import ROOT, read_blocks


def test_the_example_is_the_file_and_short():
    page = Path("docs/adding-a-family.md")
    code = Path(starcoder2.__file__).read_text()
    assert code in [block.code for block in read_blocks(page, (ROOT / page).read_text())]
    names_in_init = 2
    assert len(code.splitlines()) + names_in_init < 80
    assert FAMILIES["starcoder2"] is starcoder2.FAMILY
