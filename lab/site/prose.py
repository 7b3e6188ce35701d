"""Docstrings as HTML: prose in paragraphs, whatever is indented as it is.

Of Markdown a docstring has `code` and *emphasis*, and nothing else.
"""

import itertools
import re
from html import escape

from markdown_it import MarkdownIt
from markupsafe import Markup

from lab import chapters

INLINE = MarkdownIt("zero").enable(["backticks", "emphasis"])
TITLE = re.compile(r"([A-Z][^.:?!\n]*[.:?])(?=\s)")     # "Heads.", at the beginning of a paragraph
CODE = re.compile(r"<code>(.*?)</code>")
CHAPTER = re.compile(r"(\b[Cc]hapters? )(\d\d)\b")


class Docstring:
    """Sets one docstring. source: the Source whose definitions `code` leads to, or None. The first
    mention of each chapter becomes a link."""

    def __init__(self, source=None):
        self.source = source
        self.chapters = {name[:2]: name for name in chapters.NAMES}     # not linked so far

    def paragraph(self, text):
        """HTML of a paragraph, with a title that it begins with ("Heads.") in bold."""
        title = TITLE.match(text)
        longest = 4 if title and title[1].endswith((":", "?")) else 2
        if title and len(title[1].split()) <= longest:
            return f"<p><b>{self.inline(title[1])}</b>{self.inline(text[title.end():])}</p>"
        return f"<p>{self.inline(text)}</p>"

    def block(self, lines):
        """HTML of indented lines, without the columns that they are indented by."""
        edge = min(len(line) - len(line.lstrip()) for line in lines if line)
        text = "\n".join(line[edge:] for line in lines)
        return f"<pre tabindex=0>{self.link_chapters(escape(text, quote=False))}</pre>"

    def inline(self, text):
        html = CODE.sub(self.link_definition, INLINE.renderInline(text))
        return self.link_chapters(html)

    def link_definition(self, code):
        place = self.source and self.source.place(code[1])
        return f'<code><a href="{place}">{code[1]}</a></code>' if place else code[0]

    def link_chapters(self, html):
        def link(words):
            name = self.chapters.pop(words[2], None)
            return f'{words[1]}<a href="{name}.html">{words[2]}</a>' if name else words[0]

        return CHAPTER.sub(link, html)


def typeset(text, source=None, beside=None):
    """A docstring as HTML. source: the file that it is in. beside: {beginning of a paragraph: HTML
    that follows it}; if the paragraph ends in a colon, the indented lines come first."""
    html, docstring, waiting = [], Docstring(source), []
    for is_indented, lines in blocks(text.splitlines()):
        if is_indented or any("█" in line for line in lines):      # a drawing beside a text
            html += [docstring.block(lines), *waiting]
            waiting = []
            continue
        words = joined(lines)
        html += [*waiting, docstring.paragraph(words)]
        waiting = [more for begin, more in (beside or {}).items() if words.startswith(begin)]
        if not words.endswith(":"):
            html, waiting = html + waiting, []
    return Markup("\n".join(html + waiting))


def inline(text, source=None):
    """A text of one paragraph as HTML, without a paragraph around it."""
    return Markup(Docstring(source).inline(text))


def blocks(lines):
    """Yield (whether they are indented, lines) of each paragraph, and of each indented block, which
    keeps its blank lines."""
    marked, is_indented = [], False
    for line in lines:
        if line.strip():
            is_indented = line.startswith("    ")
        marked.append((is_indented, line.rstrip()))
    for kind, pairs in itertools.groupby(marked, lambda pair: pair[0]):
        block = "\n".join(line for _, line in pairs).strip("\n")
        parts = [block] if kind else re.split(r"\n\n+", block)
        yield from ((kind, part.split("\n")) for part in parts if part)


def joined(lines):
    """Lines as one; one that ends in micro- goes on with batches."""
    return re.sub(r"(?<=\w-)\n(?=\w)", "", "\n".join(map(str.strip, lines))).replace("\n", " ")
