"""What a docstring says, as HTML: paragraphs, tables, formulas; drawings and commands as they are.

The sources are plain text, which has no marks for these. A block is what is indented. It is set as
formulas if each of its lines has one, and as a table if its columns are aligned; else it is a
drawing.
"""

import re
from html import escape
from typing import NamedTuple

from markupsafe import Markup

from lab import chapters
from lab.page import formulas, glossary
from lab.page.formulas import Node

RUN_IN = re.compile(r"([A-Z][^.:?!\n]*[.:?])(?=\s)")     # "Heads.", at the beginning of a paragraph
CODE = re.compile(r"(torchrun|python|make) |\w+ = \w+_\w+\(")
DRAWN = re.compile(r"[│─█►|]|---|\+-|\.{4}|(?<!\S)(?:[.\dx] {1,3}){3}[.\dx](?!\S)")   # strokes
PIECE = re.compile(r"\S+(?: \S+)*")                     # two spaces divide
BEGINS, ENDS = (re.compile(rf"{at}(?:[=<>]=?|<-|[-+·]){to}")      # what goes on, of a formula
                for at, to in (("", "(?: |$)"), ("(?:^| )", "$")))
ALONE = re.compile(r"(<math(?:(?!<math).)*?</math>[,.;:)]+)")       # no line begins with a comma
SIGN = re.compile(r"(?:[=<>]=?|<-) ?.*")                # a cell that goes on, of a formula
SENTENCE = 50                                           # a table has some, if a cell is so long
FULL = 96                                               # columns of a block's line in a lesson
HEADS = ("bytes per rank", "--precision", "type", "A", "bytes a number (B each)",
         "forward of a head")       # how lines begin that name the columns below them; as do those
                                    # which begin with a blank


class Table(NamedTuple):
    head: list              # of Cells, or empty
    rows: list              # of lists of Cells


class Cell(NamedTuple):
    text: str
    span: int = 1           # of columns


class Set:
    """How a text is set that stands in a file. source: the Source, or None: then names lead nowhere
    and no letter is a symbol. letters: whether one in a sentence is, too. (In what is said of a
    function it may be an argument's name.)"""

    def __init__(self, source=None, letters=False):
        self.source, self.letters = source, letters
        self.file = source.page if source else None
        self.chapters = {name[:2]: name for name in chapters.NAMES}     # not linked so far
        self.terms = {one.name: one for one in glossary.words(self.file)} if letters else {}

    # ------------------------------------------------------------------------------------- blocks

    def block(self, lines):
        """What is indented."""
        edge = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
        lines = [line[edge:] for line in lines]
        text = joined(lines)
        equations = [self.equations(line, text) for line in lines if line]
        if all(any(is_equation(node) for _, node, _ in items) or i and items[0][1]
               for i, items in enumerate(equations)):
            return self.formulas(equations, text)
        table = table_of(lines)
        if table:
            return self.table(table)
        before = dict(self.chapters)
        parts = [self.block(part) for part in parted(lines)] if "" in lines else []
        if not all(part.startswith("<pre") for part in parts):      # one is a table, or formulas
            return "\n".join(parts)
        self.chapters = before
        return f"<pre tabindex=0>{self.linked(escape(chr(10).join(lines), quote=False))}</pre>"

    def equations(self, line, text):
        """[(piece, its Node or None, punctuation behind it)] of a line."""
        pieces = []
        for piece in PIECE.findall(line):
            if pieces and (BEGINS.match(piece) or ENDS.search(pieces[-1])):
                pieces[-1] += f" {piece}"
            else:
                pieces.append(piece)
        items = []
        for piece in pieces:
            bare = piece.rstrip(".,;:")
            items.append((bare, formulas.formula(bare, self.known(text)), piece[len(bare):]))
        return items

    def formulas(self, equations, text):
        """Lines of formulas, with their signs of equality below each other."""
        rows, mark = [], self.mark(text)
        for items in equations:
            cells = []
            for i, (piece, node, behind) in enumerate(items):
                if not i and node and not is_equation(node):    # more of what is above it
                    cells.append('<td></td><td class="more">'
                                 f"{formulas.mathml(node, mark, fractions=True)}</td>")
                elif is_equation(node):
                    left, *right = node.parts
                    sides = [formulas.mathml(side, mark, fractions=True)
                             for side in (left, Node("formula", tuple(right)))]
                    cells.append(f'<td class="left">{sides[0]}</td><td>{sides[1]}{behind}</td>')
                else:
                    said = self.inline(piece + behind, text, fractions=True)
                    cells.append(f'<td class="beside" colspan="2">{said}</td>')
            rows.append(f"<tr>{''.join(cells)}</tr>")
        return f'<div class="wide"><table class="formulas" role="presentation">{"".join(rows)}' \
               "</table></div>"

    def table(self, table):
        short = max(len(cell.text) for row in table.rows for cell in row) < SENTENCE
        html, body = "", "".join(self.row(cells, "td", short) for cells in table.rows)
        if table.head:
            html = f"<thead>{self.row(table.head, 'th')}</thead>"
        return f'<div class="wide"><table class="aligned">{html}<tbody>{body}</tbody></table></div>'

    def row(self, cells, tag, fractions=False):
        """The first cell is a row's title, which may be broken on a phone if it is long."""
        around, html = " ".join(cell.text for cell in cells), ""
        for i, cell in enumerate(cells):
            name, more = tag if cell.text else "td", ""
            if tag == "td" and not i and cell.text:
                name, more = "th", ' scope="row"' + ' class="long"' * (len(cell.text) > 16)
            more += f' colspan="{cell.span}"' if cell.span > 1 else ""
            html += f"<{name}{more}>{self.inline(cell.text, around, fractions)}</{name}>"
        return f"<tr>{html}</tr>"

    # ------------------------------------------------------------------------------------ letters

    def known(self, around):
        return lambda name: self.file is not None and bool(
            glossary.meaning(name, self.file, around))

    def mark(self, around):
        """What a symbol's element says of it."""
        def attribute(name):
            entry = self.file and glossary.meaning(name, self.file, around)
            return f' data-is="{escape(entry.id)}"' if entry else ""

        return attribute

    def paragraph(self, text):
        """With what it begins with in bold, if that is a title: "Heads. t must divide them."."""
        title = RUN_IN.match(text)
        if title and len(title[1].split()) <= (4 if title[1].endswith((":", "?")) else 2):
            return f"<b>{self.inline(title[1], text)}</b>" + self.inline(text[title.end():], text)
        return self.inline(text, text)

    def inline(self, text, around="", fractions=False):
        """Escaped, with `code`, *emphasis*, formulas, and links to chapters. around: the paragraph
        or row that it belongs to."""
        html = ""
        for i, piece in enumerate(re.split(r"`([^`]+)`", text)):
            html += self.code(piece) if i % 2 else self.words(piece, around, fractions)
        return html

    def code(self, name):
        place = self.source and self.source.place(name)
        name = escape(name, quote=False)
        return f'<code><a href="{place}">{name}</a></code>' if place else f"<code>{name}</code>"

    def words(self, text, around, fractions):
        if self.file is None or around.startswith("Sources"):       # which have other letters
            return self.emphasized(text)
        html = ""
        for piece, node in formulas.runs(text, self.known(around)):
            if node is None or node.kind == "symbol" and not self.letters:
                html += self.terms_in(piece)
            elif node.kind == "symbol" and "_" not in piece:
                html += f'<i class="symbol"{self.mark(around)(piece)}>{escape(piece)}</i>'
            else:
                html += formulas.mathml(node, self.mark(around), fractions)
        return ALONE.sub(r'<span class="whole-word">\1</span>', html)


    def terms_in(self, text):
        """Each word of the glossary is marked where it comes first."""
        for name in self.terms:
            found = re.search(rf"\b{re.escape(name)}\b", text)
            if found:
                entry = self.terms.pop(name)
                before, after = text[:found.start()], text[found.end():]
                return (f'{self.terms_in(before)}<span class="term" data-is="{escape(entry.id)}">'
                        f"{name}</span>{self.terms_in(after)}")
        return self.emphasized(text)

    def emphasized(self, text):
        return self.linked(re.sub(r"(?<![\w*])\*(\w[\w ]*)\*(?![\w*])", r"<em>\1</em>",
                                  escape(text, quote=False)))

    def linked(self, html):
        """The number behind the word chapter leads there, the first time that it is named."""
        def chapter(found):
            name = self.chapters.pop(found[2], None)
            return f'{found[1]}<a href="{name}.html">{found[2]}</a>' if name else found[0]

        return re.sub(r"(\b[Cc]hapters? )(\d\d)\b", chapter, html)


def typeset(text, source=None, beside=None):
    """A docstring as HTML. source: the file that it stands in. beside: of a lesson, {how a
    paragraph begins: HTML that follows it}; behind a colon, what is indented comes first."""
    html, here, waiting = [], Set(source, letters=beside is not None), []
    for indented, lines in blocks(text.splitlines()):
        if indented or any("█" in line for line in lines):          # a drawing beside a text
            html += [here.block(lines), *waiting]
            waiting = []
        else:
            text = joined(lines)
            html += [*waiting, f"<p>{here.paragraph(text)}</p>"]
            waiting = [more for begin, more in (beside or {}).items() if text.startswith(begin)]
            if not text.endswith(":"):
                html, waiting = html + waiting, []
    return Markup("\n".join(html + waiting))


def inline(text, source=None):
    return Set(source).inline(text, text)


def lettered(name):
    """A symbol by itself."""
    node = formulas.formula(name, lambda known: known == name)
    return Markup(formulas.mathml(node, lambda name: "") if node else escape(name))


def is_equation(node):
    return node is not None and node.kind == "formula"


# ------------------------------------------------------------------------------------------- lines

def joined(lines):
    """Lines as one; what ends in micro- and begins with batches is a word."""
    text = ""
    for line in filter(None, map(str.strip, lines)):
        text += line if not text or re.search(r"\w-$", text) else f" {line}"
    return text


def blocks(lines):
    """Yield (whether it is indented, its lines); blank lines inside of what is indented stay."""
    block, indented = [], False
    for line in [*lines, ""]:
        if not line.strip():
            if indented:
                block.append("")
            elif block:
                yield False, block
                block = []
            continue
        if line.startswith("    ") != indented:
            if any(block):
                yield indented, without_ends(block)
            block, indented = [], not indented
        block.append(line)
    if any(block):
        yield indented, without_ends(block)


def parted(lines):
    """Lines in parts, where blank ones divide them."""
    text = "\n".join(lines)
    return [part.split("\n") for part in re.split(r"\n\n+", text)]


def without_ends(lines):
    while lines and not lines[-1]:
        lines = lines[:-1]
    return lines


# ------------------------------------------------------------------------------------------ tables

def table_of(lines):
    """Aligned lines as a Table, or None."""
    lines = [line for line in lines if line]
    if len(lines) < 2 or any(CODE.match(line) or DRAWN.search(line) for line in lines):
        return None
    pieces = [[(one.start(), one.end(), one[0]) for one in PIECE.finditer(line)] for line in lines]
    starts = columns(pieces)
    if len(starts) < 2:
        return None
    rows, gaps = [], 0
    for line, previous in zip(pieces, [None, *pieces]):
        cells, gaps_here = cells_of(line, starts)
        gaps += gaps_here
        if previous and rows and goes_on(cells, rows[-1], previous, len(starts)):
            for column, cell in cells.items():
                rows[-1][column] = Cell(joined([rows[-1][column].text, cell.text]),
                                        rows[-1][column].span)
        else:
            rows.append(cells)
    signs = [cell for row in rows for cell in row.values() if SIGN.fullmatch(cell.text)]
    if gaps >= len(lines) or signs:                     # columns of columns, or a derivation
        return None
    rows = [filled(cells, len(starts)) for cells in rows]
    headed = not rows[0][0].text or rows[0][0].text in HEADS
    return Table(rows[0], rows[1:]) if headed else Table([], rows)


def columns(pieces):
    """Where columns begin: behind two blanks or more in all lines; or in all but one, if that one
    spans columns which most of the others have."""
    covered = [0] * max(end for line in pieces for _, end, _ in line)
    begun = [0] * len(covered)
    for line in pieces:
        for start, end, _ in line:
            begun[start] += 1
            covered[start:end] = [count + 1 for count in covered[start:end]]
    starts = [min(start for line in pieces for start, _, _ in line)]
    for at in range(starts[0] + 2, len(covered)):
        blank = max(covered[at - 2:at])
        spanned = blank == 1 and begun[at] >= max(3, len(pieces) / 2) and (
            sum(begun[starts[-1]:at]) > 1)
        if begun[at] and (blank == 0 or spanned):
            starts.append(at)
    return starts


def cells_of(line, starts):
    """{column: Cell} of a line's pieces, and how many pieces share a cell with another one."""
    cells, shared = {}, 0
    for start, end, text in line:
        column = max(k for k, at in enumerate(starts) if at <= start)
        if column in cells and column + 1 < len(starts) and end > starts[column + 1]:
            column += 1                                 # a title above the middle of its column
        if column in cells:
            shared += not text.startswith("(")
            text = f"{cells[column].text} {text}"
        reached = sum(start < at < end for at in starts) + 1
        cells[column] = Cell(text, reached)
    for column, cell in cells.items():                  # another cell ends it
        upto = min((other for other in cells if other > column), default=len(starts))
        cells[column] = cell._replace(span=min(cell.span, upto - column))
    return cells, shared


def goes_on(cells, above, line, count):
    """Whether a line continues the cells above: it has no first one, and not all others; or the
    line above was full."""
    if 0 in cells or not all(column in above for column in cells):
        return False
    word = cells[max(cells)].text.split()[0]
    return len(cells) < count - 1 or count == 2 or line[-1][1] + 1 + len(word) > FULL


def filled(cells, count):
    """A row with all its cells."""
    row, column = [], 0
    while column < count:
        row.append(cells.get(column, Cell("")))
        column += row[-1].span
    return row
