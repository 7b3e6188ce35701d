"""A source file in pieces: each function beside its docstring.

A piece is a function, a class up to its first method with a docstring, such a method, or the lines
between two of these. Its code is HTML: each line has a number that can be linked, and names lead to
where they are defined, in the file itself or in common.py.
"""

import ast
import difflib
import itertools
import re
from html import escape
from typing import NamedTuple

from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, String

HEADING = re.compile(r"# -{3,} (.*)$")      # what divides a file into sections
ALIKE = 0.35                                # below it, two functions share only their name
TAGS = {Keyword: "b", Operator.Word: "b", Comment: "i", String: "string", Number: "number"}


class Definition(NamedTuple):
    """A function, a class, or a method."""

    name: str               # "SumOut.backward"
    node: ast.AST
    first: int              # its first line, with decorators and the comment right above it

    @property
    def is_method(self):
        return "." in self.name


class Piece(NamedTuple):
    name: str               # "SumOut"; "": lines between functions
    names: dict             # {line: "SumOut.backward"} of the methods in it
    heading: str            # of the section that begins with it, or ""
    doc: str                # its docstring
    first: int              # its lines, counted from 1
    last: int
    silent: range           # those of the docstring, which are not shown as code

    @property
    def functions(self):
        return [self.name, *self.names.values()]


class Source:
    """A file of the course. page: its page's address. common: the Source of common.py, to which
    imported names lead."""

    def __init__(self, text, page, common=None):
        self.text, self.page, self.common = text, page, common
        self.lines, self.tree = text.splitlines(), ast.parse(text)
        self.doc = ast.get_docstring(self.tree) or ""
        self.definitions = list(definitions(self.tree, self.lines))
        self.functions = {one.name: (one.first, one.node.end_lineno) for one in self.definitions}
        self.values = dict(values(self.tree))
        self.imported = {alias.name for node in self.tree.body if isinstance(node, ast.ImportFrom)
                         and node.module == "common" for alias in node.names}
        self.pieces = list(pieces(self))
        self.html = highlighted(self)

    def place(self, name):
        """The address of a definition of this file, or None."""
        if name in self.functions:
            return f"{self.page}#{name}"
        return f"{self.page}#L{self.values[name]}" if name in self.values else None

    def code(self, piece):
        """[(number, HTML)] of a piece's lines."""
        return [(number, self.html[number - 1]) for number in range(piece.first, piece.last + 1)
                if number not in piece.silent]

    def lines_of(self, name):
        """The lines of a function, a method or a class, without its docstring."""
        first, last = self.functions[name]
        silent = {number for piece in self.pieces for number in piece.silent}
        return [self.lines[number - 1] for number in range(first, last + 1) if number not in silent]


def definitions(tree, lines):
    """Yield all of a file, in order."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield Definition(node.name, node, first_line(node, lines))
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    name = f"{node.name}.{method.name}"
                    yield Definition(name, method, first_line(method, lines))


def first_line(node, lines):
    """Of a definition, with its decorators and the comment right above it."""
    first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
    while lines[first - 2].lstrip().startswith("#") and not HEADING.match(lines[first - 2]):
        first -= 1
    return first


def values(tree):
    """Yield (name, line) of what a module assigns."""
    for node in tree.body:
        for target in node.targets if isinstance(node, ast.Assign) else []:
            for name in ast.walk(target):
                if isinstance(name, ast.Name):
                    yield name.id, node.lineno


# ------------------------------------------------------------------------------------------- pieces

def pieces(source):
    """Yield the pieces of a file, in order: every line belongs to one, but blank ones in between,
    the module's docstring, and headings."""
    heading = ""
    starts = {}             # {line: the Definition, the section's heading or "" that begins there}
    for number, line in enumerate(source.lines, start=1):
        found = HEADING.match(line)
        if found:
            starts[number] = found[1]
    for one in source.definitions:
        if not one.is_method or ast.get_docstring(one.node):
            starts[one.first] = one
    for one in source.definitions:
        if not one.is_method:
            starts.setdefault(one.node.end_lineno + 1, "")
    starts.setdefault(source.tree.body[0].end_lineno + 1 if source.doc else 1, "")
    for first, after in itertools.pairwise([*sorted(starts), len(source.lines) + 1]):
        start = starts[first]
        if start and isinstance(start, str):
            heading, first = start, first + 1
        first, last = trimmed(source.lines, first, after - 1)
        if first <= last:
            yield piece(source, start, heading, first, last)
            heading = ""


def trimmed(lines, first, last):
    """The same lines without blank ones at the ends; first > last if there are no others."""
    while first <= last and not lines[first - 1].strip():
        first += 1
    while first <= last and not lines[last - 1].strip():
        last -= 1
    return first, last


def piece(source, start, heading, first, last):
    if isinstance(start, str):
        return Piece("", {}, heading, "", first, last, range(0))
    doc, silent = ast.get_docstring(start.node) or "", range(0)
    if doc:
        silent = range(start.node.body[0].lineno, start.node.body[0].end_lineno + 1)
    names = {one.first: one.name for one in source.definitions if first < one.first <= last}
    return Piece(start.name, names, heading, doc, first, last, silent)


# ------------------------------------------------------------------------------------ highlighting

def highlighted(source):
    """[HTML of each line]: Pygments' tokens, and names that lead to their definitions."""
    html, before = [""], ""
    for kind, text in PythonLexer(stripnl=False).get_tokens(source.text):
        tag = next((tag for group, tag in TAGS.items() if kind in group), None)
        address = address_of(text, before, source) if kind in Name else None
        first, *others = text.split("\n")
        html[-1] += element(first, tag, address)
        html += [element(line, tag, None) for line in others]
        before = (before + text)[-len("common."):]
    return html


def address_of(name, before, source):
    """Where a name of a file leads: to its definition in the file or in common.py, or nowhere.
    before: the characters in front of it."""
    if before.endswith(("def ", "class ")):
        return None
    if before.endswith("."):
        return source.common and before == "common." and source.common.place(name)
    place = source.place(name)
    if place:
        return place.removeprefix(source.page)
    return source.common and name in source.imported and source.common.place(name)


def element(word, tag, address):
    """A word as HTML. Tab doesn't stop at a name that is a link: there are hundreds."""
    text = escape(word)
    if not word.strip():
        return text
    if address:
        return f'<a href="{address}" tabindex=-1>{text}</a>'
    if tag in ("b", "i"):                               # the most frequent ones, which are short
        return f"<{tag}>{text}</{tag}>"
    return f'<span class="{tag}">{text}</span>' if tag else text


# ---------------------------------------------------------------------------------- before and now

def before_and_now(before, now):
    """[(line before, line now, whether they differ)] of two versions of a function, with None where
    one has no such line; or None, if they share little but a name."""
    matcher = difflib.SequenceMatcher(None, before, now, autojunk=False)
    if matcher.ratio() < ALIKE:
        return None
    rows = []
    for kind, a, b, c, d in matcher.get_opcodes():
        pairs = itertools.zip_longest(before[a:b], now[c:d])
        rows += [(left, right, kind != "equal") for left, right in pairs]
    return rows
