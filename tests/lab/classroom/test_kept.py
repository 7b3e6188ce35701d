"""What a grading keeps: the next one plays only what has changed, and believes nothing else."""

import json
import os
import re

import pytest

from lab.classroom import checks, exercises, grade, kept
from lab.classroom.checks import Outcome
from lab.classroom.exercise import Run, Same
from tests.lab.classroom.test_grade import SOLUTION
from tests.lab.classroom.test_grade_broken_files import short_table, written  # noqa: F401
from tests.lab.classroom.two_exercises import CHAPTER, SUM, who_pays

RIGHT = Outcome(True, (), {}, {}, {}, 2)
WRONG = Outcome(False, ("off by 2",), {}, {}, {}, 2)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "FOLDER", tmp_path / "kept")
    monkeypatch.setattr(checks, "OUTCOMES", {})
    return tmp_path / "kept"


@pytest.fixture
def played(monkeypatch):
    """Nothing runs: what has `gradient, None` in it is right. Gives the sources that would run."""
    sources = []

    def play(chapter, source, *more, **others):
        sources.append(source)
        return RIGHT if "return gradient, None" in source else WRONG

    monkeypatch.setattr(checks, "played", play)
    monkeypatch.setattr(checks, "answers", lambda *given: [])
    return sources


@pytest.fixture
def again(tmp_path, played, capsys, short_table):
    """Grades as another process would do it, and gives what is played, and what is said."""
    def grade_again(*words):
        checks.OUTCOMES.clear()
        played.clear()
        grade.main([str(tmp_path / "class"), *words])
        output, errors = capsys.readouterr()
        return len(played), re.sub(r"\d+ s\n", "N s\n", output), errors

    return grade_again


def changed(folder, old, new):
    path = folder / f"{CHAPTER}.py"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_a_second_grading_plays_only_what_has_changed(tmp_path, again):
    for name in ("ada", "bob"):
        written(tmp_path / "class" / name)
    changed(tmp_path / "class" / "bob", "1 + 8 * dim", "1 + dim * 8")
    count, first, _ = again()
    assert count >= 5 and "checks were played" not in first
    count, second, _ = again()
    assert count == 0 and second == first + (
        "0 checks were played; what has not changed since the last time was not (--fresh plays "
        "all)\n")

    changed(tmp_path / "class" / "bob", "1 + dim * 8", "dim * 8 + 1")
    assert again()[0] == 2                              # bob's function alone, and his chapter
    assert again("--secret=another")[0] == 1            # the second run, of the same text for all
    assert again("--limit=9")[0] >= 5
    assert again("--fresh")[0] >= 5 and again()[0] == 0


def test_a_student_who_comes_later_changes_nothing_for_the_others(tmp_path, again):
    written(tmp_path / "class" / "ada")
    again("04.7")
    written(tmp_path / "class" / "bob", SOLUTION.replace("1 + 8 * dim", "1 + dim * 8"))
    assert again("04.7")[0] == 1


def test_what_was_graded_before_an_interruption_is_kept(tmp_path, again, monkeypatch):
    def interrupted(folder, *more):
        if folder.name == "bob":
            raise KeyboardInterrupt
        yield from real(folder, *more)

    for name in ("ada", "bob"):
        written(tmp_path / "class" / name)
    with monkeypatch.context() as patch:
        real = grade.grade
        patch.setattr(grade, "grade", interrupted)
        with pytest.raises(KeyboardInterrupt):
            again("--jobs=1")
    assert again()[0] == 0                              # bob's is the same text


# ----------------------------------------------------------------------- what an outcome depends on

ONE = dict(chapter="04", source="a", solution="b", check=Run(2, "--steps=1"), limit=5)


@pytest.mark.parametrize("other", [
    {"chapter": "05"}, {"source": "b"}, {"solution": "a"}, {"limit": 6},
    {"check": Run(3, "--steps=1")}, {"check": Run(2, "--steps=2")}, {"check": SUM.checks[0]},
    {"check": Same(who_pays, "--steps=1")}], ids=[
        "chapter", "source", "solution", "limit", "ranks", "steps", "flags", "kind"])
def test_each_thing_that_an_outcome_depends_on_is_in_its_key(other):
    assert kept.key(**ONE) == kept.key(**ONE) != kept.key(**ONE | other)


def test_sizes_ranks_and_the_function_of_a_same_are_in_its_key():
    every = [Same(who_pays, "x"), Same(who_pays, "x", (1,)), Same(who_pays, "x", (), 2),
             Same(exercises.short, "x"), Same(who_pays, "y")]
    assert len({kept.key("04", "a", "b", check) for check in every}) == len(every)


def test_modules_beside_a_students_file_are_in_its_key_and_nothing_else(tmp_path):
    written(tmp_path / "cy")
    (tmp_path / "cy" / "helper.py").touch()
    keys = {kept.key(**ONE, folders=folders) for folders in ((), [tmp_path / "cy"])}
    assert len(keys) == 2
    ours = [written(tmp_path / name, SOLUTION + f"# {name}\n") for name in ("ada", "bob")]
    none, = {kept.modules_in(folder) for folder in ours}        # the chapters are left out
    for path, text, is_seen in (("helper.py", "A = 1", True), ("helper.py", "A = 2", True),
                                ("package/inner.py", "", True), ("notes.txt", "", False),
                                (".hidden/a.py", "", False), ("__pycache__/a.py", "", False)):
        before = kept.modules_in(ours[0])
        (ours[0] / path).parent.mkdir(exist_ok=True)
        (ours[0] / path).write_text(text)
        assert (kept.modules_in(ours[0]) != before) == is_seen, path
    assert kept.modules_in(ours[1]) == none


@pytest.mark.parametrize("make", [
    lambda path: os.mkfifo(path), lambda path: path.symlink_to("nowhere"),
    lambda path: path.write_bytes(bytes(kept.LARGEST + 1))], ids=["fifo", "link", "large"])
def test_what_cannot_be_read_is_never_the_same(make, tmp_path):
    make(tmp_path / "helper.py")
    assert kept.modules_in(tmp_path) != kept.modules_in(tmp_path)


def test_too_many_modules_are_never_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "MOST", 2)
    for number in range(3):
        assert kept.modules_in(tmp_path) == kept.modules_in(tmp_path)
        (tmp_path / f"helper{number}.py").touch()
    assert kept.modules_in(tmp_path) != kept.modules_in(tmp_path)


@pytest.mark.parametrize("path", ["common.py", "05_x.py", "kernels/a.py", "lab/room/b.py",
                                  "lab/classroom/answers.json"])
def test_the_course_is_in_the_version(path, tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "ROOT", tmp_path)
    found = [kept.version.__wrapped__()]
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    for text in ("", "A = 1"):
        (tmp_path / path).write_text(text)
        found.append(kept.version.__wrapped__())
    assert len(set(found)) == 3 and kept.version.__wrapped__() == found[2]


# ----------------------------------------------------------------------------------------- the file

OUTCOMES = {"a": RIGHT, "b": WRONG._replace(errors={1: ("ValueError: \udcff", [3, 7])}),
            "stuck": WRONG._replace(stuck={0: ("all_reduce", [1])}),
            "ended": WRONG._replace(ended={0: (-9, "", [])}),
            "overseer": WRONG._replace(said=(f"{kept.OVERSEER} was ended",))}


def file_of(folder, outcomes=None):
    return kept.Kept(folder, {} if outcomes is None else outcomes)


def test_what_is_kept_comes_back_as_it_was(tmp_path):
    """But for what a busy machine may have caused, and a run's JSON."""
    one = file_of(tmp_path, OUTCOMES | {"c": RIGHT._replace(record={"x": 1})})
    one.save()
    assert one.path.stat().st_mode & 0o777 == 0o600
    two = file_of(tmp_path)
    two.load()
    assert two.outcomes == {"a": RIGHT, "b": OUTCOMES["b"], "c": RIGHT}
    assert file_of(tmp_path / "other").path != one.path


@pytest.mark.parametrize("change", [
    lambda text: "", lambda text: text[:-5], lambda text: "[" * 10**5, lambda text: "[]",
    lambda text: text.replace('"version": "', '"version": "x'),
    lambda text: text.replace("true", '"yes"').replace("false", "[]"),
    lambda text: text.replace('{"1": ', '{"one": '), lambda text: text.replace("[3, 7]", "null"),
    lambda text: '{"version": 1, "outcomes": {}}'])
def test_a_file_that_is_broken_makes_nobody_right(change, tmp_path):
    one = file_of(tmp_path, dict(OUTCOMES))
    one.save()
    one.path.write_text(change(one.path.read_text()))
    two = file_of(tmp_path)
    two.load()
    assert not any(outcome.right for outcome in two.outcomes.values())
    two.outcomes["d"] = RIGHT
    two.save()                                          # and it is written anew
    three = file_of(tmp_path)
    three.load()
    assert three.outcomes["d"] == RIGHT


def test_what_is_written_there_while_students_are_graded_is_lost_and_told(
        tmp_path, again, played, monkeypatch, own_folder):
    """By a student's code, say, which makes all right that it finds."""
    written(tmp_path / "class" / "ada", SOLUTION.replace("return gradient, None", "return 1, None"))
    written(tmp_path / "class" / "bob", SOLUTION.replace("1 + 8 * dim", "1 + dim * 8"))
    play, attack = checks.played, [False]

    def hostile(chapter, source, *more, **others):
        if attack[0] and "dim * 8" in source:
            [path] = own_folder.iterdir()
            path.write_text(path.read_text().replace("false", "true"))
        return play(chapter, source, *more, **others)

    monkeypatch.setattr(checks, "played", hostile)
    _, fair, errors = again("--jobs=1")
    assert errors == "" and "04.2  SumOut.backward    ✗  off by 2" in fair
    attack[0] = True
    [path] = own_folder.iterdir()
    _, _, errors = again("--jobs=1", "--fresh")
    assert errors == (f"error: {path} was changed while this graded; what this has found replaces "
                      "it\n")
    attack[0] = False
    count, later, errors = again("--jobs=1")
    assert (count, errors) == (0, "") and later.startswith(fair)


@pytest.mark.parametrize("make", [
    lambda path: path.write_text(""), lambda path: path.symlink_to("/proc/1/none")],
    ids=["file", "link"])
def test_where_nothing_can_be_kept_students_are_graded_all_the_same(make, tmp_path, again,
                                                                    own_folder):
    make(own_folder)
    written(tmp_path / "class" / "ada")
    count, first, errors = again()
    assert count and re.fullmatch("error: nothing is kept for the next time .*\n", errors)
    assert again()[:2] == (count, first)


def test_without_a_home_nothing_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kept, "FOLDER", kept.Path("~/.cache/fivefold"))
    one = file_of(tmp_path)
    one.outcomes["a"] = RIGHT
    monkeypatch.chdir(tmp_path)
    one.save()
    assert "there is no home" in capsys.readouterr().err and not [*tmp_path.iterdir()]


def test_the_course_says_nothing_of_a_student_in_the_file(tmp_path, again, own_folder):
    """Only of sources, by digests: it holds no name and no line of theirs."""
    written(tmp_path / "class" / "ada")
    again()
    [path] = own_folder.iterdir()
    assert json.loads(path.read_text()).keys() == {"version", "outcomes"}
    assert "ada" not in path.read_text() and "gradient" not in path.read_text()
