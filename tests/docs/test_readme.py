"""README is short enough to be read."""

from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_readme_is_short():
    assert len(README.read_text().splitlines()) <= 200
