"""The table of exercises, and the chapters with holes that are written from it."""

import ast

import pytest

from lab import chapters
from lab import exercises as command
from lab.classroom import exercises, holes
from lab.classroom.exercise import read
from lab.classroom.exercises import EXERCISES

NAMES = {"04_tensor_parallel", "kernels/elu"}


def test_the_table_is_sound():
    """Each chapter has five exercises or more, and their functions are there."""
    for chapter, those in EXERCISES.items():
        assert len(those) >= 5 or not chapter[0].isdigit(), chapter
        tree = ast.parse(exercises.solution(chapter))
        numbers = [f"{exercises.short(chapter)}.{i}" for i, _ in enumerate(those, start=1)]
        assert [exercise.number for exercise in those] == numbers
        names = [name for exercise in those for name in exercise.functions]
        assert len(set(names)) == len(names) > 0
        for name in names:
            assert isinstance(holes.find(tree, name), ast.FunctionDef), name
        for exercise in those:
            assert exercise.level in (1, 2, 3), exercise.number
            assert len(exercise.hints) == 2 and all(exercise.hints), exercise.number
            assert exercise.question and exercise.checks, exercise.number
    assert {path.stem for path in exercises.ROOT.glob("[0-9][0-9]_*.py")} < EXERCISES.keys()


@pytest.mark.parametrize(("right", "wrong", "error"), [
    ("level = 1", "lvl = 1", "02.1: .*lvl"),
    ('value = "', 'vlue = "', "02.1: 'value' is missing"),
    ('value = "', 'value = "(', "02.1: '.' was never closed"),
    ('"02.2"', '"02.1"', "02.1: another exercise has this number"),
    ('names = "', 'names = "no_', "02.1: the chapter has no function no_"),
    ("[[exercises]]", "[[exercises]", "line")])
def test_a_wrong_file_is_one_clear_line(tmp_path, right, wrong, error):
    path = tmp_path / "exercises.toml"
    text = (chapters.HERE / "02" / "exercises.toml").read_text(encoding="utf-8")
    path.write_text(text.replace(right, wrong, 1))
    with pytest.raises(ValueError, match=error) as raised:
        read(path)
    assert str(raised.value).startswith(f"{path}: ") and "\n" not in str(raised.value)


# ------------------------------------------------------------------------------------ to write them


@pytest.fixture
def two_chapters(monkeypatch):
    few = {chapter: those for chapter, those in EXERCISES.items() if chapter in NAMES}
    monkeypatch.setattr(exercises, "EXERCISES", few)


def test_a_file_that_is_there_is_only_written_over_by_force(tmp_path, two_chapters, capsys):
    folder = tmp_path / "new" / "exercises"
    path, other = folder / "04_tensor_parallel.py", folder / "kernels" / "elu.py"
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    assert command.main([f"--write={folder}", "--level=1"]) == 0
    output = capsys.readouterr().out
    assert str(path) in output and "--force" in output and path.read_text() == "mine"
    tree = ast.parse(other.read_text())
    for exercise in EXERCISES["kernels/elu"]:
        for name in exercise.functions:
            assert holes.is_hole(holes.find(tree, name)) == (exercise.level == 1), name
    assert command.main([f"--write={folder}", "--force"]) == 0
    assert path.read_text() == exercises.with_holes("04_tensor_parallel")


def test_questions_and_hints(capsys):
    [first, *_] = EXERCISES["04_tensor_parallel"]
    for count in range(3):
        assert command.main([first.number, *[f"--hint={count}"] * (count > 0)]) == 0
        words = " ".join(capsys.readouterr().out.split())
        shown = [first.question, *first.hints]
        assert [" ".join(text.split()) in words for text in shown] == [
            i <= count for i in range(3)]


@pytest.mark.parametrize(("words", "named", "works"), [
    (["04.99"], "EXERCISE '04.99'", "in place of 04.99"),
    (["--hint=1"], "--hint 1", "without --hint"),
    (["--write=folder", "--force"], "04_tensor_parallel.py: Is a directory",
     "--write with another folder")])  # fmt: skip
def test_what_is_refused(words, named, works, tmp_path, two_chapters, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder/04_tensor_parallel.py").mkdir(parents=True)
    with pytest.raises(SystemExit) as leaving:
        command.main(words)
    [line] = capsys.readouterr().err.splitlines()
    assert leaving.value.code == 2 and named in line and f"{works} would work" in line
