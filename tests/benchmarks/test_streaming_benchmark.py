"""The streaming benchmark: its parts."""

import argparse

import pytest

main = pytest.importorskip("benchmarks.streaming.__main__", reason="needs the extra `bench`")


def test_parts_are_chosen_by_name():
    assert main.read_parts("host,disk") == ["host", "disk"]
    with pytest.raises(argparse.ArgumentTypeError, match=f"unknown ssd; there are {', '.join(main.PARTS)}"):
        main.read_parts("host,ssd")
