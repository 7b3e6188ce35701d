"""What a grading keeps: the next one plays only what has changed, and believes nothing else."""


import pytest

from lab.classroom import checks, exercises, grade, kept
from lab.classroom.checks import Outcome
from lab.classroom.exercise import Run, Same
from tests.lab.classroom.two_exercises import SUM, instead, who_pays, written

RIGHT = Outcome(True, (), {}, {}, {}, 2)
WRONG = Outcome(False, ("off by 2",), {}, {}, {}, 2)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "FOLDER", tmp_path / "kept")
    monkeypatch.setattr(checks, "OUTCOMES", {})
    return tmp_path / "kept"


@pytest.fixture
def played(monkeypatch):
    """Nothing runs: a source with `gradient, None` is right. Gives the sources that would run."""
    sources = []

    def play(chapter, source, *more, **others):
        sources.append(source)
        return RIGHT if "return gradient, None" in source else WRONG

    monkeypatch.setattr(checks, "warm_up", lambda: None)
    monkeypatch.setattr(checks, "played", play)
    monkeypatch.setattr(checks, "answers", lambda *given: [])
    return sources


@pytest.fixture
def again(tmp_path, played, capsys, short_table):
    """Grades as another process would: how many are played, what is printed of the students, and
    what is on stderr."""
    def grade_again(*words):
        checks.OUTCOMES.clear()
        played.clear()
        grade.main([str(tmp_path / "class"), *words])
        output, errors = capsys.readouterr()
        said = [line.rpartition(";")[0] or line for line in output.splitlines()
                if "checks were played" not in line]
        return len(played), said, errors

    return grade_again


def test_a_second_grading_plays_only_what_has_changed(tmp_path, again):
    written(tmp_path / "class" / "ada")
    written(tmp_path / "class" / "bob", instead("1 + 8 * dim", "1 + dim * 8"))
    count, first, _ = again()
    assert count >= 5 and again()[:2] == (0, first)
    written(tmp_path / "class" / "bob", instead("1 + 8 * dim", "dim * 8 + 1"))
    assert again()[0] == 2  # bob's function alone, and his chapter
    assert again("--secret=another")[0] == 1  # the second run, of the same text for all
    assert again("--limit=9")[0] >= 5
    assert again("--fresh")[0] >= 5 and again()[0] == 0
    written(tmp_path / "class" / "cyn", instead("1 + 8 * dim", "dim * 8 + 1"))
    assert again()[0] == 0  # it is bob's text


# ----------------------------------------------------------------------- what an outcome depends on

def test_each_thing_that_an_outcome_depends_on_is_in_its_key(tmp_path):
    one = dict(chapter="04", source="a", solution="b", check=Run(2, "--steps=1"), limit=5)
    written(tmp_path / "cy")
    (tmp_path / "cy" / "helper.py").touch()
    others = [
        {"chapter": "05"}, {"source": "b"}, {"solution": "a"}, {"limit": 6},
        {"check": Run(3, "--steps=1")}, {"check": Run(2, "--steps=2")}, {"check": SUM.checks[0]},
        {"folders": [tmp_path / "cy"]},
        *({"check": Same(*args)} for args in (
            (who_pays, "x"), (who_pays, "x", (1,)), (who_pays, "x", (), 2),
            (exercises.short, "x"), (who_pays, "y")))]
    keys = {kept.key(**one | other) for other in [{}, *others]}
    assert len(keys) == 1 + len(others) and kept.key(**one) in keys


def test_modules_next_to_a_students_file_are_in_its_key_and_nothing_else(tmp_path):
    ours = [written(tmp_path / name, f"# {name}\n") for name in ("ada", "bob")]
    none, = {kept.modules_in(folder) for folder in ours}  # the chapters are left out
    for path, text, is_seen in (("helper.py", "A = 1", True), ("helper.py", "A = 2", True),
                                ("package/inner.py", "", True), ("notes.txt", "", False),
                                (".hidden/a.py", "", False), ("__pycache__/a.py", "", False)):
        before = kept.modules_in(ours[0])
        (ours[0] / path).parent.mkdir(exist_ok=True)
        (ours[0] / path).write_text(text)
        assert (kept.modules_in(ours[0]) != before) == is_seen, path
    assert kept.modules_in(ours[1]) == none

    (ours[1] / "link.py").symlink_to("nowhere")  # what cannot be read is never the same
    assert kept.modules_in(ours[1]) != kept.modules_in(ours[1])


def test_the_course_is_in_the_version(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "ROOT", tmp_path)
    for path in ("common.py", "05_x.py", "kernels/a.py", "lab/room/b.py",
                 "lab/classroom/answers.json"):
        found = [kept.version.__wrapped__()]
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        for text in ("", "A = 1"):
            (tmp_path / path).write_text(text)
            found.append(kept.version.__wrapped__())
        assert len(set(found)) == 3 and kept.version.__wrapped__() == found[2], path


# ----------------------------------------------------------------------------------------- the file

OUTCOMES = {"a": RIGHT, "b": WRONG._replace(errors={1: ("ValueError: \udcff", [3, 7])}),
            "stuck": WRONG._replace(stuck={0: ("all_reduce", [1])}),
            "ended": WRONG._replace(ended={0: (-9, "", [])}),
            "overseer": WRONG._replace(said=(f"{kept.OVERSEER} was ended",))}


def loaded(folder):
    one = kept.Kept(folder, {})
    one.load()
    return one


def test_what_is_kept_comes_back_as_it_was(tmp_path):
    """But not what a busy machine may have caused, and not a run's JSON."""
    one = kept.Kept(tmp_path, OUTCOMES | {"c": RIGHT._replace(record={"x": 1})})
    one.save()
    assert one.path.stat().st_mode & 0o777 == 0o600
    assert loaded(tmp_path).outcomes == {"a": RIGHT, "b": OUTCOMES["b"], "c": RIGHT}
    assert kept.Kept(tmp_path / "other", {}).path != one.path


def test_a_file_that_is_broken_makes_nobody_right(tmp_path):
    one = kept.Kept(tmp_path, dict(OUTCOMES))
    one.save()
    text = one.path.read_text()
    for broken in (
            "", text[:-5], "[" * 10**5, "[]", text.replace('"version": "', '"version": "x'),
            text.replace("true", '"yes"').replace("false", "[]")):
        one.path.write_text(broken)
        two = loaded(tmp_path)
        assert not any(outcome.right for outcome in two.outcomes.values()), broken
        two.outcomes["d"] = RIGHT
        two.save()  # it replaces the file
        assert loaded(tmp_path).outcomes["d"] == RIGHT


def test_what_is_written_there_while_students_are_graded_is_lost_and_told(
        tmp_path, again, monkeypatch, own_folder):
    """A student's code, say, writes that all checks in the file are right."""
    written(tmp_path / "class" / "ada", instead("return gradient, None", "return 1, None"))
    written(tmp_path / "class" / "bob", instead("1 + 8 * dim", "1 + dim * 8"))
    play, attacks = checks.played, []

    def hostile(chapter, source, *more, **others):
        if attacks and "dim * 8" in source:
            [path] = own_folder.iterdir()
            path.write_text(path.read_text().replace("false", "true"))
        return play(chapter, source, *more, **others)

    monkeypatch.setattr(checks, "played", hostile)
    _, fair, errors = again("--jobs=1")
    assert errors == "" and any("✗  off by 2" in line for line in fair)
    attacks.append(True)
    _, _, errors = again("--jobs=1", "--fresh")
    [path] = own_folder.iterdir()
    assert errors.count("\n") == 1 and f"{path} was changed" in errors
    attacks.clear()
    assert again("--jobs=1") == (0, fair, "")
    text = path.read_text()  # of students, it has digests: no name and no line of theirs
    assert "ada" not in text and "gradient" not in text
