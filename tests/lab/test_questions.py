"""Questions have computed answers, their commands are accepted, and rows are found by words."""

import shlex

import pytest

import common
from lab import chapters, questions, schedules
from lab.chapters import chapter
from lab.planner import planning
from lab.sources import lecture, texts
from lab.sources.row import Row

OFF = Row("1", "off", 2, lambda: 3, "B", by="here")


def test_their_commands_are_accepted():
    for question in questions.QUESTIONS.values():
        first, *words = shlex.split(question.command)
        ranks = 1
        if first == "torchrun":
            ranks, words = int(words[0].removeprefix("--nproc_per_node=")), words[1:]
        if words[0] == "-m":
            assert words[1] == "lab.schedules", question.command
            schedules.parse(chapter("07"), words[2:])
        elif words[0].startswith("10"):
            planning.question(chapter("10"), words[1:])
        else:
            module = chapter(words[0][:2])
            assert words[0].removesuffix(".py") in chapters.NAMES
            args = common.parse(words[0], "", module.VARIANTS, getattr(
                module, "flags", lambda parser: None), [*words[1:], "--device=cpu"])
            module.requires(args, ranks)


def test_every_number_comes_from_something_that_is_there():
    """A function, class or table of the course that a row names."""
    asked = [row for question in questions.QUESTIONS.values() for row in question.rows]
    assert all(row.ours() > 0 and not row.why for question in lecture.QUESTIONS
               for row in question.rows)
    for row in (*lecture.ROWS, *texts.tutorial.ROWS, *asked):
        where, _, name = row.by.rpartition(".")
        module = chapter(where[:2]) if where[0].isdigit() else questions.sys.modules[where]
        assert hasattr(module, name), row.by


def test_each_command_prints_what_is_asked_for(capsys):
    def printed(*words):
        assert questions.main([*words]) == 0
        return capsys.readouterr().out

    assert "1.75 S ✓" in printed("2") and "02_data_parallel.wire_bytes" in printed("2")
    everything = printed()
    assert all(question.question[:30] in everything for question in questions.QUESTIONS.values())
    found = printed("later", "token", "mask")
    assert "003 · " in found and "002 · " not in found
    assert "450 GB/s" in printed("--contradictions", "nvlink")
    of_text = printed("--seed", "003")
    assert of_text == printed("--seed", "lecture")
    assert all(texts.shown(value, row.unit) in of_text for row, value in texts.values_of("003"))


def test_somebody_answers_first(capsys):
    for line, says in [("7/4", "✓"), ("1.76", "✓"), ("2", "✗"), ("many", "'many'")]:
        assert questions.answer(questions.QUESTIONS[2], lambda line=line: line) == 0
        assert says in capsys.readouterr().out.splitlines()[2], line


def test_a_row_that_differs_says_why_or_the_status_is_1(capsys, monkeypatch):
    try:
        for row, status in ((OFF, 1), (OFF._replace(why="It counts."), 0)):
            monkeypatch.setattr(lecture, "ROWS", (row,))
            texts.values_of.cache_clear()
            assert questions.main(["--seed", "003"]) == status == questions.main(["off"])
            assert ("✗" in capsys.readouterr().out) == bool(status)
    finally:
        texts.values_of.cache_clear()


@pytest.mark.parametrize(("words", "works"), [
    ("9" * 5000, "35"), ("bubbel", "bubble"), ("--seed 9", "--seed 000"),
    ("--seed 002 --contradictions", "--contradictions")])
def test_a_bad_argument_costs_one_line(words, works, capsys):
    with pytest.raises(SystemExit) as end:
        questions.main(words.split())
    [line] = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and works in line and line.endswith("would work")


def test_values_and_ranges_in_words():
    for value, unit, said in [
            (3154944, "B", "3.155 MB"), (0.0044, "s", "4.4 ms"), (0.18, "%", "18%"),
            (3.8e25, "FLOP", "3.8e25 FLOP"), (16384, "GPUs", "16,384 GPUs")]:
        assert texts.shown(value, unit) == said
    for low, high, unit, value, said, verdict in [
            (8, 16, "GPUs", 11, "8 to 16 GPUs", "✓"), (8, 16, "GPUs", 4, "8 to 16 GPUs", "-50%"),
            (0, 0.2, "%", 0.3, "0 to 20%", "+50%"), (1, 2, "", 40, "1 to 2", "×20")]:
        row = Row("1", "of a range", low, lambda value=value: value, unit, to=high)
        assert (texts.told(row), texts.verdict(row, value)) == (said, verdict)
        assert row.agrees(value) == (verdict == "✓")
