"""Students whose functions are the same, up to names and the order of statements.

    python -m lab.grade --similar class             all pairs, of all exercises
    python -m lab.grade --similar class 04 05.2     of a chapter, and of one exercise

A function's shape is what is left of its tree without comments, docstrings, annotations, the names
that a student has chosen, the order of statements in a block and that of keywords. Names of the
chapter, attributes, numbers and texts stay. Two names are told apart by where they stand.

Not all that is alike was copied. A short function is alike by nature: one of fewer than SHORT nodes
says nothing, nor does a shape that more than half of those have who wrote the function. What is
left weighs its nodes, over how many others have it, too. A pair is worth a talk, and no proof.

What is not seen: the same idea in other words, such as a loop for a comprehension, a + b for b + a,
or one line in two; a part of a function; and what is copied from elsewhere.
"""

import ast
import builtins
import contextlib
import hashlib
import itertools
from collections import Counter, defaultdict
from typing import NamedTuple

from lab.classroom import holes
from lab.classroom.students import Unreadable, read

# Not what imports torch: see lab/classroom/checks.py.

SHORT = 40              # nodes of a function's tree
LARGE = 4000            # nodes: what has more is no answer
ROUNDS = 3              # in which names are told apart by the statements that they stand in
SOLUTION = "the solution"
DROPPED = {"annotation", "returns", "type_comment", "type_params", "simple", "ctx", "kind"}
NAMED = {ast.Name: "id", ast.arg: "arg", ast.FunctionDef: "name", ast.ClassDef: "name",
         ast.ExceptHandler: "name", ast.alias: "asname"}    # where a student's name may stand


# ------------------------------------------------------------------------------------- the shape

class Shape:
    """Of a function. known: the names that mean the same in each student's file. Raises
    RecursionError where it is nested too deeply, and ValueError where a number is too long."""

    def __init__(self, function, known):
        self.chosen, self.labels = chosen_names(function, known), {}
        for i, node in enumerate(ast.walk(function.args)):
            if isinstance(node, ast.arg):
                self.labels[node.arg] = f"argument {i}"
        for _ in range(ROUNDS):
            self.places = defaultdict(list)
            self.note_names(function)
            self.labels = {name: digest(self.labels.get(name), *sorted(places))
                           for name, places in self.places.items()}
        self.digest = self.of(function)

    def of(self, node):
        """A digest of a node and all that is below it."""
        if isinstance(node, ast.AST):
            return digest(kind_of(node), *(self.of_field(node, *one) for one in fields_of(node)))
        if isinstance(node, list):
            found = [self.of(part) for part in node]
            return digest(*(sorted(found) if has_no_order(node) else found))
        return repr(node)

    def of_field(self, node, field, value):
        is_chosen = NAMED.get(type(node)) == field and value in self.chosen
        return field, self.labels.get(value, "") if is_chosen else self.of(value)

    def note_names(self, node):
        """Note of each name that is chosen where it stands: in which statement, as which of its
        nodes. What is below a statement of several lines stands for itself."""
        inner, outer = [], [node]
        head = digest(kind_of(node), *(self.of_field(node, field, value)
                                       for field, value in fields_of(node) if not is_block(value)))
        for i, part in enumerate(outer):                # which grows
            for field, value in fields_of(part):
                if is_block(value):
                    inner += value
                elif NAMED.get(type(part)) == field and value in self.chosen:
                    self.places[value].append(digest(head, i))
                else:
                    outer += nodes_in(value)
        for part in inner:
            self.note_names(part)


def nodes_in(value):
    return [part for part in (value if isinstance(value, list) else [value])
            if isinstance(part, ast.AST)]


def chosen_names(function, known):
    """Those that a student has chosen: the function binds them, or they are a helper's."""
    found = {function.name}
    for node in nodes_of(function):
        name = getattr(node, NAMED[type(node)]) if type(node) in NAMED else None
        is_read = isinstance(getattr(node, "ctx", None), ast.Load)
        if name and not (is_read and (name in known or hasattr(builtins, name))):
            found.add(name)
    return found - {function.name}


def nodes_of(node):
    """All that are looked at, below a node and with it."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        for _, value in fields_of(node):
            waiting += nodes_in(value)


def fields_of(node):
    """(name, value) of what a node consists of; `x: int = 1` is `x = 1`."""
    for field, value in ast.iter_fields(node):
        if field not in DROPPED:
            if field == "target" and isinstance(node, ast.AnnAssign):
                field, value = "targets", [value]
            yield field, [part for part in value if not says_nothing(part)] if isinstance(
                value, list) else value


def kind_of(node):
    return "Assign" if isinstance(node, ast.AnnAssign) else type(node).__name__


def says_nothing(statement):
    """A docstring or another text, `...`, `pass`, and `x: int`."""
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    is_type = isinstance(statement, ast.AnnAssign) and statement.value is None
    return is_text or is_type or isinstance(statement, ast.Pass)


def is_block(value):
    return isinstance(value, list) and isinstance(
        next(iter(value), None), ast.stmt | ast.excepthandler | ast.match_case)


def has_no_order(value):
    return is_block(value) or isinstance(next(iter(value), None), ast.keyword)


def digest(*parts):
    return hashlib.blake2b(repr(parts).encode(errors="surrogatepass"), digest_size=12).hexdigest()


# -------------------------------------------------------------------------------------- the class

class Alike(NamedTuple):
    """A function of an exercise that two have alike."""
    number: str
    name: str
    lines: tuple            # at which it begins, of each of both
    weight: float


def functions_of(tree, exercises, known):
    """{(number, name): (its line, its shape's digest, its size)} of the functions that somebody has
    written, and that are large enough to say something."""
    found = {}
    for exercise in exercises:
        for name in exercise.functions:
            node = holes.find(tree, name)
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not holes.is_hole(node):
                size = sum(1 for _ in itertools.islice(nodes_of(node), LARGE + 1))
                if SHORT <= size <= LARGE:
                    with contextlib.suppress(RecursionError, ValueError):
                        shape = Shape(node, known).digest
                        found[exercise.number, name] = node.lineno, shape, size
    return found


def written(folders, chosen):
    """{student: what functions_of finds}, the solution among them. folders: {student: folder};
    chosen: {chapter: its exercises}. What cannot be read has none."""
    from lab.classroom.exercises import solution

    found = {SOLUTION: {}} | {student: {} for student in folders}
    for chapter, exercises in chosen.items():
        tree = holes.parsed(solution(chapter))
        known = holes.bound(tree.body)
        found[SOLUTION] |= functions_of(tree, exercises, known)
        for student, folder in folders.items():
            try:
                file = read(folder, chapter)
            except (Unreadable, RecursionError, MemoryError):
                continue
            found[student] |= functions_of(file.tree, exercises, known)
    return found


def alike(found):
    """{(one, another): [Alike]} of what `written` gives, the heaviest pair first."""
    students = [student for student in found if student != SOLUTION]
    wrote = Counter(key for student in students for key in found[student])
    have = Counter((key, shape) for student in students
                   for key, (_, shape, _) in found[student].items())
    pairs = defaultdict(list)
    for one, another in itertools.combinations([*students, SOLUTION], 2):
        for key in found[one].keys() & found[another].keys():
            (line, shape, size), (other, same, _) = found[one][key], found[another][key]
            count = have[key, shape]
            if shape == same and (count <= 2 or count <= wrote[key] / 2):
                weight = size / max(count - (another != SOLUTION), 1)
                pairs[one, another].append(Alike(*key, (line, other), weight))
    weigh = lambda item: -sum(one.weight for one in item[1])
    return dict(sorted(((pair, sorted(these)) for pair, these in pairs.items()), key=weigh))


def report(folders, chosen):
    """The lines that are printed."""
    from lab.cli.refusals import one_line

    found = written(folders, chosen)
    pairs = alike(found)
    for (one, another), these in pairs.items():
        weight = sum(alike.weight for alike in these)
        yield f"{one_line(one)} and {one_line(another)}, weight {weight:.0f}"
        for number, name, (first, second), _ in these:
            yield f"    {number}  {name}: lines {first} and {second}"
    count = sum(len(functions) for student, functions in found.items() if student != SOLUTION)
    yield (f"{len(pairs)} pairs, of {len(folders)} students with {count} functions of {SHORT} "
           "nodes or more, and the solution")
