"""A source file as pieces to be read: each function beside what is said of it.

A piece is a function, a class with the methods of which nothing more is said, a method of which
something is, or what stands between them. Its code is HTML: a line of the file is a line of it,
with a number that can be linked, and names that lead to where they are defined, in the file itself
or in common.py.
"""

import ast
import difflib
import itertools
import re
from html import escape
from typing import NamedTuple

from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Number, Operator, String

HEADING = re.compile(r"# -{3,} (.*)$")      # what divides a file into sections
ALIKE = 0.35                                # below it, two functions have but a name in common
TAGS = {Keyword: "b", Operator.Word: "b", Comment: "i", String: "string", Number: "number"}
FUNCTION = ast.FunctionDef, ast.AsyncFunctionDef


class Piece(NamedTuple):
    name: str               # "SumOut"; "": what stands between functions
    names: dict             # {line: "SumOut.backward"} of the methods in it
    heading: str            # of the section that begins with it, or ""
    said: str               # its docstring
    first: int              # its lines, counted from 1
    last: int
    silent: range           # those of the docstring, which are not shown as code

    @property
    def functions(self):
        return [self.name, *self.names.values()]


class Source:
    """A file of the course. page: its page's address. common: the Source of common.py, if names
    shall lead there as well."""

    def __init__(self, text, page, common=None):
        self.text, self.page, self.common = text, page, common
        self.lines, self.tree = text.splitlines(), ast.parse(text)
        self.doc = ast.get_docstring(self.tree) or ""
        self.defined = dict(definitions(self.tree))
        self.functions = dict(functions(self.tree, self.lines))
        self.pieces = list(pieces(self.tree, self.lines))
        self.html = highlighted(self)

    def place(self, name):
        """The address of a definition of this file, or None."""
        if name not in self.defined:
            return None
        return f"{self.page}#{name if name in self.functions else f'L{self.defined[name]}'}"

    def code(self, piece):
        """[(number, HTML)] of a piece's lines."""
        return [(number, self.line(number)) for number in range(piece.first, piece.last + 1)
                if number not in piece.silent]

    def line(self, number):
        return self.html[number - 1]

    def lines_of(self, name):
        """The lines of a function, a method or a class, without what is said of it."""
        first, last = self.functions[name]
        silent = {number for piece in self.pieces for number in piece.silent}
        return [self.lines[number - 1] for number in range(first, last + 1) if number not in silent]


def functions(tree, lines):
    """Yield (name, (first line, last)) of all functions, classes, and Class.method."""
    for node in tree.body:
        if isinstance(node, (*FUNCTION, ast.ClassDef)):
            yield node.name, (begins(node, lines), node.end_lineno)
        for method in methods_of(node):
            yield f"{node.name}.{method.name}", (begins(method, lines), method.end_lineno)


def methods_of(node):
    return [one for one in node.body if isinstance(one, FUNCTION)] \
        if isinstance(node, ast.ClassDef) else []


def definitions(tree):
    """Yield (name, line) of what a module defines, with methods as Class.method."""
    for node in tree.body:
        if isinstance(node, (*FUNCTION, ast.ClassDef)):
            yield node.name, node.lineno
            for method in methods_of(node):
                yield f"{node.name}.{method.name}", method.lineno
        for target in node.targets if isinstance(node, ast.Assign) else []:
            for name in ast.walk(target):
                if isinstance(name, ast.Name):
                    yield name.id, node.lineno


# ------------------------------------------------------------------------------------------- pieces

def pieces(tree, lines):
    """Yield the pieces of a file, in order: every line belongs to one, but blank ones in between,
    the module's docstring, and headings."""
    begin = tree.body[0].end_lineno + 1 if ast.get_docstring(tree) else 1
    heading = ""
    for node in [*tree.body, None]:
        is_piece = isinstance(node, (*FUNCTION, ast.ClassDef))
        if node is not None and not is_piece:
            continue
        first = begins(node, lines) if node else len(lines) + 1
        for title, start, end in sections(lines, begin, first - 1):
            heading = title or heading
            if start <= end:
                yield Piece("", {}, heading, "", start, end, range(0))
                heading = ""
        if node:
            yield from of_definition(node, lines, first, heading)
            heading, begin = "", node.end_lineno + 1


def sections(lines, first, last):
    """Yield (heading or "", first, last) of the lines between two definitions, without blank ones
    at the ends; first > last where there are none."""
    title, start = "", first
    for number in range(first, last + 2):
        found = HEADING.match(lines[number - 1]) if number <= last else None
        if found or number > last:
            yield title, *trimmed(lines, start, number - 1)
            title, start = found and found[1], number + 1


def trimmed(lines, first, last):
    while first <= last and not lines[first - 1].strip():
        first += 1
    while first <= last and not lines[last - 1].strip():
        last -= 1
    return first, last


def begins(node, lines):
    """The first line of a definition, with its decorators and the comment right above it."""
    first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
    while lines[first - 2].lstrip().startswith("#") and not HEADING.match(lines[first - 2]):
        first -= 1
    return first


def of_definition(node, lines, first, heading):
    """Yield a function's piece; of a class one that ends where a method has something said of it,
    which begins the next."""
    starts, names = [(node, first)], {}
    for method in methods_of(node):
        begin = begins(method, lines)
        names[begin] = f"{node.name}.{method.name}"
        if ast.get_docstring(method):
            starts.append((method, begin))
    ends = [begin - 1 for _, begin in starts[1:]] + [node.end_lineno]
    for (one, begin), end in zip(starts, ends):
        said = ast.get_docstring(one) or ""
        silent = range(one.body[0].lineno, one.body[0].end_lineno + 1) if said else range(0)
        inside = {line: name for line, name in names.items() if begin < line <= end}
        yield Piece(names.get(begin, node.name), inside, heading, said,
                    *trimmed(lines, begin, end), silent)
        heading = ""


# ------------------------------------------------------------------------------------ highlighting

def highlighted(source):
    """[HTML of each line]: Pygments' tokens, and names that lead to their definitions."""
    addresses, html, column = dict(links(source)), [""], 0
    for kind, text in PythonLexer(stripnl=False).get_tokens(source.text):
        tag = next((tag for group, tag in TAGS.items() if kind in group), None)
        for i, word in enumerate(text.split("\n")):
            if i:
                html.append("")
                column = 0
            html[-1] += element(word, tag, addresses.get((len(html), column)), source.page)
            column += len(word)
    return html


def element(word, tag, address, page):
    """A word as HTML. Tab doesn't stop at a name that is a link: there are hundreds."""
    text = escape(word)
    if not word.strip():
        return text
    if address:
        return f'<a href="{address.removeprefix(page)}" tabindex=-1>{text}</a>'
    if tag in ("b", "i"):                               # the most frequent ones, which are short
        return f"<{tag}>{text}</{tag}>"
    return f'<span class="{tag}">{text}</span>' if tag else text


def links(source):
    """Yield ((line, column), address) of each name that leads to a definition: of the module, of
    common.py, or self.method. A local variable of the same name does not."""
    imported = {alias.asname or alias.name: alias.name for node in source.tree.body
                if isinstance(node, ast.ImportFrom) and node.module == "common"
                for alias in node.names}

    def place(name):
        return source.place(name) or (source.common and name in imported
                                      and source.common.place(imported[name]))

    def visit(node, hidden, inside):
        if isinstance(node, (*FUNCTION, ast.Lambda)):
            hidden = hidden | locals_of(node)
        if isinstance(node, ast.ClassDef):
            inside = node.name
        address, column = None, 0
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in hidden:
            address = place(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "common" and source.common:
                address = source.common.place(node.attr)
            elif node.value.id == "self" and inside:
                address = source.place(f"{inside}.{node.attr}")
            column = len(node.value.id.encode()) + 1
        if address:
            line = source.lines[node.lineno - 1].encode()
            yield (node.lineno, len(line[:node.col_offset + column].decode())), address
        for child in ast.iter_child_nodes(node):
            yield from visit(child, hidden, inside)

    yield from visit(source.tree, set(), None)


def locals_of(function):
    """The names that a function binds itself."""
    arguments = function.args
    names = {one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs,
                                 *filter(None, (arguments.vararg, arguments.kwarg)))}
    body = function.body if isinstance(function.body, list) else [function.body]
    for node in (one for statement in body for one in ast.walk(statement)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        if isinstance(node, FUNCTION):
            names.add(node.name)
    return names


# ---------------------------------------------------------------------------------- before and now

def before_and_now(before, now):
    """[(line before, line now, whether they differ)] of two versions of a function, with None where
    one has no such line; or None, if they have little in common but a name."""
    matcher = difflib.SequenceMatcher(None, before, now, autojunk=False)
    if matcher.ratio() < ALIKE:
        return None
    rows = []
    for kind, a, b, c, d in matcher.get_opcodes():
        pairs = itertools.zip_longest(before[a:b], now[c:d])
        rows += [(left, right, kind != "equal") for left, right in pairs]
    return rows
