"""The grader: what it says of right, wrong and broken answers, and how it reports them."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest
import torch

from lab.classroom import checks, exercises, grade, holes, overseer
from lab.classroom.exercise import Run
from tests.chapters.wrong_answers import WRONG
from tests.conftest import ROOT
from tests.lab.classroom.two_exercises import CHAPTER, PAYS, SUM

TABLE = {exercise.number: (chapter, exercise)
         for chapter, those in exercises.EXERCISES.items() for exercise in those}

SOLUTION = exercises.solution(CHAPTER)
ANSWER = "        return gradient, None\n"


@pytest.fixture(scope="module", autouse=True)
def warm():
    checks.warm_up()


def file_of(text, chapter=CHAPTER, folder=None):
    return grade.File(chapter, folder, *grade.without_faults(text))


def written(folder, text=SOLUTION, chapter=CHAPTER):
    """A student's folder with a chapter in it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{chapter}.py").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def short_table(monkeypatch):
    """Two exercises of one chapter."""
    monkeypatch.setattr(exercises, "EXERCISES", {CHAPTER: [SUM, PAYS]})


@pytest.fixture
def no_runs(monkeypatch):
    """Nothing runs: the solution is right, and all else is wrong. Gives the sources graded."""
    graded = []

    def outcome(chapter, source, solution, *more):
        graded.append(source)
        said = () if source == solution else ("it is not the solution",)
        return checks.Outcome(not said, said, {}, {}, {}, 1)

    monkeypatch.setattr(checks, "outcome", outcome)
    return graded


# ------------------------------------------------------------------------ all exercises and answers

def sample(kinds):
    """Of each chapter the first exercise that each kind of check is the first of; the others are
    for `make test-all`."""
    first, params = set(), []
    for number, value in kinds:
        chapter, exercise = TABLE[number]
        key = chapter, type(exercise.checks[0])
        marks = [pytest.mark.full] if key in first else []
        if chapter.startswith("kernels"):
            marks.append(pytest.mark.skipif(
                torch.cuda.is_available(),
                reason="where kernels are compiled, the tests' processes do not interpret them"))
        first.add(key)
        i = sum(param.values[0] == number for param in params)
        params.append(pytest.param(number, value, marks=marks, id=f"{number}-{i}"))
    return params


def planted(chapter, exercise, right, wrong):
    """The chapter with a wrong answer in the functions of an exercise."""
    source = exercises.solution(chapter)
    lines, found = source.split("\n"), 0
    tree = grade.parse(source)
    for name in exercise.functions:
        first, last = holes.lines_of(holes.find(tree, name))
        text = "\n".join(lines[first - 1 : last])
        if right in text:
            found += text.count(right)
            assert source.count(text) == 1
            changed = source.replace(text, text.replace(right, wrong))
    assert found == 1, f"{exercise.number} has {found} times: {right}"
    return changed


@pytest.mark.parametrize(("number", "answer"), sample(
    (number, answer) for number in TABLE for answer in WRONG.get(number, ())))
def test_a_wrong_answer_is_wrong_and_is_told_why(number, answer):
    chapter, exercise = TABLE[number]
    file = file_of(planted(chapter, exercise, answer.right, answer.wrong), chapter)
    mark, words = grade.grade_exercise(exercise, file)
    assert mark == grade.WRONG and answer.says in words, words


@pytest.mark.parametrize(("number", "check"), sample(
    (number, check) for number in TABLE for check in TABLE[number][1].checks))
def test_the_solution_is_right(number, check):
    chapter, _ = TABLE[number]
    text = exercises.solution(chapter)
    outcome = checks.outcome(chapter, text, text, check)
    assert outcome.right, checks.in_words(outcome, text, lambda line: None)


def test_every_exercise_has_a_wrong_answer():
    assert WRONG.keys() == TABLE.keys()
    for number, answers in WRONG.items():
        assert answers, number
        for answer in answers:                          # a word or more, and not a part of any
            assert len(answer.says) > 3 and answer.says != "TODO", number


@pytest.mark.parametrize("chapter", exercises.EXERCISES)
def test_who_solves_one_exercise_has_begun_no_other(chapter, no_runs):
    """And what is graded is the solution then, to the last letter; with the holes it is not."""
    holed = exercises.with_holes(chapter)
    those = exercises.EXERCISES[chapter]
    for solved in those if os.environ.get("FULL") else those[::3]:
        text = holes.graft(holed, exercises.solution(chapter), solved.functions).source
        file = file_of(text, chapter)
        for exercise in those:
            mark, words = grade.grade_exercise(exercise, file)
            if exercise == solved:
                assert mark == grade.RIGHT, words
            elif not set(exercise.functions) & set(solved.functions):
                assert (mark, words) == (grade.OPEN, "not begun")
    assert no_runs


# ------------------------------------------------------------------------------ what students write

def said(answer, limit=checks.LIMIT):
    """Of SumOut.backward with these lines."""
    assert SOLUTION.count(ANSWER) == 1
    return grade.grade_exercise(SUM, file_of(SOLUTION.replace(ANSWER, answer)), limit)


LINE = SOLUTION[: SOLUTION.index(ANSWER)].count("\n") + 1
HERE = f"line {LINE} of SumOut.backward"


@pytest.mark.parametrize(("answer", "words"), [
    ("        return gradient + ctx.no_such, None\n", rf"{HERE}: AttributeError: .*no_such"),
    ("        return gradient @ gradient, None\n",
     rf"{HERE}: RuntimeError: Expected size .* but got"),
    ("        return gradient.sum(1), None\n",
     r"`loss.backward\(\)` in the solution's train_step: RuntimeError: .*invalid gradient.*got "
     r"\[8, 32\].*\[8, 16, 32\]"),
    ("        assert dist.get_rank() == 0, 'not on\\n1'\n" + ANSWER,
     f"rank 1, {HERE}: AssertionError: not on 1$"),
    ("        raise SystemExit(0)\n", f"{HERE}: SystemExit: 0$"),
    ("        __import__('os')._exit(0)\n", "rank [01]: the process has ended with status 0$"),
    ("        __import__('ctypes').string_at(0)\n",
     f"rank [01], {HERE}: the process has ended by SIGSEGV"),
    ("        summed(gradient[: dist.get_rank() + 1], None)\n" + ANSWER,
     rf"rank [01], all_reduce, {HERE}: the process has ended by SIGABRT.* of the same size"),
    ("        input('your answer: ')\n", f"{HERE}: EOFError: EOF when reading a line"),
], ids=["name", "shape", "gradient", "one rank", "exit", "_exit", "crash", "sizes", "input"])
def test_what_goes_wrong_is_said_with_the_students_own_line(answer, words):
    mark, line = said(answer)
    assert mark == grade.WRONG and re.match(words, line), line


def test_an_endless_loop_is_ended_and_named():
    loop = "        while dist.get_rank() == 1:\n            dist.get_world_size()\n" + ANSWER
    mark, words = said(loop, limit=1.5)
    lines = f"({LINE}|{LINE + 1})"
    assert mark == grade.WRONG and re.fullmatch(
        r"no end: rank 0 waits in all_reduce, .* in the solution's summed; "
        rf"rank 1 is at line {lines} of SumOut.backward", words), words


def test_a_deadlock_is_told_from_a_long_run_and_says_which_rank_waits_where():
    """The limit is far away."""
    begin = time.monotonic()
    lines = "        if dist.get_rank() == 1:\n            dist.barrier()\n" + ANSWER
    mark, words = said(lines, limit=100)
    assert time.monotonic() - begin < 60 and mark == grade.WRONG
    assert re.fullmatch(
        r"no end: rank 0 waits in all_reduce, `.*` in the solution's summed; "
        rf"rank 1 waits in barrier, line {LINE + 1} of SumOut.backward", words), words


def test_seconds_of_computing_are_known_without_proc_too(monkeypatch):
    _, expected = overseer.state_of(os.getpid())
    assert expected > 1 and abs(expected - time.process_time()) < 1
    monkeypatch.setattr(overseer, "PROC", Path("/nowhere"))
    runs, seconds = overseer.state_of(os.getpid())
    assert runs is False and abs(seconds - expected) <= 1.5
    assert overseer.state_of(2**30) == (False, 0)


def test_a_wait_of_one_process_is_no_different():
    text = SOLUTION.replace("    return 1 + 8 * dim",
                            "    import time\n    time.sleep(99)\n    return 1")
    mark, words = grade.grade_exercise(PAYS, file_of(text))
    line = text[: text.index("time.sleep")].count("\n") + 1
    assert (mark, words) == (grade.WRONG, f"no end: rank 0 is at line {line} of ranks_that_pay")


def test_what_is_printed_started_or_changed_stays_in_the_run(capfd, tmp_path):
    pids = tmp_path / "pids"
    answer = f'''        import os, subprocess, sys, threading, time
        print("noise " * 10000, flush=True)
        print("noise", file=sys.stderr, flush=True)
        os.write(1, b"noise")
        os.system("echo noise")
        open("noise", "w").write("noise")
        threading.Thread(target=time.sleep, args=(99,)).start()
        started = subprocess.Popen(["sleep", "99"])
        open({str(pids)!r}, "a").write(f"{{started.pid}}\\n")
''' + ANSWER
    assert said(answer) == (grade.RIGHT, "")
    assert capfd.readouterr() == ("", "")
    assert not Path("noise").exists()
    assert_ended(pids)


def assert_ended(pids):
    """Of the processes that are noted in a file, those that were killed a moment ago included."""
    noted, end = pids.read_text().split(), time.monotonic() + 10
    while noted and any(map(runs, noted)) and time.monotonic() < end:
        time.sleep(0.01)
    assert noted and not any(map(runs, noted))


def runs(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    return False


@pytest.mark.parametrize(("end", "words"), [
    ("        break\n", "only 1 of 2 steps were taken"),
    ("        return run.no_such\n", "line [0-9]+ of train: AttributeError: .*no_such.*"),
    ("        __import__('os')._exit(0)\n", "rank [01]: the process has ended with status 0")])
def test_a_run_that_ends_early_is_not_right(end, words):
    last = "        run.log(batch, loss, norm, model)\n"
    text = SOLUTION.replace(last, last + end, 1)
    train = SUM._replace(names="train", checks=(Run(2, "--steps=2 --layers=1"),))
    mark, said = grade.grade_exercise(train, file_of(text))
    assert mark == grade.WRONG and re.fullmatch(words, said), said


@pytest.mark.parametrize(("right", "wrong", "words"), [
    ("range(net.ranks - 1)", "range(net.ranks)", "all_gather[,:] "),
    ("to=net.right,\n                     receive",
     "to=net.right)\n        net.exchange(receive",
     "no end: ranks 0, 1, 2 are at line [0-9]+ of all_gather"),
], ids=["rounds", "deadlock"])
def test_a_run_that_trains_nothing_is_judged_too(right, wrong, words):
    """By its problems, of real processes; and a deadlock is named in the student's line."""
    chapter, exercise = TABLE["00.5"]
    text = planted(chapter, exercise, right, wrong)
    mark, said = grade.grade_exercise(exercise._replace(checks=(Run(3),)), file_of(text, chapter))
    assert mark == grade.WRONG and re.match(words, said), said


def test_helpers_are_used_and_other_functions_are_not():
    """A module beside the chapter is found, but only by who wrote it."""
    text = SOLUTION.replace(ANSWER, "        return unchanged(gradient), None\n")
    text = text.replace("class SumOut", "def unchanged(x):\n    return x\n\n\nclass SumOut")
    text = text.replace("return summed(gradient, ctx.group), None", "raise ArithmeticError")
    assert grade.grade_exercise(SUM, file_of(text)) == (grade.RIGHT, "")


def test_a_module_beside_the_chapter_is_found(tmp_path):
    (tmp_path / "my_numbers.py").write_text("EIGHT = 8\n")
    text = SOLUTION.replace("    return 1 + 8 * dim", "    return 1 + EIGHT * dim")
    text = text.replace("import common\n", "import common\nfrom my_numbers import EIGHT\n")
    file = file_of(text, folder=tmp_path)
    assert grade.grade_exercise(PAYS, file) == (grade.RIGHT, "")
    mark, words = grade.grade_exercise(PAYS, file._replace(folder=tmp_path / "other"))
    assert mark == grade.WRONG and "No module named 'my_numbers'" in words


def test_a_wrong_value_is_shown_beside_the_right_one():
    text = SOLUTION.replace("    return 1 + 8 * dim", "    return 8 * dim")
    mark, words = grade.grade_exercise(PAYS, file_of(text))
    assert mark == grade.WRONG and re.match(
        r"\[ranks_that_pay\(dim, 2, 989e12, 450e9\) for dim in \(1024, 8192\)\]: .*item 0", words)
    text = SOLUTION.replace("    return 1 + 8 * dim", "    return 1 / 0 * dim")
    mark, words = grade.grade_exercise(PAYS, file_of(text))
    assert re.fullmatch(r"line \d+ of ranks_that_pay: ZeroDivisionError: division by zero", words)


# ---------------------------------------------------------------------------------- a broken file

BROKEN = '''import math


def one(x):
    return x


class Two:
    """Of three."""

    @staticmethod
    def three(x):
        return {}

    def four(self):
        return 4


def five():
    return 5
'''


@pytest.mark.parametrize(("wrong", "name", "words"), [
    ("x +", "Two.three", "line 13: invalid syntax"),
    ("(x", "Two.three", r"line 13: '\(' was never closed"),
    ("'x", "Two.three", "line 13: unterminated string literal .*"),
    ("'''x", "Two.three", "line 13: unterminated triple-quoted string literal .*"),
    ("[x)", "Two.three", r"line 13: closing parenthesis '\)' does not match .*"),
    ("x\n      y", "Two.three", "line 14: unindent does not match any outer indentation level"),
    ("x\n        if x:", "Two.three",
     "line 16: expected an indented block after 'if' statement on line 14"),
    ("x\n\n    def more(self):", "Two.more",
     r"line 17: expected an indented block after function definition on line 15"),
    ("x\n\n    nonlocal x", "Two", "line 15: no binding for nonlocal 'x' found"),
    ("x\x00", "", "source code string cannot contain null bytes|.*null bytes"),
], ids=["end", "bracket", "string", "text", "brackets", "indent", "if", "def", "class", "null"])
def test_a_function_that_is_no_python_does_not_sink_the_others(wrong, name, words):
    source = BROKEN.format(wrong)
    if not name:
        with pytest.raises(grade.Unreadable, match=words):
            grade.without_faults(source)
        return
    text, tree, faults = grade.without_faults(source)
    assert list(faults) == [name] and re.fullmatch(words, faults[name]), faults
    assert holes.find(tree, "one") and holes.find(tree, "five")
    assert bool(holes.find(tree, "Two.four")) == (name != "Two")
    assert text.count("\n") == source.count("\n")       # so that lines keep their numbers


@pytest.mark.parametrize(("text", "words"), [
    ("return 1\n", "line 1: 'return' outside function"), ("x = = 1\n", "line 1: invalid syntax"),
    ("def f():\n    pass\n\nx = (\n", r"line 4: '\(' was never closed")])
def test_what_is_wrong_outside_of_functions_is_wrong_with_the_file(text, words):
    with pytest.raises(grade.Unreadable, match=words):
        grade.without_faults(text)


def test_of_a_broken_function_the_exercise_says_so_and_the_others_are_graded(tmp_path, short_table,
                                                                             no_runs):
    folder = written(tmp_path, SOLUTION.replace(ANSWER, "        return gradient,, None\n"))
    results = list(grade.grade(folder, exercises.EXERCISES))
    fault = f"line {LINE}: invalid syntax"
    assert [(r.number, r.mark, r.words) for r in results] == [
        ("04.2", "✗", fault), ("04.7", "✓", ""), ("04", "✗", "as 04.2")]


def test_files_that_are_missing_or_no_text_cost_a_line(tmp_path, short_table, no_runs):
    path = tmp_path / f"{CHAPTER}.py"

    def line(*numbers):
        chosen = exercises.chosen(numbers)
        [result] = grade.grade(tmp_path, chosen)
        assert result.mark == "✗" and result.exercises == len(chosen[CHAPTER])
        return f"{result.number} {result.what}: {result.words}"

    assert line() == "04 all of it: 04_tensor_parallel.py is not there"
    assert line("04.7") == "04.7 who pays: 04_tensor_parallel.py is not there"
    path.mkdir()
    assert line() == "04 all of it: 04_tensor_parallel.py is no file"
    path.rmdir()
    os.mkfifo(path)
    assert line() == "04 all of it: 04_tensor_parallel.py is no file"
    path.unlink()
    path.symlink_to("nowhere")
    assert line() == "04 all of it: 04_tensor_parallel.py is not there"
    path.unlink()
    for data, words in [(b"x = '\xff'", "is no text in UTF-8"),
                        (b"# coding: no-such\n", "is no text in UTF-8"),
                        (b"#" * 2_000_000, "is larger than 1,000,000 bytes"),
                        (b"x = " + b"(" * 5000, "line 1: too many nested parentheses"),
                        (b"\x1b[2J", r"line 1: invalid non-printable character.*")]:
        path.write_bytes(data)
        assert re.fullmatch(f"04 all of it: 04_tensor_parallel.py .*({words})", line())
        assert line().isprintable()
    path.write_text("def ranks_that_pay(dim, width, flops, bandwidth):\n    pass\n")
    assert [(r.mark, r.words) for r in grade.grade(tmp_path, exercises.EXERCISES)] == [
        ("✗", f"there is no SumOut.backward in {CHAPTER}.py"), ("·", "not begun"),
        ("·", "not begun: 04.7")]


def test_an_exercise_of_two_functions_names_the_one_that_is_not_begun(no_runs):
    both = SUM._replace(names="SumOut.forward SumOut.backward")
    text = holes.cut(SOLUTION, "SumOut.backward", "?", "?")
    assert grade.grade_exercise(both, file_of(text)) == (grade.OPEN, "not begun: SumOut.backward")


# --------------------------------------------------------------------------------------- the report

def test_two_students_are_graded_in_one_command(tmp_path, short_table, no_runs, capsys):
    """And the report is written as Gradescope and JUnit want it."""
    written(tmp_path / "class" / "ada")
    text = SOLUTION.replace("1 + 8 * dim", "8 * dim")
    written(tmp_path / "class" / 'bob & "<co>"', holes.cut(text, "SumOut.backward", "?", "?"))
    (tmp_path / "class" / ".git").mkdir()
    (tmp_path / "class" / "notes.txt").touch()
    files = [tmp_path / "new" / f"results.{suffix}" for suffix in ("json", "xml")]
    status = grade.main([str(tmp_path / "class"), f"--json={files[0]}", f"--junit={files[1]}"])
    output, errors = capsys.readouterr()
    assert (status, errors) == (1, "")
    assert re.sub(r"\d+ s\n", "N s\n", output) == '''ada
04.2  SumOut.backward    ✓
04.7  who pays           ✓
04    the whole chapter  ✓
2 of 2 right, 0 wrong, 0 not begun; 4 of 4 points; N s

bob & "<co>"
04.2  SumOut.backward    ·  not begun
04.7  who pays           ✗  it is not the solution
04    the whole chapter  ·  not begun: 04.2
0 of 2 right, 1 wrong, 1 not begun; 0 of 4 points; N s

'''
    results = json.loads(files[0].read_text())
    assert len(results["tests"]) == 6 and "2 of 4 right" in results["output"]
    assert results["tests"][1] == {
        "name": "ada: 04.7 who pays", "score": 2, "max_score": 2, "status": "passed",
        "output": "right", "visibility": "visible"}
    assert results["tests"][4] == {
        "name": 'bob & "<co>": 04.7 who pays', "score": 0, "max_score": 2, "status": "failed",
        "output": "it is not the solution", "visibility": "visible"}
    ada, bob = xml.parse(files[1]).getroot()
    assert ada.attrib["name"] == "ada" and ada.attrib["failures"] == "0"
    assert (bob.attrib["tests"], bob.attrib["failures"], bob.attrib["skipped"]) == ("3", "1", "2")
    assert bob[1].attrib["classname"] == 'bob & "<co>"'
    assert bob[1].find("failure").attrib["message"] == "it is not the solution"


def test_one_student_exercise_and_level(tmp_path, short_table, no_runs, capsys):
    written(tmp_path, holes.cut(SOLUTION, "SumOut.backward", "?", "?"))
    for words, status, marks in [(["04.7"], 0, "✓"), (["04.2"], 1, "·"), (["--level=2"], 0, "✓"),
                                 (["04", "04.7"], 1, "·✓·"), ([], 1, "·✓·")]:
        assert grade.main([str(tmp_path), *words]) == status
        output = capsys.readouterr().out
        assert "".join(re.findall(r"  ([✓✗·])", output)) == marks
    file = tmp_path / "results.json"
    grade.main([str(tmp_path), "04.7", f"--json={file}"])
    assert [test["name"] for test in json.loads(file.read_text())["tests"]] == ["04.7 who pays"]


def test_in_a_copy_of_the_course_its_own_chapters_are_not_what_is_graded(
        tmp_path, short_table, no_runs, monkeypatch, capsys):
    for student in ("ada", "bob"):
        written(tmp_path / student)                     # the solution
        (tmp_path / student / "lab").mkdir()
        (tmp_path / student / "lab" / "exercises.py").touch()
    written(tmp_path / "ada" / "exercises", holes.cut(SOLUTION, "SumOut.backward", "?", "?"))
    assert grade.main([str(tmp_path), "04.2"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["ada", "04.2  SumOut.backward    ·  not begun"]
    assert f"04.2  SumOut.backward    ✗  {CHAPTER}.py is not there" in lines
    monkeypatch.chdir(tmp_path / "ada")
    assert grade.main([".", "04.7"]) == 0
    monkeypatch.chdir(tmp_path / "bob")
    with pytest.raises(SystemExit):
        grade.main(["."])
    assert "FOLDER '.' has no exercise" in capsys.readouterr().err


def test_long_words_go_on_below():
    result = grade.Result("04.2", "SumOut", grade.WRONG, "a reason " * 20, 1, 0.0)
    first, *more = grade.lines_of(result, (6, 10))
    assert first.startswith("04.2    SumOut      ✗  a reason") and len(more) == 2
    assert all(line.startswith(" " * 23) and len(line) <= 100 for line in more)


@pytest.mark.parametrize(("words", "line"), [
    (["nowhere"], "FOLDER 'nowhere' is not there; `python -m lab.exercises --write nowhere` writes "
                  "them there"),
    ([""], "FOLDER is missing; `make exercises` writes exercises/, which would work"),
    (["empty"], "FOLDER 'empty' has no exercise such as 04_tensor_parallel.py, nor has a folder "
                "in it; `python -m lab.exercises --write empty` writes them there"),
    (["ours", "04.99"], "there is no EXERCISE '04.99'; `python -m lab.exercises` lists all; 04.7 "
                        "in place of 04.99 would work"),
    (["ours", "--limit=0"], "--limit: 0 is no whole number in [1, 101); --limit 5 would work"),
    (["ours", "04.7", "--level=1"], "--level 1: none of these exercises is of that level; without "
                                     "--level would work"),
    (["ours", "--json=x.xml"], "--json: cannot write 'x.xml'; --json results.json would work"),
    ([f"ours/{CHAPTER}.py"], f"FOLDER 'ours/{CHAPTER}.py': Not a directory; ours would "
                             "work"),
])
def test_what_is_refused(words, line, tmp_path, short_table, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    written(tmp_path / "ours")
    with pytest.raises(SystemExit) as leaving:
        grade.main(words)
    assert leaving.value.code == 2 and capsys.readouterr().err == f"error: {line}\n"


@pytest.mark.parametrize("number", [
    signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_the_grader_is_ended_with_all_that_it_has_started(number, tmp_path):
    pids = tmp_path / "pids"
    answer = f'''        import os
        open({str(pids)!r}, "a").write(f"{{os.getpid()}}\\n")
        while True:
            pass
'''
    written(tmp_path, SOLUTION.replace(ANSWER, answer))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-m", "lab.grade", tmp_path, "04.2", "--limit=99"],
                               cwd=ROOT, **pipes)
    end = time.monotonic() + 60
    while not pids.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(number)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + number and output == ""
    assert errors == ("error: interrupted\n" if number == signal.SIGINT else "")
    assert_ended(pids)
