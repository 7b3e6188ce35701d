"""Blocks of a docstring: which are tables, formulas or drawings, and what becomes of lines."""

import re
import textwrap

from lab.page import reading, typeset
from lab.page.source import Source

KINDS = {  # {file: its blocks, in order: t a table, f formulas, . a drawing, commands, or code}
    "00_collectives": "tt..", "01_single_gpu": "t.ttt.t", "02_data_parallel": ".ttfff.",
    "03_zero": "t..tft.", "04_tensor_parallel": ".t.tt..", "05_sequence_parallel": ".ttt.t",
    "06_context_parallel": "ff..tt.", "07_pipeline_parallel": ".ttf.",
    "08_expert_parallel": ".ttft.", "09_5d": "tttttttt.", "10_planner": "tt.", "11_muon": "ftt.",
    "lab/typecheck/duality": "tt.", "lab/typecheck/sharding": ".t", "kernels/elu": "ft.",
    "kernels/matmul": "t.t.", "kernels/layernorm": "f.tf", "kernels/rmsnorm": "ftf",
    "kernels/swiglu": "ftf", "kernels/grouped_matmul": "t", "kernels/flash_attention": ".f.ft",
    "kernels/fp8": "ftt", "lab/checkpoints/checkpoint": ".t",
}


def test_each_block_is_what_it_looks_like():
    found = {}
    for name, source in reading.Course().sources.items():
        here, kinds = typeset.Set(source), ""
        for said in (source.doc, *(piece.said for piece in source.pieces)):
            for indented, lines in typeset.blocks(said.splitlines()):
                html = here.block(lines) if indented else ""
                for table, drawing in re.findall(r'class="(formulas|aligned)"|<(pre)', html):
                    kinds += "." if drawing else {"formulas": "f", "aligned": "t"}[table]
        found[name] = kinds
    assert {name: kinds for name, kinds in found.items() if kinds} == KINDS


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
    assert table("""
        bytes per rank      parameters     gradients
        zero1                  P              G
        zero2                  P              G / N      and two units
        """) == [["bytes per rank", "parameters", "gradients", ""], ["zero1", "P", "G", ""],
                 ["zero2", "P", "G / N", "and two units"]]


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
    assert table("""
        type        on the ranks     since
        V varying   the same, and    each has
                    with it
        """) == [["type", "on the ranks", "since"], ["V varying", "the same, and with it",
                                                     "each has"]]


def test_drawings_commands_and_code_are_no_tables():
    for text in ("torchrun a.py     once\ntorchrun b.py     twice",
                 "a  | b\nc  | d", "0 1 2 3   one\n4 5 6 7   two", "FFFF....BW   x\n0123....00   y",
                 "x = f_of(y)   so\nx = f_of(z)   too", "one line     alone", "no columns\nat all",
                 "      x        y\na   1  22   3  4   b\nc   11  2   33  4  d"):
        assert table(text) is None, text


def test_what_is_in_a_cell_is_typeset():
    source = Source('"""Title."""\ndef f():\n    pass\n', "03_zero.html")
    html = typeset.typeset(
        "    zero1     `f`, of N ranks\n    zero2     chapter 04: P / N\n", source)
    assert html == (
        '<div class="wide"><table class="aligned"><tbody>'
        '<tr><th scope="row">zero1</th><td><code><a href="03_zero.html#f">f</a></code>, of N ranks'
        '</td></tr><tr><th scope="row">zero2</th><td>chapter '
        '<a href="04_tensor_parallel.html">04</a>: <math><mfrac>'
        '<mi data-is="P-03">P</mi><mi data-is="N-00">N</mi></mfrac></math></td></tr>'
        "</tbody></table></div>")


def test_formulas_stand_below_each_other():
    source = Source('"""Title."""\n', "06_context_parallel.html")
    html = typeset.typeset("    S  =  q·k          more\n       =  P\n", source)
    assert "<pre" in html                               # k is none here
    html = typeset.typeset("    S    =  q·v        the first,\n    P∘S  =  S\n", source)
    rows = re.findall(r"<td[^>]*>(.*?)</td>", re.sub(r"</?m[^>]*>| data-is=\"[^\"]*\"", "", html))
    assert rows == ["S", "=q·v", "the first,", "P∘S", "=S"]


def test_letters_are_symbols_in_a_lesson_alone():
    source = Source('"""Title."""\n', "03_zero.html")
    lesson = typeset.typeset("Each of N ranks has 1/N of a unit, another unit.", source, {})
    assert '<i class="symbol" data-is="N-00">N</i> ranks' in lesson
    assert lesson.count('<span class="term" data-is="unit-03">unit</span>') == 1
    said = typeset.typeset("Each of N ranks has 1/N of a unit.", source)
    assert "of N ranks" in said and "<math>" in said and "term" not in said
    assert "<math" not in typeset.typeset("Sources: A, which has N = 3.", source, {})


def test_a_chapter_is_linked_where_it_is_named_first():
    html = typeset.typeset("See chapter 04.\n\n    a | chapter 05\n\n    b | c\n\nIn chapters 04, "
                           "and chapter 05, and chapter 06.", Source('"""Title."""\n', "x.html"))
    assert re.findall(r'href="(\d\d)', html) == ["04", "05", "06"]
