"""Functions in a chapter's source: to cut a hole where one was, and to paste another one in.

Both work on text, so that what surrounds a function stays as it is, to the last comment.
"""

import ast
import functools
import textwrap
import threading
from typing import NamedTuple

DEFINITIONS = ast.FunctionDef, ast.ClassDef
ONE_AT_A_TIME = threading.Lock()        # threads that parse count each other's nesting, in CPython


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


def functions(tree):
    """(name, node) of a module's functions and methods."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{method.name}", method) for method in node.body
                        if isinstance(method, ast.FunctionDef))


def lines_of(node):
    """The first and last line of a statement, decorators included, counted from 1."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)]), node.end_lineno


def end_of_signature(lines, node):
    """The number of the line that ends `def f(...) -> x:`."""
    number, _ = lines_of(node.body[0])
    while number > node.lineno:
        number -= 1
        if lines[number - 1].split("#")[0].strip():
            break
    return number


def cut(source, name, comment, message):
    """The source with a hole where the body of function `name` was. Signature and docstring stay,
    and a comment on the signature if it gives a shape, as in `# (batch, seq, dim)`. In the hole,
    the comment, and a NotImplementedError with the message."""
    node, lines = find(parsed(source), name), source.split("\n")
    last = end_of_signature(lines, node)
    head = lines[lines_of(node)[0] - 1 : last]
    code, _, shape = head[-1].partition("#")
    if not shape.startswith(" ("):
        head[-1] = code.rstrip()
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
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_text or is_raise(statement) or isinstance(statement, ast.Pass)


def is_raise(statement):
    """Whether it is `raise NotImplementedError`, with words or without."""
    raised = statement.exc if isinstance(statement, ast.Raise) else None
    raised = raised.func if isinstance(raised, ast.Call) else raised
    return isinstance(raised, ast.Name) and raised.id == "NotImplementedError"


class Pasted(NamedTuple):
    """A source into which functions of another one were pasted. lines: of each of its lines, the
    line in the first source; None: it was pasted."""
    source: str
    lines: list

    def line_before(self, number):
        return self.lines[number - 1]


def paste(source, other, names):
    """The source with the functions `names` of the other one in place of its own. What it has not,
    isn't pasted."""
    lines, others = source.split("\n"), other.split("\n")
    places = {lines_of(node): name for name in names
              if (node := find(parsed(source), name)) is not None}
    pasted, numbers, done = [], [], 0
    for (first, last), name in sorted(places.items()):
        start, stop = lines_of(find(parsed(other), name))
        pasted += lines[done : first - 1] + others[start - 1 : stop]
        numbers += [*range(done + 1, first), *[None] * (stop - start + 1)]
        done = last
    return Pasted("\n".join(pasted + lines[done:]), numbers + [*range(done + 1, len(lines) + 1)])
