"""Numbers of a command line, whatever they are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import Refused
from lab.run.commands import number

FINITE = st.floats(-1e9, 1e9)


@given(st.sampled_from([int, float]), st.tuples(FINITE, FINITE).map(sorted), st.one_of(
    st.text(max_size=8), st.integers().map(str), st.floats().map(str)))
def test_a_number_is_in_its_range_or_refused_in_a_line(kind, limits, text):
    try:
        value = number(kind, *limits, example=limits[0])(text)
    except Refused as refused:
        assert refused.args[1] == str(limits[0])
        with pytest.raises((ValueError, AssertionError)):
            assert limits[0] <= kind(text) < limits[1]
    else:
        assert value == kind(text) and limits[0] <= value < limits[1] and type(value) is kind
