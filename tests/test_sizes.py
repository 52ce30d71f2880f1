"""The sizes that programs are compiled for."""

import pytest

from jaxinfer.sizes import powers, round_up


def test_sizes_multiply_up_to_the_last():
    assert powers(2, 1, 8) == (1, 2, 4, 8)
    assert powers(2, 3, 10) == (3, 6, 10)
    assert powers(4, 16, 16) == (16,)


def test_a_size_is_rounded_up_to_one_that_holds_it():
    assert [round_up(n, (4, 8, 10)) for n in (1, 4, 5, 9, 10)] == [4, 4, 8, 10, 10]
    with pytest.raises(ValueError, match="11 is larger than the largest bucket, 10"):
        round_up(11, (4, 8, 10))
