"""Stop strings: found where `str.find` finds them, and held back as long as they may still begin."""

from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.generation.engine.growing_text import BLOCK, GrowingText
from jaxinfer.generation.stop_strings import StopStrings

LETTERS = st.text("ab", max_size=6)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3).map(tuple)


def first_stop(text, stops, start=0):
    """The first place of a stop string in a text, and the string; None if there is none."""
    places = [(at, stop) for stop in stops if (at := text.find(stop, start)) >= 0]
    return min(places, key=lambda place: place[0], default=None)


@given(STOPS, st.lists(LETTERS, max_size=8))
def test_stop_strings_are_found_and_their_beginnings_counted(stops, pieces):
    found, text = StopStrings(stops), ""
    for piece in pieces:
        text += piece
        place = found.push(piece)
        expected = first_stop(text, stops)
        if expected is not None:
            assert place == (expected[0] - len(text) + len(piece), expected[1])
            return
        assert place is None
        ends = [
            size for size in range(len(text) + 1) if any(stop.startswith(text[len(text) - size :]) for stop in stops)
        ]
        assert found.num_begun == max(ends)


@given(STOPS, st.lists(LETTERS, max_size=12), st.integers(0, 12), st.booleans())
def test_a_text_ends_at_the_first_stop_string_after_those_that_may_not_end_it(stops, pieces, num_free, keeps_stop):
    text, whole, start = GrowingText(stops, keeps_stop=keeps_stop), "", 0
    for index, piece in enumerate(pieces):
        whole += piece
        stop = text.add(piece, may_stop=index >= num_free)
        if index < num_free:
            start = len(whole)
        expected = first_stop(whole, stops, start)
        if expected is not None:
            assert stop == expected[1]
            assert str(text) == whole[: expected[0] + len(stop) * keeps_stop]
            return
        assert (stop, str(text)) == (None, whole)


def test_a_text_is_in_blocks_of_which_none_changes():
    text, whole, seen = GrowingText(("xyz",)), "", []
    for index in range(1000):
        piece = f"{index} xy"
        assert text.add(piece) is None
        whole += piece
        assert str(text) == whole
        assert (text.num_held_back, len(text.end) <= BLOCK + 10) == (2, True)
        assert text.blocks[: len(seen)] == seen
        seen = list(text.blocks)
    assert len(seen) > 3
    assert text.add("z") == "xyz"
    assert str(text) == whole[:-2]


def test_each_character_is_compared_a_bounded_number_of_times():
    """Also in a text that begins stop strings again and again, and ends none."""

    class Counted(str):
        looks = 0

        def __getitem__(self, index):
            Counted.looks += 1
            return super().__getitem__(index)

    found = StopStrings(tuple(Counted(f"{'ab' * 500}{index}") for index in range(64)))
    assert found.push("ab" * 1000) is None
    Counted.looks = 0
    for _ in range(100):
        assert found.push("abababab") is None
    assert found.num_begun == 1000
    assert Counted.looks < 3 * 64 * 800
