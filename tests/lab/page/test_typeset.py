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


def test_what_is_in_a_cell_is_typeset():
    source = Source('"""Title."""\ndef f():\n    pass\n', "03_zero.html")
    html = typeset.typeset(
        "    zero1     `f`, of N ranks\n    zero2     chapter 04: P / N\n", source)
    assert '<th scope="row">zero1</th>' in html and "of N ranks</td>" in html
    assert '<code><a href="03_zero.html#f">f</a></code>' in html
    assert '<a href="04_tensor_parallel.html">04</a>: <math><mfrac>' in html


def test_letters_are_symbols_in_a_lesson_alone():
    source = Source('"""Title."""\n', "03_zero.html")
    lesson = typeset.typeset("Each of N ranks has 1/N of a unit, another unit.", source, {})
    assert '<i class="symbol" data-is="N-00">N</i> ranks' in lesson
    assert lesson.count('<span class="term" data-is="unit-03">unit</span>') == 1
    said = typeset.typeset("Each of N ranks has 1/N of a unit.", source)
    assert "of N ranks" in said and "<math>" in said and "term" not in said


def test_a_tool_plays_behind_the_table_that_its_paragraph_introduces():
    source, block = Source("", "00_collectives.html"), "\n\n    one   two\n    1     2\n\nMore."
    for first, order in ("Look, here:", "here two PLAYS More"), ("Look.", "Look PLAYS two More"):
        html = str(typeset.typeset(first + block, source, {"Look": "PLAYS"}))
        places = [html.index(word) for word in order.split()]
        assert places == sorted(places)
    for text in "Look, here:", "Look, here:\n\nMore.":
        assert str(typeset.typeset(text, source, {"Look": "PLAYS"})).count("PLAYS") == 1
