"""Formulas in sentences: what is set, and what stays text."""

import re
from html import unescape

import pytest

from lab.page import formulas, glossary, reading, typeset


def known(name):
    return name in {*"SNBgptWheCsbkmnΨGΣPLKXUVMr", "Ψ'", "A_in", "lse", "out", "tokens", "lr",
                    "bandwidth", "parameters"}


def written(text, fractions=True):
    """Its MathML, without groups and attributes."""
    html = formulas.mathml(formulas.read(text, known), lambda name: "", fractions)
    html = re.sub(r"</?(mrow|math|mtext)>|<mspace[^>]*></mspace>", "", html)
    return re.sub(r"<(m\w+) [^>]*>", r"<\1>", html)


def test_a_formula_in_mathml():
    n_1 = "<mfrac><mi>N</mi><mo>−</mo><mn>1</mn><mi>N</mi></mfrac>"
    for text, expected in (
            ("S (N-1)/N", f"<mi>S</mi>{n_1}"),
            ("2 (N-1)/N · S / N", f"<mn>2</mn>{n_1}<mo>·</mo><mfrac><mi>S</mi><mi>N</mi></mfrac>"),
            ("h x 4h / t", "<mi>h</mi><mo>×</mo><mfrac><mn>4</mn><mi>h</mi><mi>t</mi></mfrac>")):
        assert written(text) == expected, text
    for text, expected in (
            ("(N-1)/N", "<mo>(</mo><mi>N</mi><mo>−</mo><mn>1</mn><mo>)</mo><mo>/</mo><mi>N</mi>"),
            ("2 log2 N", "<mn>2</mn><msub><mi>log</mi><mn>2</mn></msub><mi>N</mi>"),
            ("U V^T", "<mi>U</mi><msup><mi>V</mi>T</msup>"),
            ("√(L / A_in)", "<msqrt><mi>L</mi><mo>/</mo><msub><mi>A</mi>in</msub></msqrt>"),
            ("2mn <= 3 Ψ'", "<mn>2</mn><mi>m</mi><mi>n</mi><mo>≤</mo><mn>3</mn><mi>Ψ′</mi>")):
        assert written(text, False) == expected, text


def test_what_could_be_read_in_two_ways_stays_text():
    for text in ("x / t·C", "1/2n", "S / N / g", "2 N-1", "N 2", "a0", "2 tokens", "W bytes/s",
                 "h (dim)", "04", "1f1b", "(N", "N +", "= N", "N -1", "b-s-z", "mk nk", "2bw"):
        with pytest.raises(formulas.Unclear):
            formulas.read(text, known)
            pytest.fail(text)


def test_formulas_are_found_in_sentences():
    for text, found in (
            ("Each of N ranks sends 2 (N-1)/N · S a rank.", ["N", "2 (N-1)/N · S"]),
            ("on 8 ranks (W = 4), of t = 8, in 16 h² / (t·C) s",
             ["W = 4", "t = 8", "16 h² / (t·C)"]),
            ("(x = b·s·h, L blocks, a step)", ["L"]),  # no letter is called x
            ("A block, a rank, and to s / 2 B if it is", []),
            ("micro-batch, --k K blocks, C = 989e12", ["K", "C = 989e12"])):
        assert [piece for piece, node in formulas.runs(text, known) if node] == found


def test_the_symbols_of_a_file_are_those_that_it_uses():
    for name, source in reading.Course().sources.items():
        _, lesson = reading.title_of(source.doc)
        html = str(typeset.typeset(lesson, source, {})) + "".join(
            str(typeset.typeset(piece.said, source)) for piece in source.pieces)
        used = {unescape(one) for one in re.findall(r'data-is="([^"]*)"', html)}
        assert used == {one.id for one in (*glossary.listed(name), *glossary.words(name))}, name


def test_each_entry_of_the_glossary_names_a_place_that_is_there():
    everything = (*glossary.SYMBOLS, *glossary.TERMS)
    assert len({entry.id for entry in everything}) == len(everything)
    texts = {glossary.number_of(name): source for name, source in reading.Course().sources.items()}
    for entry in everything:
        file, _, function = entry.at.partition(" ")
        assert not function or function in {piece.name for piece in texts[file].pieces}, entry
        assert entry.files.keys() <= texts.keys(), entry


def test_a_letter_means_what_its_file_says():
    for name, file, text, means in (
            ("t", "04_tensor_parallel", "", True), ("t", "09_5d", "in units of t·h", True),
            ("t", "11_muon", "takes 6·t·m·n", True),
            ("t", "07_pipeline_parallel", "all t ranks", False),
            ("k", "09_5d", "k, v a stage kv heads", False)):
        assert bool(glossary.meaning(name, file, text)) == means, (name, file)
