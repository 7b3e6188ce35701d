"""What students get: no solution is in it, and it grades what they write."""

import ast
import os
import re
import subprocess
import sys

import pytest

from lab import bundle as command
from lab.classroom import bundle, checks, exercises, grading, holes
from lab.classroom.students import students_in
from tests.conftest import ROOT, sample
from tests.lab.classroom.two_exercises import CHAPTER, ON_RANKS, SOLUTION, file_of

COMMENT = re.compile(r"(^|\s)#.*$")
RUN = 5  # so many lines of a solution after each other are no accident
# They can only be tried once another exercise is solved: 09.1, 03.1, and duality.1.
AFTER = "09.2", "11.6", "duality.2", "duality.3", "duality.4"


@pytest.fixture(scope="module")
def texts():
    return bundle.texts()


def code_of(text):
    """Its lines without indents and comments."""
    lines = [COMMENT.sub("", line).strip() for line in text.split("\n")]
    return [line for line in lines if line]


def body_of(source, name):
    """The lines of code of a function, without its docstring."""
    node = holes.find(holes.parsed(source), name)
    body = node.body[ast.get_docstring(node) is not None :]
    return code_of("\n".join(source.split("\n")[body[0].lineno - 1 : node.end_lineno]))


def runs_of(lines, length):
    return {tuple(lines[i : i + length]) for i in range(len(lines) - length + 1)}


def solutions_in(texts):
    """Functions of exercises whose whole body, or five of its lines after each other, are there."""
    there = {name: code_of(text) for name, text in texts.items()}
    found = {length: {} for length in range(1, RUN + 1)}
    for name, lines in there.items():
        for length, runs in found.items():
            for run in runs_of(lines, length):
                runs.setdefault(run, set()).add(name)
    quoted = []
    for chapter, those in exercises.EXERCISES.items():
        source = exercises.solution(chapter)
        for name in (name for exercise in those for name in exercise.functions):
            lines = body_of(source, name)
            if tuple(lines) in runs_of(there.get(f"{chapter}.py", []), len(lines)):
                quoted.append((chapter, name))
            for run in runs_of(lines, min(RUN, len(lines))):
                others = found[len(run)].get(run, set()) - {f"{chapter}.py"}
                others -= {"01_single_gpu.py"} if name == "train_step" else set()  # its end
                if others and sum(map(len, run)) > 30:
                    quoted.append((chapter, name, others, run))
    return quoted


def test_no_solution_is_in_it(texts):
    assert solutions_in(texts) == []
    text = exercises.solution("02_data_parallel")
    left_in = solutions_in({"02_data_parallel.py": text, "lab/other.py": text})
    assert {len(found) for found in left_in} == {2, 4}  # in its own file, and in another


def test_each_exercise_is_a_hole_in_it(texts):
    for chapter, those in exercises.EXERCISES.items():
        tree = holes.parsed(texts[f"{chapter}.py"])
        for exercise in those:
            assert all(holes.is_hole(holes.find(tree, name)) for name in exercise.functions)


def test_it_has_what_it_imports_and_no_more(texts):
    assert not any(name.startswith(("lab/museum", "tests", "lab/site")) for name in texts)
    assert not any("predictions" in name or "exhibits" in name for name in texts)
    for name in texts:
        if name.endswith(".py"):
            for path in bundle.imported(ROOT / name):
                assert path.relative_to(ROOT).as_posix() in texts, (name, path)


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(("chapter", "number"), sample(
    (chapter, exercise.number) for chapter, those in exercises.EXERCISES.items()
    for exercise in those if exercise.number not in AFTER))
def test_each_exercise_can_be_tried_while_all_others_are_open(texts, chapter, number):
    [exercise] = [one for one in exercises.EXERCISES[chapter] if one.number == number]
    solution = exercises.solution(chapter)
    text = holes.paste(texts[f"{chapter}.py"], solution, exercise.functions).source
    values = [check for check in exercise.checks if not checks.is_run(check)]
    outcomes = [checks.outcome(chapter, text, solution, check) for check in values]
    assert any(outcome.right for outcome in outcomes)
    assert all(outcome.right or "NotImplementedError" in str(outcome.errors)
               for outcome in outcomes)


def make(folder, *words):
    """make of the bundle, in an environment that knows nothing of the course."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(["make", *words, f"PY={sys.executable}"], cwd=folder, env=environment,
                          capture_output=True, text=True)


@pytest.mark.full
@pytest.mark.usefixtures("warm")
def test_it_grades_at_home(tmp_path):
    """Two exercises that are solved, while all others are open; and one that is wrong."""
    folder = tmp_path / "bundle"
    bundle.write(folder, ["00.2", "02.1"])
    assert students_in(tmp_path) == {"bundle": folder}  # a teacher may grade it, too
    collectives, data_parallel = folder / "00_collectives.py", folder / "02_data_parallel.py"
    for path, names in (collectives, ["broadcast"]), (data_parallel, ["Naive.finish"]):
        solution = exercises.solution(path.stem)
        path.write_text(holes.paste(path.read_text(), solution, names).source)
    after = make(folder, "grade", "ONLY=00.2 02.1 02.3")
    assert "2 of 3 right, 0 wrong, 1 not begun" in after.stdout, after
    data_parallel.write_text(data_parallel.read_text().replace(
        "dist.all_reduce(p.grad, group=self.group)", "dist.broadcast(p.grad, 0, group=self.group)"))
    wrong = make(folder, "grade", "ONLY=02.1")
    assert wrong.returncode == 0 and "0 of 1 right, 1 wrong" in wrong.stdout


@pytest.mark.full
@pytest.mark.usefixtures("warm")
def test_at_home_a_function_that_is_left_open_is_no_point(monkeypatch):
    known = {check.key: checks.answers(CHAPTER, SOLUTION, check) for check in ON_RANKS.checks}
    monkeypatch.setattr(checks, "stored", lambda: known)
    text = holes.cut(SOLUTION, "SumOut.backward", "?", "04.2: SumOut.backward")
    assert grading.grade_exercise(ON_RANKS, file_of(text)) == (
        grading.OPEN, "not begun: SumOut.backward")
    assert grading.grade_exercise(ON_RANKS, file_of(SOLUTION)) == (grading.RIGHT, "")


def test_no_course_and_no_bundle_is_written_over_by_accident(tmp_path, capsys, monkeypatch):
    written = []
    monkeypatch.setattr(checks, "warm_up", lambda: None)
    monkeypatch.setattr(bundle, "write", lambda folder, say: written.append(folder))
    (tmp_path / "common.py").touch()
    for words, works in ([f"--out={tmp_path}"], "--force"), ([f"--out={ROOT}", "--force"],
                                                             "--out bundle"):
        with pytest.raises(SystemExit) as leaving:
            command.main(words)
        assert leaving.value.code == 2 and f"{works} would work" in capsys.readouterr().err
    assert written == [] and command.main([f"--out={tmp_path}", "--force"]) == 0
    assert written == [tmp_path]
