"""Every type of JSON, for what callers give."""

from hypothesis import strategies as st

INTEGERS = st.one_of(
    st.integers(-3, 30), st.integers(), st.integers(31, 20_000).map(lambda bits: -(2**bits) if bits % 2 else 2**bits)
)
SCALARS = st.one_of(st.none(), st.booleans(), INTEGERS, st.floats(), st.text(max_size=5), st.just("\ud800"))
JSON = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=3),
    st.lists(st.integers(0, 30), min_size=1, max_size=20),
    st.lists(INTEGERS, min_size=1, max_size=3),
    st.dictionaries(INTEGERS, SCALARS, min_size=1, max_size=2),
    st.dictionaries(st.text(max_size=3), SCALARS, max_size=3),
    st.dictionaries(st.integers(0, 30), st.floats(), min_size=1, max_size=3),
    st.lists(st.lists(SCALARS, max_size=2), max_size=2),
)
