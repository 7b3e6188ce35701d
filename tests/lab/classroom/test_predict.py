"""lab.predict: its questions are answered right by what it shows, and by what runs measure."""

import io
import random
import re
import sys

import pytest

from lab import chapters
from lab import predict as command
from lab.chapters.question import Question, draw_questions
from lab.classroom import predict
from tests.conftest import FULL, run_main

PLANNER = "10_planner"  # which runs nothing


def dialogue(monkeypatch, capsys, typed, *flags):
    """Exit status, stdout and stderr of the command, after this was typed."""
    data = typed if isinstance(typed, bytes) else typed.encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    try:
        status = command.main(list(flags))
    except SystemExit as leaving:
        status = leaving.code
    return status, *capsys.readouterr()


def test_every_derivation_gives_what_the_chapter_gives():
    """On any sizes; and no answer is 0, of which 2% is nothing."""
    for name in chapters.NAMES:
        for seed in range(40 if FULL else 10):
            case, asked = draw_questions(name, seed)
            assert len(asked) == 5
            for question in asked:
                by_hand = predict.computed(predict.in_numbers(question, case.sizes))
                said = f"{case.command}: {question.formula} is {by_hand}, not {question.value}"
                assert by_hand == pytest.approx(question.value, rel=1e-9) and by_hand > 0, said


def test_what_it_shows_is_right_and_half_as_much_more_is_wrong(monkeypatch, capsys):
    """The values as they are printed, with their units; and the printed arithmetic as well."""
    for name in chapters.NAMES:
        flags, (case, asked) = (name[:2], "--seed=1"), draw_questions(name, 1)
        derivations = [predict.derivation(question, case.sizes) for question in asked]
        status, output, errors = dialogue(monkeypatch, capsys, "\n" * 5, *flags)
        assert (status, errors) == (0, "") and "\n0 of 5. " in output
        assert all(derivation in output for derivation in derivations)

        shown = [derivation.replace("\n   = ", " = ").split(" = ") for derivation in derivations]
        for typed in [value for *_, value in shown], [arithmetic for _, arithmetic, _ in shown]:
            status, output, _ = dialogue(monkeypatch, capsys, "\n".join(typed), *flags)
            assert status == 0 and "\n5 of 5. " in output and output.count("✓") == 5, output

        wrong = [re.sub(r"^[\d.,]+", r"1.5*\g<0>", value) for *_, value in shown]
        status, output, _ = dialogue(monkeypatch, capsys, "\n".join(wrong), *flags)
        assert status == 0 and "\n0 of 5. " in output and output.count("✗") == 5, output
        assert all(derivation in output for derivation in derivations)


def measured(record, name):
    """Of a run: what a row of its report shows."""
    axes = record["recorded"].get("axes", {})
    if name in axes:
        return axes[name]["wire_bytes"]
    return next(check["measured"] for check in record["checks"] if check["name"] == name)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in chapters.NAMES if name != PLANNER])
def test_a_run_of_these_sizes_measures_it(ranks, tmp_path, name):
    """The command that is shown, of the first seed with small sizes; each row that is named."""
    for seed in range(100):
        case, asked = draw_questions(name, seed)
        shown = [question for question in asked if question.row]
        if case.ranks in (1, 4, 8 * (name == "09_5d")) and case.cfg.dim <= 64 and len(shown) > 1:
            break
    flags = [word for word in case.command.split() if re.match("--(?!nproc)", word)]
    flags = [*flags, "--device=cpu", *["--no-verify"] * chapters.trains(name)]
    [(status, record, output), *_] = ranks(case.ranks)(run_main, name, flags, str(tmp_path))
    assert status == 0, output
    for question in shown:
        total = sum(measured(record, row) for row in question.row.split(" + "))
        assert total == pytest.approx(question.value, rel=1e-5), question


# --------------------------------------------------------------------- what is understood


UNDERSTOOD = {
    "B": {"4.87MB": 4.87e6, " 3 kb ": 3e3, "2 MiB": 2**21, "7 bytes": 7, "811,008 B": 811008,
          "= 5 kB": 5e3, "2 · (4-1)/4 · 811,008 · 4 B": 4866048, "-2^10 B": -1024},
    "calls": {"1 call": 1}, "numbers": {"0.8 M": 8e5}, "tokens": {"2k tokens": 2e3},
    "FLOP": {"1 MFLOPs": 1e6}, "s": {"162 µs": 162e-6, "2·(5e-06 + 800/50e9) seconds": 1.0032e-5},
    "times": {"2": 2, "x2": 2, "× 1.5": 1.5, "2 times": 2, "1/2": 0.5, "150%": 1.5},
    "%": {"37.5 %": 0.375, "3/8": 0.375},
}
NOT_UNDERSTOOD = {  # and what is named
    "B": {"MB": "number", "4.87": "unit", "4.87 Mb": "unit", "1/0 B": "number",
          "9**9**9 B": "number", "1e300 TB": "large", "nan B": "number", "4,87 MB": "number",
          "__import__('os').getpid() B": "number", "\x1b[31m5 B": r"'\x1b[31m5 B'"},
    "calls": {"5 MB": "unit", "1+" * 5000 + "1": "long"}, "times": {"(" * 150: "number"},
}


def test_an_answer_is_understood_or_told_why_not():
    """In one line. None of them takes long."""
    for unit, answers in UNDERSTOOD.items():
        for line, value in answers.items():
            found = predict.understood(f"{line}\n", unit)
            assert found == pytest.approx(value, rel=1e-12), line
    for unit, answers in NOT_UNDERSTOOD.items():
        for line, named in answers.items():
            with pytest.raises(ValueError) as raised:
                predict.understood(line, unit)
            assert named in str(raised.value) and str(raised.value).isprintable(), line


def test_right_is_within_two_percent_and_a_ratio_is_said_but_no_cause():
    """Small counts are exact. A ratio that is the number of ranks may be chance."""
    for unit, value, right, wrong in [("B", 1000, (981, 1019), (979, 1021, -1000, 0)),
                                      ("calls", 101, (101, 100.6), (100, 102)),
                                      ("tokens", 4396, (4400, 4320), (4300, 4500))]:
        question = Question("", "", value, unit, "")
        assert all(predict.is_right(answer, question) for answer in right), unit
        assert not any(predict.is_right(answer, question) for answer in wrong), unit
    for unit, value, line, said in [
            ("B", 1.25e6, "4*1.25 MB", "4 times too large"),
            ("B", 1.25e6, "-4 B", "too small"), ("times", 1.25, "x0.8", "1.56 times too small")]:
        question = Question("", "", value, unit, "")
        assert predict.off_by(predict.understood(line, unit), question) == said


# ------------------------------------------------------------------------------- the dialogue


def test_any_input_comes_to_an_end(monkeypatch, capsys):
    """Also one that goes on for ever with what cannot be read: five lines for a question."""
    _, output, _ = dialogue(monkeypatch, capsys, "y\n" * 100, "07", "--seed=1")
    assert output.count("'y'") == 25 and "\n0 of 5. " in output
    junk = b"\n".join(random.Random(0).randbytes(60) for _ in range(30))
    status, output, errors = dialogue(monkeypatch, capsys, junk, "04", "--seed=3")
    assert (status, errors) == (0, "") and " of 5. " in output
    assert all(c.isprintable() or c == "\n" for c in output)
    monkeypatch.setattr(sys, "stdin", None)  # closed, by `<&-`
    assert command.main(["01"]) == 0 and "\n0 of 5. " in capsys.readouterr().out


@pytest.mark.parametrize(("flags", "named", "works"), [
    (["12"], "'12'", "04"), ([], "CHAPTER", "with 04"), (["04", "--seed=-1"], "--seed", "1")])
def test_a_bad_argument_costs_a_line(monkeypatch, capsys, flags, named, works):
    status, output, errors = dialogue(monkeypatch, capsys, "", *flags)
    assert (status, output) == (2, "") and errors.startswith("error: ")
    assert errors.count("\n") == 1 and named in errors and works in errors
