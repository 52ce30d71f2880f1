"""The streaming benchmark: its parts."""

import argparse

import pytest

from benchmarks.streaming.__main__ import PARTS, read_parts


def test_parts_are_chosen_by_name():
    assert read_parts("host,disk") == ["host", "disk"]
    with pytest.raises(argparse.ArgumentTypeError, match=f"unknown ssd; there are {', '.join(PARTS)}"):
        read_parts("host,ssd")
