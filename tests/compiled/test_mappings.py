"""Memory mappings are counted before programs might have no room."""

import pytest

from jaxinfer.compiled import MappingsError, check_mappings, mappings


@pytest.fixture
def used(tmp_path, monkeypatch):
    """A function that sets how many of 10,000 mappings the process has; at first none, and none were counted."""
    maps, limit = tmp_path / "maps", tmp_path / "limit"
    limit.write_text("10000\n")
    monkeypatch.setattr(mappings, "_MAPS", maps)
    monkeypatch.setattr(mappings, "_LIMIT", limit)
    monkeypatch.setattr(mappings, "_sure", 0)

    def set_used(count):
        maps.write_bytes(b"7f00-7f01 rw-p\n" * count)

    set_used(0)
    return set_used


def test_a_process_with_too_many_compiles_no_more(used):
    used(9_001)
    for _ in range(2):
        with pytest.raises(MappingsError, match=r"9,001 memory mappings, and Linux ends it at 10,000"):
            check_mappings()


def test_they_are_counted_again_before_a_program_might_have_no_room(used):
    used(5_000)
    check_mappings()  # this program and another one of 2,000 have room
    used(9_001)
    check_mappings()
    with pytest.raises(MappingsError):
        check_mappings()


def test_where_linux_does_not_tell_programs_are_compiled(used, tmp_path):
    (tmp_path / "limit").unlink()
    used(100_000)
    check_mappings()
