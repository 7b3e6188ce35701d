"""What students get: no solution is in it, and it grades what they write."""

import json
import os
import re
import subprocess
import sys
import time

import pytest

from lab.classroom import bundle, checks, exercises, holes
from tests.conftest import ROOT

RUN = 5                 # so many lines of a solution after each other are no accident

# What can only be tried once another exercise is solved: 09.1, and 03.1.
AFTER = "09.2", "11.6"

# Solved otherwise than ours: a broadcast that counts distances down, and a bucket without move_in.
BROADCAST = '''
    span = 1
    while span < net.ranks:
        span *= 2
    while span > 1:
        half = span // 2
        if net.rank % span == 0 and net.rank + half < net.ranks:
            net.exchange(send=x, to=net.rank + half)
        elif net.rank % span == half:
            net.exchange(receive=x, source=net.rank - half)
        else:
            net.exchange()
        span = half
'''
BUCKET = {
    "Bucket.__init__": '''
        super().__init__(module, group)
        self.buckets = fill_buckets(self.trained, capacity)
        self.memory, self.place = [], {}
        for number, bucket in enumerate(self.buckets):
            begin = 0
            self.memory.append(torch.zeros(sum(p.numel() for p in bucket),
                                           dtype=bucket[0].grad_dtype))
            for p in bucket:
                self.place[p] = number, slice(begin, begin + p.numel())
                begin += p.numel()
''',
    "Bucket.move_in": '''
        pass
''',
    "Bucket.gradient_is_ready": '''
        number, where = self.place[p]
        mine = self.memory[number][where]
        if p.grad is not None and p.grad.data_ptr() != mine.data_ptr():
            mine[:] = p.grad.reshape(-1)
        p.grad = mine.reshape(p.shape)
        super().gradient_is_ready(p)
''',
    "Bucket.payload": '''
        for p in self.buckets[i]:
            if p.grad is None:
                number, where = self.place[p]
                self.memory[number][where] = 0
                p.grad = self.memory[number][where].reshape(p.shape)
        return self.memory[i]
'''}


@pytest.fixture(scope="module")
def texts():
    return bundle.texts()


def code_of(text):
    """Its lines without indents and comments."""
    lines = [bundle.COMMENT.sub("", line).strip() for line in text.split("\n")]
    return [line for line in lines if line]


def runs_of(lines, length):
    return {tuple(lines[i : i + length]) for i in range(len(lines) - length + 1)}


def test_no_solution_is_in_it(texts):
    """No body of a function, nor five of its lines after each other, in any file but its own."""
    there = {name: code_of(text) for name, text in texts.items()}
    found = {length: {} for length in range(1, RUN + 1)}
    for name, lines in there.items():
        for length, runs in found.items():
            for run in runs_of(lines, length):
                runs.setdefault(run, set()).add(name)
    solutions, quoted = 0, []
    for chapter, those in exercises.EXERCISES.items():
        source = exercises.solution(chapter)
        for name in (name for exercise in those for name in exercise.functions):
            lines = bundle.code_of(source, holes.find(holes.parsed(source), name))
            solutions += 1
            assert tuple(lines) not in runs_of(there[f"{chapter}.py"], len(lines)), name
            for run in runs_of(lines, min(RUN, len(lines))):
                others = found[len(run)].get(run, set()) - {f"{chapter}.py"}
                others -= {"01_single_gpu.py"} if name == "train_step" else set()   # its end
                if others and sum(map(len, run)) > 30:
                    quoted.append((chapter, name, others, run))
    assert solutions > 150 and quoted == []


def test_what_is_found_would_be_found(texts):
    """A solution that is left in is seen by the test above."""
    name = "02_data_parallel.py"
    text = exercises.solution("02_data_parallel")
    with pytest.raises(AssertionError):
        test_no_solution_is_in_it(texts | {name: text})
    with pytest.raises(AssertionError):
        test_no_solution_is_in_it(texts | {"lab/other.py": text})


def test_it_has_what_it_imports_and_no_more(texts):
    """Of the course, and of what is to be installed."""
    assert not any(name.startswith(("lab/museum", "tests", "lab/page")) for name in texts)
    assert not any("predictions" in name or "exhibits" in name for name in texts)
    for name in texts:
        if name.endswith(".py"):
            for path in bundle.imported(ROOT / name):
                assert path.relative_to(ROOT).as_posix() in texts, (name, path)
    imported = {words[1].split(".")[0] for name, text in texts.items() if name.endswith(".py")
                for words in map(str.split, text.split("\n"))
                if len(words) > 1 and words[0] in ("import", "from")}
    installed = {re.match(r"[\w-]+", line)[0] for line in texts["requirements.txt"].splitlines()}
    everything = "".join((ROOT / name).read_text() for name in bundle.REQUIRED)
    assert installed <= imported and all(name in everything for name in installed)
    needed = {"torch", "numpy", "matplotlib", "psutil", "triton", "spmd_types"}
    assert imported & needed <= installed


@pytest.mark.full
@pytest.mark.parametrize(("chapter", "number"), [
    (chapter, exercise.number) for chapter, those in exercises.EXERCISES.items()
    for exercise in those if exercise.number not in AFTER])
def test_each_exercise_can_be_tried_while_all_others_are_open(texts, chapter, number):
    checks.warm_up()
    [exercise] = [one for one in exercises.EXERCISES[chapter] if one.number == number]
    solution = exercises.solution(chapter)
    text = holes.graft(texts[f"{chapter}.py"], solution, exercise.functions).source
    values = [check for check in exercise.checks if not checks.is_run(check)]
    outcomes = [checks.outcome(chapter, text, solution, check) for check in values]
    assert any(outcome.right for outcome in outcomes)
    assert all(outcome.right or "NotImplementedError" in str(outcome.errors)
               for outcome in outcomes)


def solved(folder):
    """Write the answers above into a bundle."""
    path = folder / "00_collectives.py"
    path.write_text(put(path.read_text(), "broadcast", BROADCAST))
    path = folder / "02_data_parallel.py"
    for name, body in BUCKET.items():
        path.write_text(put(path.read_text(), name, body))


def put(text, name, body):
    lines, node = text.split("\n"), holes.find(holes.parsed(text), name)
    lines[node.body[-1].lineno - 1 : node.end_lineno] = body.strip("\n").split("\n")
    return "\n".join(lines)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    checks.warm_up()
    folder = tmp_path_factory.mktemp("home") / "bundle"
    bundle.write(folder, ["00.2", "02.4"])
    return folder


def make(folder, *words):
    """make of the bundle, in an environment that knows nothing of the course."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(["make", *words, f"PY={sys.executable}"], cwd=folder, env=environment,
                          capture_output=True, text=True)


def test_who_solves_otherwise_gets_the_points_at_home(written):
    """Two exercises, with all others open; and one that is then wrong."""
    solved(written)
    begin = time.monotonic()
    after = make(written, "grade", "ONLY=00.2 02.4 02.3")
    assert "2 of 3 right, 0 wrong, 1 not begun" in after.stdout, after
    assert time.monotonic() - begin < 120               # on a quiet machine: 10
    path = written / "00_collectives.py"
    path.write_text(path.read_text().replace("net.rank + half < net.ranks", "True"))
    wrong = make(written, "grade", "ONLY=00.2")
    assert wrong.returncode == 0 and "rank 2 of 3 sends to rank 3" in wrong.stdout


def test_the_teacher_gives_them_too(written):
    """Who grades what was handed in: the whole folder, or its chapters alone."""
    from lab.classroom.students import students_in

    assert students_in(written.parent) == {"bundle": written}


@pytest.mark.full
def test_a_hint_is_had_and_a_bundle_writes_no_bundle(written):
    assert "02.1" in make(written, "hint", "ONLY=02.1").stdout
    asked = subprocess.run([sys.executable, "-m", "lab.bundle"], cwd=written, capture_output=True,
                           text=True, env={**os.environ, "PYTHONPATH": ""})
    assert asked.returncode != 0                        # it is not even there


def test_answers_are_plain_numbers_and_the_same_again(written):
    found = json.loads((written / "lab/classroom/answers.json").read_text())
    again = bundle.answers(["00.2"])
    assert again and again.items() <= found.items()


def test_no_course_and_no_bundle_is_written_over_by_accident(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bundle, "write", lambda folder, say: said.append(folder))
    said, path = [], tmp_path / "common.py"
    path.touch()
    for words, says in ([f"--out={tmp_path}"], "has been written before; --force would work"), (
            [f"--out={ROOT}", "--force"], "is the course itself; --out bundle would work"):
        with pytest.raises(SystemExit) as leaving:
            bundle.main(words)
        assert leaving.value.code == 2 and says in capsys.readouterr().err
    assert said == [] and bundle.main([f"--out={tmp_path}", "--force"]) == 0 and said == [tmp_path]
