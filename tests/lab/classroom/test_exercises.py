"""The table of exercises, and the chapters with holes that are written from it."""

import ast
import inspect
import json
import re

import pytest

from lab.classroom import exercises, holes
from lab.classroom.exercise import Run
from lab.classroom.exercises import EXERCISES

EVERY = pytest.mark.parametrize("chapter", EXERCISES)


def names_in(function):
    """What a check takes from the chapter's module."""
    return re.findall(r"\bchapter\.(\w+)", inspect.getsource(function))


def names_of(node):
    """What a statement of a module defines."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name for alias in node.names}
    if isinstance(node, ast.Assign):
        return {name.id for target in node.targets for name in ast.walk(target)
                if isinstance(name, ast.Name)}
    return {getattr(node, "name", None)}


@EVERY
def test_the_table_is_sound(chapter):
    those, tree = EXERCISES[chapter], ast.parse(exercises.solution(chapter))
    numbers = [f"{exercises.short(chapter)}.{i}" for i, _ in enumerate(those, start=1)]
    assert [exercise.number for exercise in those] == numbers
    names = [name for exercise in those for name in exercise.functions]
    assert len(set(names)) == len(names) > 0
    defined = {name for node in tree.body for name in names_of(node)}
    for name in names:
        assert isinstance(holes.find(tree, name), ast.FunctionDef), name
    for exercise in those:
        assert exercise.level in (1, 2, 3) and len(exercise.what) <= 40, exercise.number
        assert len(exercise.hints) == 2 and all(exercise.hints), exercise.number
        sentences = re.findall(r"[.?!](?= |$)", exercise.question)
        assert 1 <= len(sentences) <= 3 and len(exercise.question) <= 400, exercise.number
        assert exercise.checks, exercise.number
        for check in exercise.checks:
            if isinstance(check, Run):
                assert 1 <= check.ranks <= 8 and not chapter.startswith("kernels")
            else:
                assert check.words and set(names_in(check.function)) <= defined, check.words


def test_there_are_enough():
    counts = {chapter: len(those) for chapter, those in EXERCISES.items()}
    chapters = {chapter: n for chapter, n in counts.items() if chapter[0].isdigit()}
    assert sorted(chapters) == sorted(path.stem for path in exercises.ROOT.glob("[0-9][0-9]_*.py"))
    assert min(chapters.values()) >= 5 and sum(chapters.values()) >= 50
    assert sum(counts.values()) - sum(chapters.values()) >= 4
    levels = {exercise.level for those in EXERCISES.values() for exercise in those}
    assert levels == {1, 2, 3}


@EVERY
def test_what_is_written_parses_and_with_the_solutions_functions_is_the_chapter(chapter):
    source, holed = exercises.solution(chapter), exercises.with_holes(chapter)
    names = [name for exercise in EXERCISES[chapter] for name in exercise.functions]
    tree = ast.parse(holed)
    assert all(holes.is_hole(holes.find(tree, name)) for name in names)
    for exercise in EXERCISES[chapter]:
        for name in exercise.functions:
            assert f'raise NotImplementedError("{exercise.number}: {name}")' in holed
    pasted = holes.graft(holed, source, names).source
    assert ast.dump(ast.parse(pasted)) == ast.dump(ast.parse(source))
    assert max(map(len, holed.split("\n"))) <= 100


@EVERY
def test_the_holes_of_a_level_alone(chapter):
    tree = ast.parse(exercises.with_holes(chapter, level=1))
    for exercise in EXERCISES[chapter]:
        for name in exercise.functions:
            assert holes.is_hole(holes.find(tree, name)) == (exercise.level == 1), name


# ------------------------------------------------------------------------------------ to write them

NAMES = {"04_tensor_parallel", "kernels/elu"}


@pytest.fixture
def two_chapters(monkeypatch):
    few = {chapter: those for chapter, those in EXERCISES.items() if chapter in NAMES}
    monkeypatch.setattr(exercises, "EXERCISES", few)


def test_what_somebody_has_changed_is_written_over_by_force_alone(tmp_path, two_chapters, capsys):
    folder = tmp_path / "new" / "exercises"
    write = [f"--write={folder}"]
    assert exercises.main(write) == 0
    assert "2 chapters and kernels with holes" in capsys.readouterr().out
    mine, other = folder / "04_tensor_parallel.py", folder / "kernels" / "elu.py"
    assert mine.read_text() == exercises.with_holes("04_tensor_parallel")

    mine.write_text("mine")
    assert exercises.main([*write, "--level=1"]) == 0               # the other one: of that level
    output = capsys.readouterr().out
    assert f"{mine} was changed and stays as it is; --force" in output
    assert "1 chapters and kernels" in output and mine.read_text() == "mine"
    assert other.read_text() == exercises.with_holes("kernels/elu", level=1)

    (folder / ".written.json").write_text('{"04_tens')              # as of a full disk
    assert exercises.main([*write, "--level=1"]) == 0 and mine.read_text() == "mine"
    assert str(other) not in capsys.readouterr().out                # it is what would be written
    assert exercises.main([*write, "--force"]) == 0
    assert mine.read_text() == exercises.with_holes("04_tensor_parallel")
    assert json.loads((folder / ".written.json").read_text()).keys() == NAMES


def test_questions_and_hints(capsys):
    [first, *_] = EXERCISES["04_tensor_parallel"]
    assert exercises.main([]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == sum(map(len, EXERCISES.values()))
    assert exercises.main(["--level=1"]) == 0
    assert all("level 1" in line for line in capsys.readouterr().out.splitlines())
    for count in range(3):
        hint = [f"--hint={count}"] if count else []
        assert exercises.main([first.number, *hint]) == 0
        words = " ".join(capsys.readouterr().out.split())
        shown = [first.question, *first.hints]
        assert [" ".join(text.split()) in words for text in shown] == [
            i <= count for i in range(3)]
    assert exercises.main(["04", "04.1"]) == 0
    assert capsys.readouterr().out.count("\n04.") + 1 == len(EXERCISES["04_tensor_parallel"])


def test_what_was_written_stays_known_when_the_writing_is_killed(tmp_path, two_chapters,
                                                                 monkeypatch):
    """After any of its files, and then with other holes."""
    real, left = exercises.put, []

    def put(path, data):
        if not left:
            raise KeyboardInterrupt
        left.pop()
        real(path, data)

    for after in range(4):
        folder = tmp_path / str(after)
        assert exercises.write(folder) == []
        left[:] = [None] * after
        monkeypatch.setattr(exercises, "put", put)
        if after < 3:
            with pytest.raises(KeyboardInterrupt):
                exercises.write(folder, level=1)
        monkeypatch.setattr(exercises, "put", real)
        assert exercises.write(folder) == [] == exercises.write(folder, level=2)


@pytest.mark.parametrize(("words", "line"), [
    (["04.99"], "there is no EXERCISE '04.99'; `python -m lab.exercises` lists all; 09.9 in place "
                "of 04.99 would work"),
    (["--hint=1"], "--hint 1 means nothing without an EXERCISE; without --hint would work"),
    (["--force"], "--force means nothing without --write; --write exercises would work"),
    (["04", "--write=x"], "EXERCISE 04 means nothing beside --write, which writes all; "
                          "without --write would work"),
    (["--write="], "--write: cannot write ''; --write exercises would work"),
])
def test_what_is_refused(words, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as leaving:
        exercises.main(words)
    assert leaving.value.code == 2 and capsys.readouterr().err == f"error: {line}\n"


def test_a_folder_in_the_place_of_a_chapter_is_named(tmp_path, two_chapters, capsys):
    path = tmp_path / "04_tensor_parallel.py"
    path.mkdir()
    with pytest.raises(SystemExit) as leaving:
        exercises.main([f"--write={tmp_path}"])
    assert leaving.value.code == 2
    assert capsys.readouterr().err == (
        f"error: cannot write {path}: Is a directory; --write with another folder would work\n")
