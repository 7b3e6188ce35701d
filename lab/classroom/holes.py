"""Functions in a chapter's source: to cut a hole where one was, and to graft another one in.

Both work on text, so that what surrounds a function stays as it is, to the last comment.
"""

import ast
import copy
import functools
import io
import textwrap
import threading
import tokenize
from typing import NamedTuple

DEFINITIONS = ast.FunctionDef, ast.ClassDef
ONE_AT_A_TIME = threading.Lock()        # threads that parse count each other's nesting, in CPython


class Graft(NamedTuple):
    """A solution with pieces of a student's file in it. shifts: for each piece its first and last
    line here, and what to add for the line in the student's file."""
    source: str
    shifts: list

    def line_of_student(self, line):
        """Where the student wrote this line; None: it is not the student's."""
        for first, last, shift in self.shifts:
            if first <= line <= last:
                return line + shift
        return None


@functools.lru_cache(maxsize=8)
def parsed(source):
    """Its tree, which is not to be changed: a chapter is asked for again and again."""
    with ONE_AT_A_TIME:
        return ast.parse(source)


def find(tree, name):
    """The node of a function `f`, or of a method `Class.f`; None if there is none."""
    *outer, name = name.split(".")
    scope = find(tree, outer[0]) if outer else tree
    found = [node for node in getattr(scope, "body", [])
             if isinstance(node, DEFINITIONS) and node.name == name]
    return found[-1] if found else None                     # Python, too, takes the last


def lines_of(node):
    """The first and last line of a statement, decorators included, counted from 1."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)]), node.end_lineno


def end_of_signature(lines, node):
    """The line of the colon that ends `def f(...) -> x:`, and what stands on it up to there."""
    depth, source = 0, "\n".join(lines[node.lineno - 1 : node.end_lineno]) + "\n"
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        depth += (token.string in ("(", "[", "{")) - (token.string in (")", "]", "}"))
        if token.type == tokenize.OP and token.string == ":" and depth == 0:
            row, column = token.end
            return node.lineno + row - 1, token.line[:column]


def cut(source, name, comment, message):
    """The source with a hole where the body of function `name` was. Signature and docstring stay,
    and a comment on the signature if it gives a shape, as in `# (batch, seq, dim)`. In the hole,
    the comment, and a NotImplementedError with the message."""
    node, lines = find(parsed(source), name), source.split("\n")
    last, code = end_of_signature(lines, node)
    shape = lines[last - 1][len(code):].strip()
    head = lines[lines_of(node)[0] - 1 : last - 1]
    head.append(lines[last - 1] if shape.startswith("# (") else code)
    if ast.get_docstring(node) is not None:
        head += lines[node.body[0].lineno - 1 : node.body[0].end_lineno]

    indent = " " * (node.col_offset + 4)
    body = [f"{indent}# {line}" for line in textwrap.wrap(comment, 96 - len(indent))]
    body.append(f'{indent}raise NotImplementedError("{message}")')
    before, after = lines[: lines_of(node)[0] - 1], lines[node.end_lineno:]
    while after and after[0].startswith(indent + "#"):      # the body's last words
        after.pop(0)
    return "\n".join(before + head + body + after)


def is_hole(node, or_pass=True):
    """Whether nothing is in a function but a docstring and `raise NotImplementedError`; or `pass`,
    or `...`: which somebody may have written who has no need of it."""
    says_so = any(map(is_raise, node.body))
    return all(map(is_nothing, node.body)) and (says_so or or_pass)


def is_nothing(statement):
    """Whether nothing was written yet where this stands: also `...`, or a text."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    return is_raise(statement) or isinstance(statement, ast.Pass)


def is_raise(statement):
    """Whether it is `raise NotImplementedError`, with words or without."""
    raised = statement.exc if isinstance(statement, ast.Raise) else None
    raised = raised.func if isinstance(raised, ast.Call) else raised
    return isinstance(raised, ast.Name) and raised.id == "NotImplementedError"


def own_methods(solution, tree, names, asked):
    """The other methods of the classes of `names` that a student's tree has, and the solution:
    with a method comes what its class is made of, such as __init__. asked: names that exercises
    ask for, which are graded for themselves."""
    found = []
    for scope in dict.fromkeys(name.rpartition(".")[0] for name in names if "." in name):
        for node in getattr(find(tree, scope), "body", []):
            name = f"{scope}.{getattr(node, 'name', '')}"
            is_known = isinstance(node, DEFINITIONS) and find(parsed(solution), name)
            if is_known and name not in (*asked, *found) and not is_hole(find(tree, name)):
                found.append(name)
    return found


class Piece(NamedTuple):
    """Lines of a student's file that take the place of lines of the solution. first, last: of the
    solution, counted from 1; first = last + 1: they come in between. column: where they begin."""
    first: int
    last: int
    column: int
    lines: list
    line_of_student: int


def graft(solution, student, names):
    """The solution with the student's functions `names` in place of its own, and with what else
    the student has defined under names that the solution does not have: helpers and imports."""
    ours, theirs, texts = parsed(solution), parsed(student), student.split("\n")
    pieces = []
    for name in names:
        node, (start, stop) = find(ours, name), lines_of(find(theirs, name))
        pieces.append(Piece(*lines_of(node), node.col_offset, texts[start - 1 : stop], start))
    scopes = {name.rpartition(".")[0] for name in names} - {""}
    for our_scope, their_scope in [(ours, theirs),
                                   *((find(ours, name), find(theirs, name)) for name in scopes)]:
        pieces += helpers(our_scope.body, their_scope.body, texts)

    before, lines, shifts, done = solution.split("\n"), [], [], 0
    # In the same place, what belongs to a class comes before what follows it.
    for piece in sorted(pieces, key=lambda piece: (piece.first, piece.last, -piece.column)):
        lines += before[done : piece.first - 1]
        first = len(lines) + 1
        lines += reindented(piece.lines, piece.column)
        shifts.append((first, len(lines), piece.line_of_student - first))
        done = piece.last
    return Graft("\n".join(lines + before[done:]), shifts)


def helpers(ours, theirs, texts):
    """Pieces of a module's or class's statements: what the student has added. Each comes behind
    that of our statements that it follows in the student's file."""
    known, pieces = bound(ours), []
    places = {name: node.end_lineno for node in ours for name in bound([node])}
    column, place = ours[0].col_offset, min(places.values())
    for node in theirs:
        names, start = bound([node]), lines_of(node)[0]
        place = max([place, *(places[name] for name in names & known)])
        if isinstance(node, ast.Import | ast.ImportFrom) and names - known:
            new = copy.copy(node)
            new.names = [alias for alias in node.names if bound_by(alias) not in known]
            pieces.append(Piece(place + 1, place, column, [ast.unparse(new)], start))
        elif names and not names & known:
            lines = texts[start - 1 : node.end_lineno]
            pieces.append(Piece(place + 1, place, column, lines, start))
    return pieces


def bound_by(alias):
    return (alias.asname or alias.name).split(".")[0]


def bound(nodes):
    """The names that statements bind: definitions, imports, assignments."""
    names = set()
    for node in nodes:
        if isinstance(node, DEFINITIONS):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= set(map(bound_by, node.names))
        else:
            names |= {part.id for part in ast.walk(node)
                      if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    return names


def reindented(lines, column):
    """A student's lines, moved so that the first begins at our column."""
    theirs = len(lines[0]) - len(lines[0].lstrip())
    return [" " * column + line[theirs:] if line[:theirs].isspace() or not theirs else line
            for line in lines]
