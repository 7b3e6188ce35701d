"""Formulas: what is set, what stays text, and that no letter is lost."""

import re
import unicodedata
from html import unescape

import pytest

from lab.page import formulas, glossary, reading, typeset

COURSE = reading.Course()
FILES = pytest.mark.parametrize("name", COURSE.sources)
SET = {  # {file: formulas in its lesson and in what is said of its functions}
    "00_collectives": 28, "01_single_gpu": 26, "02_data_parallel": 17, "03_zero": 34,
    "04_tensor_parallel": 23, "05_sequence_parallel": 41, "06_context_parallel": 47,
    "07_pipeline_parallel": 66, "08_expert_parallel": 13, "09_5d": 34, "10_planner": 13,
    "11_muon": 36, "kernels/elu": 14, "kernels/matmul": 12, "kernels/layernorm": 14,
    "kernels/rmsnorm": 15, "kernels/swiglu": 22, "kernels/flash_attention": 29, "kernels/fp8": 13,
    "lab/checkpoints/checkpoint": 1,
}


def known(name):
    return name in {*"SNBgptWheCsbkmnΨGΣPLKXUVMr", "Ψ'", "A_in", "lse", "out", "tokens", "lr",
                    "bandwidth", "parameters"}


def test_every_formula_is_set_as_it_was_read():
    found = {name: both(source).count("<math") for name, source in COURSE.sources.items()}
    assert {name: count for name, count in found.items() if count} == SET


def both(source):
    """The lesson, and what is said of functions."""
    _, lesson = reading.title_of(source.doc)
    return str(typeset.typeset(lesson, source, {})) + "".join(
        str(typeset.typeset(piece.said, source)) for piece in source.pieces)


def written(text, fractions=True):
    """Its MathML, without groups."""
    html = formulas.mathml(formulas.read(text, known), lambda name: "", fractions)
    return re.sub(r"</?mrow>|<mspace[^>]*></mspace>| stretchy=false", "", html)


def test_a_fraction_has_what_belongs_to_it():
    n_1 = "<mfrac><mi>N</mi><mo>−</mo><mn>1</mn><mi>N</mi></mfrac>"
    assert written("S (N-1)/N") == f'<math><mi>S</mi>{n_1}</math>'
    assert written("2 (N-1)/N · S / bandwidth").endswith(
        f'<mn>2</mn>{n_1}<mo>·</mo><mfrac><mi>S</mi><mi class="word">bandwidth</mi></mfrac></math>')
    assert written("4 · b / FLOP/s").endswith(
        "<mfrac><mn>4</mn><mo>·</mo><mi>b</mi><mtext>FLOP/s</mtext></mfrac></math>")
    assert written("h x 4h / t").endswith(
        "<mi>h</mi><mo>×</mo><mfrac><mn>4</mn><mi>h</mi><mi>t</mi></mfrac></math>")
    assert written("(N-1)/N", fractions=False) == (
        "<math><mo>(</mo><mi>N</mi><mo>−</mo><mn>1</mn><mo>)</mo>"
        "<mo lspace=0 rspace=0>/</mo><mi>N</mi></math>")


def test_signs_indices_and_functions():
    assert written("dS = P∘(dP - Σ P∘dP)", False) == (
        "<math><mi>d</mi><mi>S</mi><mo>=</mo><mi>P</mi><mo>∘</mo><mo>(</mo><mi>d</mi><mi>P</mi>"
        "<mo>−</mo><mo>∑</mo><mi>P</mi><mo>∘</mo><mi>d</mi><mi>P</mi><mo>)</mo></math>")
    assert written("B = tr(Σ) / |G|²", False) == (
        '<math><mi>B</mi><mo>=</mo><mi class="word">tr</mi><mo>(</mo><mi>Σ</mi><mo>)</mo>'
        "<mo lspace=0 rspace=0>/</mo>"
        "<msup><mo>|</mo><mi>G</mi><mo>|</mo><mn>2</mn></msup></math>")
    assert written("2 log2 N", False) == (
        '<math><mn>2</mn><msub><mi class="word">log</mi><mn>2</mn></msub><mi>N</mi></math>')
    assert written("exp(lse₁)·U V^T", False) == (
        '<math><mi class="word">exp</mi><mo>(</mo><msub><mi class="word">lse</mi><mn>1</mn></msub>'
        "<mo>)</mo><mo>·</mo><mi>U</mi><msup><mi>V</mi><mtext>T</mtext></msup></math>")
    assert written("√(L / A_in)", False) == (
        "<math><msqrt><mi>L</mi><mo lspace=0 rspace=0>/</mo>"
        "<msub><mi>A</mi><mtext>in</mtext></msub></msqrt></math>")
    assert written("2mkn <= 3 M Ψ'", False) == (
        "<math><mn>2</mn><mi>m</mi><mi>k</mi><mi>n</mi><mo>≤</mo><mn>3</mn><mi>M</mi>"
        "<mi>Ψ′</mi></math>")


@pytest.mark.parametrize("text", [
    "x / t·C", "1/2n", "S / N / g", "2 N-1", "N 2", "a0", "2 tokens", "W bytes/s", "h (dim)", "04",
    "1f1b", "(N", "N)", "N +", "= N", "N -1", "y · N", "b-s-z", "mk nk", "- m", "2bw"])
def test_what_could_be_read_in_two_ways_stays_text(text):
    with pytest.raises(formulas.Unclear):
        formulas.read(text, known)


def found(text):
    return [piece for piece, node in formulas.runs(text, known) if node]


def test_formulas_are_found_in_sentences():
    assert found("Each of N ranks sends 2 (N-1)/N · S a rank.") == ["N", "2 (N-1)/N · S"]
    assert found("(x = b·s·h, L blocks, a step)") == ["L"]          # x is none here
    assert found("on 8 ranks (W = 4), of t = 8, in 16 h² / (t·C) s") == [
        "W = 4", "t = 8", "16 h² / (t·C)"]
    assert found("A block, a rank, and to s / 2 B if it is") == []
    assert found("tokens of 3 parameters") == []
    assert found("micro-batch, --k K blocks, C = 989e12") == ["K", "C = 989e12"]


@FILES
def test_no_letter_of_a_formula_is_lost(name):
    here = typeset.Set(COURSE.sources[name])
    for said in (here.source.doc, *(piece.said for piece in here.source.pieces)):
        text = " ".join(said.split())
        for piece, node in formulas.runs(text, here.known(text)):
            if node:
                for fractions in (True, False):
                    html = formulas.mathml(node, here.mark(text), fractions)
                    assert plain(unescape(re.sub(r"<msqrt>", "sqrt", html))) == plain(
                        piece.replace("√", "sqrt")), piece


def plain(text):
    text = re.sub(r"<[^>]*>", "", text).replace("×", "x").replace("∑", "Σ")
    return re.sub(r"[\W_]", "", unicodedata.normalize("NFKC", text))


# ---------------------------------------------------------------------------------------- glossary

@FILES
def test_each_symbol_of_a_file_is_used_there(name):
    """Each that is used has an entry, since a formula is read by these."""
    html = both(COURSE.sources[name])
    used = {unescape(one) for one in re.findall(r'data-is="([^"]*)"', html)}
    assert used == {entry.id for entry in (*glossary.listed(name), *glossary.words(name))}


def test_each_symbol_stands_where_it_is_defined():
    everything = (*glossary.SYMBOLS, *glossary.TERMS)
    assert len({entry.id for entry in everything}) == len(everything)
    texts = {glossary.number_of(name): source for name, source in COURSE.sources.items()}
    for entry in everything:
        file, _, function = entry.at.partition(" ")
        said = {piece.name: piece.said for piece in texts[file].pieces}
        text = said[function] if function else texts[file].doc
        assert re.search(rf"(?<![A-Za-z]){re.escape(entry.name)}(?![A-Za-z])", text) or re.search(
            rf"\d{entry.name}|{entry.name}\d|[a-z]{entry.name}\b", text), entry
        assert entry.files.keys() <= texts.keys(), entry


@pytest.mark.parametrize("name, file, text, meaning", [
    ("t", "04_tensor_parallel", "", "ranks of tensor parallelism"),
    ("t", "09_5d", "in units of t·h", "tokens of the batch for each GPU"),
    ("t", "11_muon", "takes 6·t·m·n", "tokens of a step"),
    ("t", "11_muon", "sends (t-1)/t · m·n", "ranks of tensor parallelism"),
    ("t", "07_pipeline_parallel", "all t ranks", None),
    ("p", "03_zero", "", "bytes of a parameter"),
    ("p", "07_pipeline_parallel", "", "ranks of a pipeline"),
    ("W", "07_pipeline_parallel", "with W(t-1) in", "a stage's weights after so many batches"),
    ("k", "09_5d", "k, v a stage kv heads", None),
    ("B", "kernels-elu.html", "", "bytes of a number"),
])
def test_a_letter_means_what_its_file_says(name, file, text, meaning):
    entry = glossary.meaning(name, file, text)
    assert (entry and entry.meaning) == meaning
