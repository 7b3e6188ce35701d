"""What texts get wrong: their number follows from what they assume, and ours is different."""

import pytest

from lab.sources import SOURCES
from lab.sources.contradictions import CONTRADICTIONS


def test_what_is_told_follows_from_what_is_assumed_and_ours_is_different():
    sources = {source.number for source in SOURCES}
    for entry in CONTRADICTIONS:
        where = entry.source, entry.where
        assert entry.assumed() == pytest.approx(entry.told, rel=1e-12, abs=entry.error), where
        assert abs(entry.ours() - entry.told) > 4 * entry.error, where
        assert entry.ours() != entry.told and entry.source in sources, where


def test_ours_are_the_numbers_of_the_words():
    """In the order of the table."""
    ours = [entry.ours() for entry in CONTRADICTIONS]
    assert ours == pytest.approx([
        0.009, 34, 0.973, 1923, 0.94, 5.64e9, 9, 2, 1.75e9, 450e9, 3 / 16, 3.25, 1 / 8, 9, 2 / 8,
        7 / 16, 2048, 12.06, 24576, 130.4, 89.7, 13.69, 2550 / 16, 73440, 4, 2.27, 1, 0.668,
        2.96, 16, 870], rel=6e-3)
