"""The page of all families, which is written from the code and the tests."""

from benchmarks.families import FAMILIES, PAGE, STATE_DICTS, render


def test_the_page_is_true():
    """Otherwise: `python -m benchmarks.pages --write`."""
    assert render() in PAGE.read_text()


def test_every_family_has_the_names_of_its_models():
    families = [*dict.fromkeys(FAMILIES.values()), *STATE_DICTS]
    published = [name for family in families for name in family.published]
    assert all(family.published for family in families), [f.model_types for f in families if not f.published]
    assert len(published) == len({*published}), "two families have the same names: one was made from the other"
