"""Each question has an answer that is computed, each command that it names is accepted, and rows
are found by their text, by words, and not without a reason for what differs."""

import shlex

import pytest

import common
from lab import chapters, questions, schedules
from lab.chapters import chapter
from lab.planner import planning
from lab.sources import lecture, texts
from lab.sources.asked import QUESTIONS as OF_TUTORIAL
from lab.sources.contradictions import CONTRADICTIONS
from lab.sources.row import Row

OFF = Row("1", "off", 2, lambda: 3, "B", by="here")


def test_there_are_25_of_three_levels_and_those_of_the_lecture():
    levels = [question.level for question in OF_TUTORIAL]
    assert levels == ["L1"] * 10 + ["L2"] * 10 + ["L3"] * 5
    assert list(questions.QUESTIONS) == list(range(1, 26 + len(lecture.QUESTIONS)))
    for question in OF_TUTORIAL:
        assert {row.where for row in question.rows} == {f"Q{question.number}"}


@pytest.mark.parametrize("question", questions.QUESTIONS.values(), ids=lambda one: one.number)
def test_its_command_is_accepted(question):
    first, *words = shlex.split(question.command)
    ranks = 1
    if first == "torchrun":
        ranks, words = int(words[0].removeprefix("--nproc_per_node=")), words[1:]
    if words[0] == "-m":
        assert words[1] == "lab.schedules"
        schedules.parse(chapter("07"), words[2:])
    elif words[0].startswith("10"):
        planning.question(chapter("10"), words[1:])
    else:
        module = chapter(words[0][:2])
        assert words[0].removesuffix(".py") in chapters.NAMES
        args = common.parse(words[0], "", module.VARIANTS, getattr(
            module, "flags", lambda parser: None), [*words[1:], "--device=cpu"])
        module.requires(args, ranks)


@pytest.mark.parametrize("question", lecture.QUESTIONS, ids=lambda one: one.number)
def test_what_the_lecture_claims_is_a_number(question):
    """No text tells it: so the row says no more than ours. (The tutorial's: test_rows.)"""
    for row in question.rows:
        assert row.told is None and row.ours() > 0 and row.by and not row.why


def test_every_number_is_given_by_something_that_is_there():
    """A function, class or table of the course that a row names."""
    for row in (*lecture.ROWS, *texts.tutorial.ROWS,
                *(row for question in lecture.QUESTIONS for row in question.rows)):
        where, _, name = row.by.rpartition(".")
        module = chapter(where[:2]) if where[0].isdigit() else questions.sys.modules[where]
        assert hasattr(module, name), row.by


def test_a_question_and_its_answer(capsys):
    assert questions.main(["2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 · L1 · How many bytes does each of N GPUs send")
    assert "1.75 S            1.75 S ✓" in out and "02_data_parallel.wire_bytes" in out
    assert out.endswith("see: torchrun --nproc_per_node=8 00_collectives.py\n")


@pytest.mark.parametrize(("line", "says"), [
    ("1.75", "✓"), ("7/4", "✓"), ("1.76", "✓"), ("2", "✗ 2 S is not it. The answer:"),
    ("", "The answer:"), ("many", "no number can be read in 'many'")])
def test_somebody_answers_first(line, says, capsys):
    assert questions.answer(questions.QUESTIONS[2], lambda: line) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "   First a number: on 8 GPUs? (in S)"
    assert lines[2].strip().startswith(says)


def test_the_list_and_its_levels(capsys):
    assert questions.main([]) == 0
    everything = capsys.readouterr().out
    assert all(question.question.split("?")[0][:40] in everything
               for question in questions.QUESTIONS.values())
    assert questions.main(["l3"]) == 0
    numbers = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert numbers == ["21", "22", "23", "24", "25"]


def test_words_find_questions_and_rows(capsys):
    assert questions.main(["later", "token", "mask"]) == 0
    out = capsys.readouterr().out
    assert "003 · " in out and "what a later token changes in earlier ones" in out
    assert "002 · " not in out
    assert questions.main(["busiest"]) == 0 and "  32  " in capsys.readouterr().out
    [one] = [one for one in CONTRADICTIONS if one.source == "004" and one.unit == "B/s"]
    assert questions.main(["--contradictions", *filter(str.isalpha, one.says.split()[:3])]) == 0
    out = capsys.readouterr().out
    assert f"told {texts.shown(one.told, 'B/s')}, ours 450 GB/s" in out


def test_a_text_has_all_of_its_rows_and_what_is_left_out(capsys):
    assert questions.main(["--seed", "003"]) == 0
    by_number = capsys.readouterr().out
    assert questions.main(["--seed", "lecture"]) == 0
    assert capsys.readouterr().out == by_number
    for row, value in texts.values_of("003"):
        assert texts.shown(value, row.unit) in by_number
    assert f"\n{len(lecture.ROWS)} rows: " in by_number and "Left out:\n  - figures" in by_number
    assert max(map(len, by_number.splitlines())) <= questions.WIDTH
    assert questions.main(["--seed", "3", "zig-zag"]) == 0
    assert "\n1 rows: " in capsys.readouterr().out.replace("1 row:", "1 rows:")


def test_a_row_that_differs_says_why_or_the_status_is_1(capsys, monkeypatch):
    monkeypatch.setattr(lecture, "ROWS", (OFF,))
    texts.values_of.cache_clear()
    try:
        assert questions.main(["--seed", "003"]) == 1
        assert "3 B +50%\n            ✗ it differs, and no reason" in capsys.readouterr().out
        assert questions.main(["off"]) == 1
        monkeypatch.setattr(lecture, "ROWS", (OFF._replace(why="It counts."),))
        texts.values_of.cache_clear()
        assert questions.main(["--seed", "003"]) == 0
        assert "It counts. (here)" in capsys.readouterr().out
    finally:
        texts.values_of.cache_clear()


@pytest.mark.parametrize(("words", "says"), [
    ("36", "there is no question 36; there are 1 to 35; 35 in place of 36 would work"),
    ("9" * 5000, "there is no question 999999999; there are 1 to 35; 35 in place of"),
    ("0", "1 in place of 0 would work"), ("bubbel", "bubble in place of bubbel would work"),
    ("--seed 9", "003 (lecture), 004 (tutorial); --seed 000 would work"),
    ("7 8", "question 7 is answered alone; without 8 would work"),
    ("7 --seed 003", "question 7 is answered alone; without --seed would work"),
    ("--seed 002 --contradictions", "without --contradictions would work"),
    ("zig-zag DualPipe", "nothing there has all of these words: zig-zag DualPipe; without"),
    ("--contradictions busiest", "these words: busiest; without busiest would work"),
    ("--seed 003 DualPipe", "these words: DualPipe; without DualPipe would work")])
def test_a_bad_argument_costs_one_line(words, says, capsys):
    with pytest.raises(SystemExit) as end:
        questions.main(words.split())
    assert end.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert says in line


@pytest.mark.parametrize(("value", "unit", "said"), [
    (3154944, "B", "3.155 MB"), (0.25, "B", "0.25 B"), (0.0044, "s", "4.4 ms"),
    (1e-7, "s", "100 ns"),
    (0.18, "%", "18%"), (3.8e25, "FLOP", "3.8e25 FLOP"), (6.71e11, "", "6.71e11"),
    (16384, "GPUs", "16,384 GPUs"), (2.657, "ranks", "2.657 ranks"), (0, "B", "0 B"),
    (-2e9, "B", "-2 GB"), (19764.2, "tokens", "19,764 tokens")])
def test_a_value_in_words(value, unit, said):
    assert texts.shown(value, unit) == said


@pytest.mark.parametrize(("low", "high", "unit", "value", "said", "verdict"), [
    (8, 16, "ranks", 11, "8 to 16 ranks", "✓"), (8, 16, "ranks", 4, "8 to 16 ranks", "-50%"),
    (8, 16, "ranks", 20, "8 to 16 ranks", "+25%"), (0.25, 0.4, "%", 0.4, "25 to 40%", "✓"),
    (0, 0.2, "%", 0.3, "0 to 20%", "+50%"), (1, 2, "", 40, "1 to 2", "×20"),
    (2e9, 3e9, "B", 3.3e9, "2 to 3 GB", "+10%"), (900, 1000, "", 1003, "900 to 1,000", "+0.3%")])
def test_a_range_is_met_by_all_that_lies_in_it(low, high, unit, value, said, verdict):
    row = Row("1", "of a range", low, lambda: value, unit, to=high)
    assert (texts.told(row), texts.verdict(row, value)) == (said, verdict)
    assert row.agrees(value) == (verdict == "✓")
