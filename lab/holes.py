"""Functions in a chapter's source: to cut a hole where one was, and to graft another one in.

Both work on text, so that what surrounds a function stays as it is, to the last comment.
"""

import ast
import io
import textwrap
import tokenize
from typing import NamedTuple

DEFINITIONS = ast.FunctionDef, ast.ClassDef


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


def find(tree, name):
    """The node of a function `f`, or of a method `Class.f`; None if there is none."""
    *outer, name = name.split(".")
    scope = find(tree, outer[0]) if outer else tree
    found = [node for node in getattr(scope, "body", [])
             if isinstance(node, DEFINITIONS) and node.name == name]
    return found[-1] if found else None                     # Python, too, takes the last


def lines_of(node):
    """The first and last line of a definition, decorators included, counted from 1."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return first, node.end_lineno


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
    node, lines = find(ast.parse(source), name), source.split("\n")
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


def is_hole(node):
    """Whether nothing but a docstring and `raise NotImplementedError` is in a function."""
    body = node.body[ast.get_docstring(node) is not None:]
    first = body[0] if len(body) == 1 else None
    raised = first.exc if isinstance(first, ast.Raise) else None
    raised = raised.func if isinstance(raised, ast.Call) else raised
    return isinstance(raised, ast.Name) and raised.id == "NotImplementedError"


def graft(solution, student, names):
    """The solution with the student's functions `names` in place of its own, and with what else
    the student has defined under names that the solution does not have: helpers and imports."""
    ours, theirs = ast.parse(solution), ast.parse(student)
    pieces = []             # first and last line that go, the column; first and last that come
    for name in names:
        node = find(ours, name)
        pieces.append((*lines_of(node), node.col_offset, *lines_of(find(theirs, name))))
    for outer in {name.split(".")[0] for name in names if "." in name}:
        node = find(ours, outer)
        pieces += helpers(node.end_lineno + 1, 4, find(theirs, outer).body, bound(node.body))
    first = min(lines_of(node)[0] for node in ours.body if isinstance(node, DEFINITIONS))
    pieces += helpers(first, 0, theirs.body, bound(ours.body))

    before, texts = solution.split("\n"), student.split("\n")
    lines, shifts, done = [], [], 0
    for first, last, column, start, stop in sorted(pieces):
        lines += before[done : first - 1]
        shifts.append((len(lines) + 1, len(lines) + stop - start + 1, start - len(lines) - 1))
        lines += reindented(texts[start - 1 : stop], column)
        done = last
    return Graft("\n".join(lines + before[done:]), shifts)


def helpers(line, column, nodes, known):
    """Pieces that come before a line: those of the nodes that bind names, but no known one."""
    pieces = []
    for node in nodes:
        names = bound([node])
        if names and not names & known:
            begin = lines_of(node)[0] if isinstance(node, DEFINITIONS) else node.lineno
            pieces.append((line, line - 1, column, begin, node.end_lineno))
    return pieces


def bound(nodes):
    """The names that statements bind: definitions, imports, assignments."""
    names = set()
    for node in nodes:
        if isinstance(node, DEFINITIONS):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        else:
            names |= {part.id for part in ast.walk(node)
                      if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    return names


def reindented(lines, column):
    """A student's lines, moved so that the first begins at our column."""
    theirs = len(lines[0]) - len(lines[0].lstrip())
    if column == theirs:
        return lines
    return [" " * column + line[theirs:] if line.strip() else line for line in lines]
