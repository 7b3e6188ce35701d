"""lab.predict: its questions are answered right by what it shows, and by what runs measure."""

import io
import json
import os
import random
import re
import shlex
import sys

import pytest

from lab import chapters
from lab.classroom import predict, questions
from lab.planner import planning
from tests.conftest import chapter, run_main

PLANNER = "10_planner"  # which runs nothing
EVERY = pytest.mark.parametrize("name", chapters.NAMES)


def dialogue(monkeypatch, capsys, typed, *flags):
    """Exit status, stdout and stderr of the command, after this was typed."""
    data = typed if isinstance(typed, bytes) else typed.encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    try:
        status = predict.main(list(flags))
    except SystemExit as leaving:
        status = leaving.code
    return status, *capsys.readouterr()


@EVERY
def test_every_derivation_gives_what_the_chapter_gives(name):
    """On any sizes; and no answer is 0, of which 2% is nothing."""
    seen = set()
    for seed in range(40):
        case, asked = questions.questions(name, seed)
        assert len(asked) == 5
        for question in asked:
            by_hand = predict.computed(predict.in_numbers(question, case.sizes))
            said = f"{case.command}: {question.formula} is {by_hand}, not {question.value}"
            assert by_hand == pytest.approx(question.value, rel=1e-9) and by_hand > 0, said
            seen.add(question.value)
    assert len(seen) > 30


@EVERY
@pytest.mark.parametrize("seed", [1, 2])
def test_what_it_shows_is_right_and_half_as_much_more_is_wrong(monkeypatch, capsys, name, seed):
    """The values as they are printed, with their units; and the printed arithmetic as well."""
    flags, (case, asked) = (name[:2], f"--seed={seed}"), questions.questions(name, seed)
    derivations = [predict.derivation(question, case.sizes) for question in asked]
    status, output, errors = dialogue(monkeypatch, capsys, "\n" * 5, *flags)
    assert (status, errors) == (0, "") and "\n0 of 5. " in output
    assert all(f"The answer:\n   {derivation}\n" in output for derivation in derivations)

    shown = [derivation.replace("\n   = ", " = ").split(" = ") for derivation in derivations]
    for typed in [value for *_, value in shown], [arithmetic for _, arithmetic, _ in shown]:
        status, output, _ = dialogue(monkeypatch, capsys, "\n".join(typed), *flags)
        assert status == 0 and "\n5 of 5. " in output and output.count("✓") == 5, output

    wrong = [re.sub(r"^[\d.,]+", r"1.5*\g<0>", value) for *_, value in shown]
    status, output, _ = dialogue(monkeypatch, capsys, "\n".join(wrong), *flags)
    assert status == 0 and "\n0 of 5. " in output and output.count("✗") == 5, output
    for *_, right in shown:
        assert f"\n   {right}" in output or f" = {right}\n" in output  # beside what was wrong


def measured(record, name):
    """Of a run: what a row of its report shows."""
    axes = record["recorded"].get("axes", {})
    if name in axes:
        return axes[name]["wire_bytes"]
    return next(check["measured"] for check in record["checks"] if check["name"] == name)


@pytest.mark.parametrize("name", [
    name if name[:2] in ("00", "02", "08") else pytest.param(name, marks=pytest.mark.full)
    for name in chapters.NAMES if name != PLANNER
])  # fmt: skip
def test_a_run_of_these_sizes_measures_it(ranks, tmp_path, name):
    """The command that is shown, of the first seed with small sizes; each row that is named."""
    for seed in range(100):
        case, asked = questions.questions(name, seed)
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


def test_the_planner_plans_what_its_questions_are_about(capsys, tmp_path):
    """The command that is shown fits, and leaves nothing to search; bubble and tp are about its."""
    for seed in range(10 if os.environ.get("FULL") else 3):
        case, asked = questions.questions(PLANNER, seed)
        _, _, of_bubble, of_tp, _ = asked
        words, file = shlex.split(case.command)[2:], tmp_path / "plan.json"
        double = {"--tp": 2 * case.layout.tp}
        changed = [str(double.get(flag, word)) for flag, word in zip(["", *words], words)]
        plans = []
        for argv in words, changed:
            assert planning.main(chapter(PLANNER), [*argv, f"--json={file}"]) == 0
            plans.append(json.loads(file.read_text()))
        assert [len(plan["found"]) for plan in plans] == [1, 1]
        assert "may" not in capsys.readouterr().out
        seconds, of_more = (plan["time"] for plan in plans)
        passes = sum(seconds[cause] for cause in seconds.keys() - {"bubble", "dp", "optimizer"})
        assert seconds["bubble"] / passes == pytest.approx(of_bubble.value, rel=0.35)   # no head
        assert of_more["tp"] > seconds["tp"] and of_tp.value > 2        # time also hides, and hops


def test_the_lesson_of_chapter_10_by_hand():
    """Of Llama 3 405B: 18 bytes of each parameter do not fit 91 H100s."""
    case = chapters.rooms_with("predictions")["10"].Planned("405b", 16, tp=8, pp=16, v=2, m=32)
    assert case.sizes["Ψ"] == pytest.approx(405.9e9, rel=1e-3) and case.sizes["G"] == 2048
    assert 91 < case.states(dp=1) / 80e9 < 92
    assert case.states(dp=2048, zero=1) == pytest.approx((6 + 12 / 2048) * 405.9e9, rel=1e-3)
    assert case.command == (
        "python 10_planner.py --model 405b --gpus 2048 --batch 512 --tp 8 --pp 16 --v 2 --cp 1 "
        "--micro-batch 1 --zero 1 --recompute full")


def test_the_lesson_of_chapter_02_by_hand():
    """Of a small model on four ranks, from the table in its lesson."""
    case = questions.Case("02_data_parallel", 4, "N", layers=2, dim=32, heads=4, kv_heads=2, seq=16,
                          batch=4)  # fmt: skip
    numbers = 2 * (10 * 32**2 + 2 * 32 * 16 + 4 * 32) + 2 * 32 + 2 * 256 * 32
    assert case.sizes["Ψ"] == numbers and case.sizes["M"] == 1
    assert case.states({"parameters": numbers}) == 16 * numbers + 4 * 24


# --------------------------------------------------------------------- what is understood


@pytest.mark.parametrize(("line", "unit", "value"), [
    ("4.87 MB", "B", 4.87e6), ("4.87MB", "B", 4.87e6), (" 3 kb ", "B", 3e3), ("2 MiB", "B", 2**21),
    ("1 GiB", "B", 2**30), ("1 KiB", "B", 1024), ("1.5 GB", "B", 1.5e9), ("7 bytes", "B", 7),
    ("811,008 B", "B", 811008), ("1e6 B", "B", 1e6), ("2*3/4*0.79*4 MB", "B", 4.74e6),
    ("2 · (4-1)/4 · 811,008 · 4 B", "B", 4866048), ("= 5 kB", "B", 5e3), ("-2^10 B", "B", -1024),
    ("4 * 10 + 2", "calls", 42), ("42 calls", "calls", 42), ("1 call", "calls", 1),
    ("0.8 M", "numbers", 8e5), ("2k tokens", "tokens", 2e3), ("1 micro-batch", "micro-batches", 1),
    ("3 micro-batches", "micro-batches", 3), ("12 GFLOP", "FLOP", 1.2e10),
    ("1 MFLOPs", "FLOP", 1e6),
    ("162 µs", "s", 162e-6), ("162us", "s", 162e-6), ("1.5 ms", "s", 1.5e-3), ("2e-6 s", "s", 2e-6),
    ("2·(4-1)·(5e-06 + 800/50e9) seconds", "s", 3.0096e-5), ("1 second", "s", 1),
    ("2", "times", 2), ("x2", "times", 2), ("× 1.5", "times", 1.5), ("2x", "times", 2),
    ("2 times", "times", 2), ("1/2", "times", 0.5), ("150%", "times", 1.5), ("+3", "times", 3),
    ("37.5%", "%", 0.375), ("37.5 %", "%", 0.375), ("3/8", "%", 0.375), (".375", "%", 0.375),
])  # fmt: skip
def test_an_answer_is_understood(line, unit, value):
    assert predict.understood(f"{line}\n", unit) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(("line", "unit", "why"), [
    ("MB", "B", "no number can be read in 'MB'; an answer is such as 4.87 MB"),
    ("4.87", "B", "'4.87' has no unit; an answer is such as 4.87 MB"),
    ("4.87 Mb", "B", "'Mb' is no unit here"), ("5 Mbit", "B", "'Mbit' is no unit here"),
    ("5 MB", "calls", "'MB' is no unit here; an answer is such as 24 calls"),
    ("5 x", "calls", "'x' is no unit here"), ("3 B", "times", "'B' is no unit here"),
    ("1/0 B", "B", "no number"), ("9**9**9 B", "B", "no number"), ("1e999 B", "B", "no number"),
    ("5", "s", "'5' has no unit; an answer is such as 162 µs"), ("5 m", "s", "'m' is no unit here"),
    ("1e300 TB", "B", "'1e300 TB' is too large"), ("(-8)**0.5 B", "B", "no number"),
    ("nan B", "B", "no number"), ("inf", "times", "no number"), ("4,87 MB", "B", "no number"),
    ("2j", "times", "'j' is no unit here"), ("2j+1", "times", "no number"),
    ("True", "times", "no number"), ("abs(1)", "times", "no number"),
    ("[1][0]", "times", "no number"), ("2 3", "times", "no number"), ("1 if 1 else 2", "calls", ""),
    ("__import__('os').getpid() B", "B", "no number"), ("'4' B", "B", "no number"),
    ("٣ B", "B", "no number"), ("４ B", "B", "no number"), ("\0 B", "B", r"in '\x00 B'; "),
    ("\x1b[31m5 B", "B", r"in '\x1b[31m5 B'; "), ("1;2", "times", "no number"),
    ("(" * 150 + ")" * 40, "times", "no number"),
    ("9" * 5000 + " B", "B", "and so on is too long"), ("1+" * 5000 + "1", "calls", "too long"),
])  # fmt: skip
def test_an_answer_is_not_understood(line, unit, why):
    """And why is one line. None of them takes long."""
    with pytest.raises(ValueError) as raised:
        predict.understood(line, unit)
    assert why in str(raised.value) and str(raised.value).isprintable()


@pytest.mark.parametrize(("unit", "value", "right", "wrong"), [
    ("B", 1000, (981, 1019, 1000), (979, 1021, -1000, 0)),
    ("calls", 101, (101, 100.6), (100, 102)),
    ("tokens", 4396, (4400, 4320), (4300, 4500)),
    ("%", 0.125, (0.1251, 0.123), (0.122, 12.5)),
    ("times", 1.5, (1.5, 1.48), (1.46, 0.667)),
])  # fmt: skip
def test_right_is_within_two_percent_and_small_counts_are_exact(unit, value, right, wrong):
    question = questions.Question("", "", value, unit, "")
    assert all(predict.is_right(answer, question) for answer in right)
    assert not any(predict.is_right(answer, question) for answer in wrong)


def test_a_ratio_is_said_and_no_cause():
    """Not even where it is the number of ranks: that may be chance. A unit that is right in the
    binary way is a second sign."""

    def off_by(line, unit="B", value=1.25e6):
        answer = predict.understood(line, unit)
        return predict.off_by(line, answer, questions.Question("", "", value, unit, ""))

    assert off_by("4*1.25 MB") == "4 times too large"
    assert off_by("1.25*3/4 MB") == "1.33 times too small"
    assert off_by("1.25 GB") == "1,000 times too large"
    assert off_by("8*1.25 MB") == "8 times too large"
    assert off_by("1.192 MB") == "too small: 1.192 MiB would be right"
    assert off_by("1.25 MiB") == "too large: 1.25 MB would be right"
    assert off_by("1220.7 kB") == "too small: 1220.7 KiB would be right"
    assert off_by("1.19 GB") == "952 times too large"
    assert off_by("1.28 MB") == "1.02 times too large"
    assert off_by("1.25e13 B") == "over a million times too large"
    assert off_by("0 B") == off_by("-4 B") == "too small"
    assert off_by("x0.8", "times", 1.25) == "the other way round"


def test_a_number_is_short_where_that_loses_nothing():
    numbers = [989e12, 450e9, 405857533952, 80e9, 811008, 1.25]
    assert [predict.number(value) for value in numbers] == [
        "989e12", "450e9", "405,857,533,952", "80e9", "811,008", "1.25"]


# ------------------------------------------------------------------------------- the dialogue


def test_what_cannot_be_read_is_asked_again_and_an_empty_line_shows(monkeypatch, capsys):
    case, asked = questions.questions("02_data_parallel", 5)
    typed = f"much\n5\n{asked[0].value} B\n \n44 calls\n"
    status, output, _ = dialogue(monkeypatch, capsys, typed, "02", "--seed=5")
    first, second, third, fourth = re.split(r"\n[1-4]\. ", output)[1:]
    assert "no number can be read in 'much'" in first and "'5' has no unit" in first
    assert first.index("has no unit") < first.index("✓") and "\n   The answer:\n" in second
    assert "   ✓\n   10·L + 4 = 10·4 + 4 = 44 calls\n" in third
    assert status == 0 and output.endswith(f"\n2 of 5. What is measured: {case.command}\n")
    assert "5. " not in fourth.replace("2 of 5. ", "")


def test_any_input_comes_to_an_end(monkeypatch, capsys):
    """Also one that goes on for ever with what cannot be read: five lines for a question."""
    _, output, _ = dialogue(monkeypatch, capsys, "y\n" * 100, "07", "--seed=1")
    assert output.count("'y'") == 25 and "\n0 of 5. " in output
    rng = random.Random(0)
    for name in chapters.NAMES:
        junk = b"\n".join(rng.randbytes(rng.randrange(60)) for _ in range(30))
        status, output, errors = dialogue(monkeypatch, capsys, junk, name[:2], "--seed=3")
        assert (status, errors) == (0, "") and re.search(" of 5. What .*: ", output)
        assert all(c.isprintable() or c == "\n" for c in output)


class Terminal(io.TextIOWrapper):
    def isatty(self):
        return True


def test_a_terminal_gets_a_prompt_and_a_pipe_gets_none(monkeypatch, capsys):
    assert "> " not in dialogue(monkeypatch, capsys, "\n", "01", "--seed=1")[1]
    with monkeypatch.context() as patch:
        patch.setattr(io, "TextIOWrapper", Terminal)
        assert "\n> " in dialogue(monkeypatch, capsys, "\n", "01", "--seed=1")[1]
    monkeypatch.setattr(sys, "stdin", None)  # closed, by `<&-`
    assert predict.main(["01"]) == 0 and "\n0 of 5. " in capsys.readouterr().out


def test_a_seed_asks_the_same_again(monkeypatch, capsys):
    ask = lambda *flags: dialogue(monkeypatch, capsys, "", *flags)[1]
    drawn = ask("03")
    [seed] = re.findall(r"--seed (\d+) asks the same again", drawn)
    assert ask("3", "--seed", seed) == drawn == ask("03_zero.py", f"--seed={seed}")
    assert len({ask("03", f"--seed={seed}") for seed in range(5)}) == 5


@pytest.mark.parametrize(("flags", "said"), [
    (["12"], "chapter: '12' is no chapter; 00, 01, 02, 03, 04, 05, 06, 07, 08, 09, 10, 11 are"),
    (["\x1b"], r"chapter: '\x1b' is no chapter"),
    ([], "a CHAPTER is missing; with 04 would work"),
    (["04", "--for="], "--for: '' is no name of 1 to 100 letters"),
    (["04", "--for=ada", "--seed=3"], "--for ada means nothing beside --seed; without --for"),
    (["04", "--export=x.txt"], "--export: cannot write 'x.txt'; --export sheet.md would work"),
    (["--mark=nowhere"], "--mark: 'nowhere' is no sheet such as sheet.md, and no folder of such"),
    (["04", "--mark=.", "--for=ada"], "--for means nothing beside --mark; without --for"),
    (["04", "--json=marks.json"], "--json means nothing without --mark; without --json"),
    (["--mark=.", "--seed=3"], "--seed 3 means nothing without a CHAPTER; "),
    (["04", "--seed=-1"], "--seed: -1 is no whole number in [0, 2147483648); --seed 1 would work"),
])  # fmt: skip
def test_a_bad_argument_costs_a_line(monkeypatch, capsys, flags, said):
    status, output, errors = dialogue(monkeypatch, capsys, "", *flags)
    assert (status, output) == (2, "") and errors.startswith(f"error: {said}")
    assert errors.count("\n") == 1
