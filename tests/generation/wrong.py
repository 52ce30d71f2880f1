"""Every type of JSON, for what callers give."""

from hypothesis import strategies as st

INTEGERS = st.one_of(
    st.integers(-3, 30), st.integers(), st.sampled_from((2**31, 2**32, 2**64, 10**30, -(10**30), 10**5000))
)
SCALARS = st.one_of(st.none(), st.booleans(), INTEGERS, st.floats(), st.text(max_size=5), st.just("\ud800"))
JSON = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=3),
    st.lists(st.integers(0, 30), min_size=1, max_size=20),
    st.dictionaries(st.text(max_size=3), SCALARS, max_size=3),
    st.dictionaries(st.integers(0, 30), st.floats(), min_size=1, max_size=3),
    st.lists(st.lists(SCALARS, max_size=2), max_size=2),
)
