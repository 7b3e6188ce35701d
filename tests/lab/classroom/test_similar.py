"""Functions that are alike: copied, renamed and reordered ones are, and others are not."""

import ast
import textwrap
import time

import pytest

from lab.classroom import exercises, grade, holes, similar
from tests.faults import wrong_answers

CHAPTER, NUMBER, NAME = "04_tensor_parallel", "04.3", "VocabParallelLoss.forward"
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
    "another method": COPIED.replace("parameters", "buffers"),
    "another name of the chapter": COPIED.replace("net(x", "part(x"),
    "names in each other's place": COPIED.replace("t / n, max", "n / t, max"),
    "arguments in another order": COPIED.replace("net, data, c)", "data, net, c)"),
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


def test_a_copy_that_is_renamed_and_reordered_is_alike():
    assert shape(MINE) == shape(COPIED)


@pytest.mark.parametrize("what", OTHERS)
def test_what_differs_is_not_alike(what):
    assert OTHERS[what] != COPIED and shape(OTHERS[what]) != shape(MINE)


def test_parallel_statements_may_change_places():
    """Whose names differ in nothing but what is done with them."""
    one = "def f(x):\n    q = g(x)\n    k = g(x)\n    return q - 2 * k, q\n"
    other = "def f(x):\n    a = g(x)\n    b = g(x)\n    return b - 2 * a, b\n"
    wrong = "def f(x):\n    a = g(x)\n    b = g(x)\n    return b - 2 * a, a\n"
    assert shape(one) == shape(other) != shape(wrong)


class Copied(ast.NodeTransformer):
    """Each name that a student has chosen is another one, and there is more that says nothing."""

    def __init__(self, function, known):
        self.chosen = similar.chosen_names(function, known)

    def generic_visit(self, node):
        super().generic_visit(node)
        field = similar.NAMED.get(type(node))
        if field and getattr(node, field) in self.chosen:
            setattr(node, field, f"copied_{getattr(node, field)}")
        if isinstance(node, ast.FunctionDef):
            node.body = [*ast.parse("'A text'; copied: int").body, *node.body, ast.Pass()]
        return node


@pytest.mark.parametrize("chapter", exercises.EXERCISES)
def test_each_solution_is_alike_its_copy_and_no_wrong_answer(chapter):
    text, these = exercises.solution(chapter), exercises.EXERCISES[chapter]
    ours, copy = holes.parsed(text), ast.parse(text)
    known = holes.bound(ours.body)
    for name in (name for exercise in these for name in exercise.functions):
        node = holes.find(copy, name)
        Copied(node, known).generic_visit(node).name = name.split(".")[-1]
    found = similar.functions_of(ours, these, known)
    theirs = similar.functions_of(copy, these, known)
    assert {key: one[1:] for key, one in found.items()} == {
        key: one[1:] for key, one in theirs.items()}

    for exercise in these:
        for name in exercise.functions:
            ours_alone = source_of(text, holes.find(ours, name))
            for answer in wrong_answers(exercise.number):
                wrong = ours_alone.replace(answer.right, answer.wrong)
                if sorted(wrong.split()) != sorted(ours_alone.split()):     # else it is in order
                    assert shape(wrong, known) != shape(ours_alone, known), answer


def source_of(text, node):
    return "\n".join(text.split("\n")[node.lineno - 1 : node.end_lineno])


# -------------------------------------------------------------------------------------- a class


FORWARD = {what: text.strip().replace("def steps", "def forward") for what, text in
           {"mine": MINE, "copied": COPIED, **OTHERS}.items()}


@pytest.fixture
def hand_in(tmp_path):
    """hand_in("ada", text): a student's chapter, or this function in it; gives its line."""
    holed = exercises.with_holes(CHAPTER)
    node = holes.find(ast.parse(holed), NAME)

    def write(student, text):
        if text in FORWARD.values():
            lines = holed.split("\n")
            lines[node.lineno - 1 : node.end_lineno] = textwrap.indent(text, "    ").split("\n")
            text = "\n".join(lines)
        (tmp_path / student).mkdir()
        (tmp_path / student / f"{CHAPTER}.py").write_text(text)
        return node.lineno

    return write


def said(folder, capsys, *words):
    assert grade.main(["--similar", str(folder), *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_pairs_are_named_with_their_lines_and_the_solution(hand_in, capsys, tmp_path):
    line = hand_in("ada", FORWARD["mine"])
    hand_in("bob", FORWARD["copied"])
    hand_in("eve", FORWARD["another idea"])
    hand_in("open", exercises.with_holes(CHAPTER))
    hand_in("zoe", solution := exercises.solution(CHAPTER))
    theirs = holes.find(ast.parse(solution), NAME).lineno
    zoe, backward, forward, ada, mine, last = said(tmp_path, capsys, NUMBER)
    assert zoe.startswith("zoe and the solution, weight ") and "backward: lines" in backward
    assert forward == f"    {NUMBER}  {NAME}: lines {theirs} and {theirs}"
    assert ada.startswith("ada and bob, weight ")
    assert mine == f"    {NUMBER}  {NAME}: lines {line} and {line}"
    assert last.startswith("2 pairs, of 5 students")


def test_what_most_of_a_class_have_says_nothing_and_what_few_have_says_less(hand_in):
    shapes = {what: (1, shape(text), 60) for what, text in FORWARD.items()}

    def weights(*answers):
        found = {similar.SOLUTION: {}} | {f"student {i}": {("04.3", "f"): shapes[what]}
                                          for i, what in enumerate(answers)}
        return [these[0].weight for these in similar.alike(found).values()]

    assert weights("mine", "copied") == [60] and weights("mine", "another idea") == []
    assert weights("mine", "copied", "mine") == []      # all have it
    others = "another idea", "another number", "another method"
    assert weights("mine", "copied", "mine", *others) == [30, 30, 30]
    assert weights("mine", "copied", "mine", "copied", *others) == []


def test_hostile_files_cost_nothing(hand_in, capsys, tmp_path):
    solution = exercises.solution(CHAPTER)
    hostile = {
        "no python": "def f(:\n", "nested": f"x = {'(' * 99}1{')' * 99}\n" + solution,
        "deep": "x = " + "-" * 50_000 + "1\n", "large": "#" * 2_000_000, "empty": "",
        "long number": FORWARD["mine"].replace("0.5", "0x" + "f" * 200_000),
        "long sum": FORWARD["mine"].replace("0.5", " + ".join(["1"] * 900)),
        "many nodes": FORWARD["mine"].replace("0.5", f"[{'1, ' * 200_000}]"),
        "\x1b[2J odd": FORWARD["mine"], "ada": FORWARD["mine"]}
    FORWARD.update({name: text for name, text in hostile.items() if text.startswith("def forward")})
    for student, text in hostile.items():
        hand_in(student, text)
    begin = time.process_time()
    *lines, last = said(tmp_path, capsys, NUMBER)
    assert time.process_time() - begin < 20
    assert {line.split(",")[0] for line in lines if line[0] != " "} == {
        "\\x1b[2J odd and ada", "nested and the solution"}
    assert last.startswith("2 pairs, of 10 students")


@pytest.mark.parametrize("flags", ["--csv=grades.csv", "--sandbox", "--due=2026-01-01"])
def test_flags_of_grading_mean_nothing_beside_it(hand_in, capsys, tmp_path, flags):
    hand_in("ada", exercises.solution(CHAPTER))
    with pytest.raises(SystemExit) as leaving:
        grade.main(["--similar", str(tmp_path), NUMBER, flags])
    [line] = capsys.readouterr().err.splitlines()
    assert leaving.value.code == 2 and "means nothing beside --similar" in line
