"""Blocks of a docstring: which are tables, formulas or drawings, and what becomes of lines."""

import textwrap

from lab.page import typeset
from lab.page.source import Source


def table(text):
    """(head, rows) of a table in words, a cell's span behind it if it has one."""
    made = typeset.table_of(textwrap.dedent(text).strip("\n").splitlines())
    return made and [[cell.text + (f" ({cell.span})" if cell.span > 1 else "") for cell in row]
                     for row in [made.head, *made.rows]]


def test_columns_are_where_all_lines_have_two_blanks():
    assert table("""
                  rank 0     rank 1
        scatter   a0         a1        one deals
        barrier   nobody goes on
        gather    a0 b1      .         all give
        """) == [["", "rank 0", "rank 1", ""], ["scatter", "a0", "a1", "one deals"],
                 ["barrier", "nobody goes on (2)", ""], ["gather", "a0 b1", ".", "all give"]]


def test_a_line_goes_on_in_the_cell_above():
    assert table("""
        naive       forward, and what is a long sentence of many micro-
                    batches, which goes on
        ring        short
        """) == [[], ["naive", "forward, and what is a long sentence of many micro-batches, which "
                      "goes on"], ["ring", "short"]]
    assert table("""
        all_reduce   naive   N-1
                     tree    2 N
        """) == [[], ["all_reduce", "naive", "N-1"], ["", "tree", "2 N"]]


def test_drawings_commands_and_code_are_no_tables():
    for text in ("torchrun a.py     once\ntorchrun b.py     twice",
                 "a  | b\nc  | d", "0 1 2 3   one\n4 5 6 7   two", "FFFF....BW   x\n0123....00   y",
                 "x = f_of(y)   so\nx = f_of(z)   too", "one line     alone", "no columns\nat all"):
        assert table(text) is None, text


def test_letters_are_symbols_in_a_lesson_alone():
    source = Source('"""Title."""\n', "03_zero.html")
    lesson = typeset.typeset("Each of N ranks has 1/N of a unit, another unit.", source, {})
    assert '<i class="symbol" data-is="N-00">N</i> ranks' in lesson
    assert lesson.count('<span class="term" data-is="unit-03">unit</span>') == 1
    said = typeset.typeset("Each of N ranks has 1/N of a unit.", source)
    assert "of N ranks" in said and "<math>" in said and "term" not in said
