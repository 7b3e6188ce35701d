"""Numbers and changes of a command line, whatever they are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import Refused
from lab.cli import refusals
from lab.cli.commands import Parser, number

FLAGS = st.from_regex(r"--[a-z][a-z-]{0,5}[a-z]", fullmatch=True)
WORDS = st.text(min_size=1, max_size=6).filter(
    lambda word: not word.startswith("-") and word not in ("with", "without", "in"))
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


@given(st.dictionaries(FLAGS, st.none() | st.lists(WORDS, max_size=2)))
def test_changes_are_read_as_they_are_said(changes):
    assert refusals.parsed(refusals.in_words(changes)) == changes


@given(st.dictionaries(FLAGS, st.none() | WORDS), st.lists(WORDS), st.dictionaries(
    FLAGS, st.none() | WORDS), st.booleans(), st.randoms())
def test_a_change_leaves_what_it_does_not_name(given, free, changes, joined, random):
    """given: {flag: its value, or None of one that takes none}."""
    parser = Parser("-m lab.spam")
    parser.add_argument("free", nargs="*")
    for flag, value in {**changes, **given}.items():
        parser.add_argument(flag, **{"action": "store_true"} if value is None else {})
    units = [[flag] if value is None else [f"{flag}={value}"] if joined else [flag, value]
             for flag, value in given.items()]
    units += [[word] for word in free]
    random.shuffle(units)
    argv = [word for unit in units for word in unit]
    parser.parse_args(["--", *free])  # the parser whose flags these are
    changes = {flag: value and [value] for flag, value in changes.items()}
    expected = [unit for unit in units if unit[0].partition("=")[0] not in changes]
    put = [[flag, *values] for flag, values in changes.items() if values is not None]
    assert refusals.changed(argv, changes) == [word for unit in expected + put for word in unit]
