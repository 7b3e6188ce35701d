"""Functions that are alike: copied, renamed and reordered ones are, and others are not."""

import ast
import textwrap

import pytest

from lab.classroom import checks, exercises, grade, holes, similar
from tests.lab.classroom.two_exercises import CHAPTER, written

NUMBER, NAME = "04.3", "VocabParallelLoss.forward"
MINE = '''
def steps(model, batches, clip):
    """What it does."""
    total: float = 0.0
    count = 0
    for tokens, targets in batches:     # each of them
        loss = model(tokens, targets, reduce=True, shift=1)
        total += loss.item()
        count += (targets != -100).sum()
    if clip > 0.5:
        norms = [p.grad.norm() for p in model.parameters()]
        return total / count, max(norms)
    return total / count, None
'''
COPIED = '''
def steps(net, data, c):
    n = 0
    t = 0.0
    for x, y in data:
        l = net(x, y, shift=1, reduce=True)
        n += (y != -100).sum()
        t += l.item()
    if c > 0.5:
        all_of_them = [w.grad.norm() for w in net.parameters()]
        return t / n, max(all_of_them)
    return t / n, None
'''
OTHERS = {
    "another number": COPIED.replace("0.5", "0.6"),
    "names in each other's place": COPIED.replace("t / n, max", "n / t, max"),
    "one statement more": COPIED.replace("    n = 0\n", "    n = 0\n    n += 0\n"),
    "another idea": "def steps(model, batches, clip):\n"
                    "    losses = [model(*batch, shift=1, reduce=True) for batch in batches]\n"
                    "    total = torch.stack(losses).sum().item()\n"
                    "    count = sum((y != -100).sum() for _, y in batches)\n"
                    "    norm = max(p.grad.norm() for p in model.parameters())\n"
                    "    return (total / count, norm if clip > 0.5 else None)\n",
}


def shape(text, known=frozenset({"torch", "part"})):
    return similar.Shape(ast.parse(textwrap.dedent(text)).body[0], known).digest


def test_a_copy_that_is_renamed_and_reordered_is_alike_and_others_are_not():
    assert shape(MINE) == shape(COPIED)
    for what, other in OTHERS.items():
        assert other != COPIED and shape(other) != shape(MINE), what


# -------------------------------------------------------------------------------------- a class


FORWARD = {what: text.strip().replace("def steps", "def forward") for what, text in
           {"mine": MINE, "copied": COPIED, **OTHERS}.items()}


def test_pairs_are_named_with_their_lines_and_hostile_files_cost_nothing(tmp_path, monkeypatch,
                                                                         capsys):
    monkeypatch.setattr(checks, "warm_up", lambda: None)
    solution, holed = exercises.solution(CHAPTER), exercises.with_holes(CHAPTER)
    line, theirs = (holes.find(ast.parse(text), NAME).lineno for text in (holed, solution))
    last = holes.find(ast.parse(holed), NAME).end_lineno
    many_nodes = FORWARD["mine"].replace("0.5", f"[{'1, ' * 200_000}]")
    functions = {"ada": FORWARD["mine"], "\x1b[2J odd": FORWARD["copied"],
                 "eve": FORWARD["another idea"], "many nodes": many_nodes}
    texts = {"no python": "def f(:\n", "deep": "x = " + "-" * 50_000 + "1\n", "empty": "",
             "large": "#" * 2_000_000, "open": holed, "copy": solution}
    for student, function in functions.items():
        lines = holed.split("\n")
        lines[line - 1 : last] = textwrap.indent(function, "    ").split("\n")
        texts[student] = "\n".join(lines)
    for student, text in texts.items():
        written(tmp_path / student, text)

    assert grade.main(["--similar", str(tmp_path), NUMBER]) == 0
    copy, _, forward, odd, mine, end = capsys.readouterr().out.splitlines()
    assert copy.startswith("copy and the solution, weight ")
    assert forward == f"    {NUMBER}  {NAME}: lines {theirs} and {theirs}"
    assert odd.startswith("\\x1b[2J odd and ada, weight ")
    assert mine == f"    {NUMBER}  {NAME}: lines {line} and {line}"
    assert end.startswith(f"2 pairs, of {len(texts)} students")
    with pytest.raises(SystemExit) as leaving:
        grade.main(["--similar", str(tmp_path), NUMBER, "--csv=grades.csv"])
    [refused] = capsys.readouterr().err.splitlines()
    assert leaving.value.code == 2 and "--csv" in refused


def test_what_most_of_a_class_have_says_nothing_and_what_few_have_says_less():
    shapes = {what: (1, shape(text), 60) for what, text in FORWARD.items()}

    def weights(*answers):
        found = {similar.SOLUTION: {}} | {f"student {i}": {("04.3", "f"): shapes[what]}
                                          for i, what in enumerate(answers)}
        return [these[0].weight for these in similar.alike(found).values()]

    assert weights("mine", "copied") == [60] and weights("mine", "another idea") == []
    assert weights("mine", "copied", "mine") == []  # all have it
    others = "another idea", "another number", "one statement more"
    assert weights("mine", "copied", "mine", *others) == [30, 30, 30]
    assert weights("mine", "copied", "mine", "copied", *others) == []
