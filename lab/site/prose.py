"""Docstrings as HTML: prose in paragraphs, and whatever is indented as it is.

A docstring has `code` and *emphasis*, and no other Markdown.
"""

import re
import textwrap
from html import escape

from markdown_it import MarkdownIt
from markupsafe import Markup

from lab import chapters

INLINE = MarkdownIt("zero").enable(["backticks", "emphasis"])
BLOCKS = MarkdownIt("zero").enable(["code"])            # paragraphs, and indented lines
INDENTED = re.compile(r"^(\S.*\n)(?=    )", re.MULTILINE)       # a line right above some
TITLE = re.compile(r"([A-Z][^.:?!\n]*[.:?])(?=\s)")     # "Heads.", at the beginning of a paragraph
CODE = re.compile(r"<code>(.*?)</code>")
CHAPTER = re.compile(r"(\b[Cc]hapters? )(\d\d)\b")


class Docstring:
    """Sets one docstring. source: the Source whose definitions `code` leads to, or None. The first
    mention of each chapter becomes a link."""

    def __init__(self, source=None):
        self.source = source
        self.unlinked = {name[:2]: name for name in chapters.NAMES}

    def paragraph(self, text):
        """HTML of a paragraph; a title that it begins with ("Heads.") is bold."""
        title = TITLE.match(text)
        most_words = 4 if title and title[1].endswith((":", "?")) else 2
        if title and len(title[1].split()) <= most_words:
            return f"<p><b>{self.inline(title[1])}</b>{self.inline(text[title.end():])}</p>"
        return f"<p>{self.inline(text)}</p>"

    def block(self, lines):
        """HTML of indented lines, without the columns that they are indented by."""
        text = textwrap.dedent("\n".join(lines)).rstrip()
        return f"<pre>{self.link_chapters(escape(text, quote=False))}</pre>"

    def inline(self, text):
        html = CODE.sub(self.link_definition, INLINE.renderInline(text))
        return self.link_chapters(html)

    def link_definition(self, code):
        place = self.source and self.source.place(code[1])
        return f'<code><a href="{place}">{code[1]}</a></code>' if place else code[0]

    def link_chapters(self, html):
        def link(words):
            name = self.unlinked.pop(words[2], None)
            return f'{words[1]}<a href="{name}.html">{words[2]}</a>' if name else words[0]

        return CHAPTER.sub(link, html)


def typeset(text, source=None, beside=None):
    """A docstring as HTML. source: the file that it is in. beside: {beginning of a paragraph: HTML
    that follows it}; if the paragraph ends in a colon, the indented lines come first."""
    html, docstring, waiting = [], Docstring(source), []
    text = INDENTED.sub(r"\1\n", text)
    lines = text.splitlines()
    for token in BLOCKS.parse(text):
        if token.type == "code_block" or token.type == "inline" and "█" in token.content:
            html += [docstring.block(lines[slice(*token.map)]), *waiting]
            waiting = []
        elif token.type == "inline":
            words = joined(token.content)
            html += [*waiting, docstring.paragraph(words)]
            waiting = [more for begin, more in (beside or {}).items() if words.startswith(begin)]
            if not words.endswith(":"):
                html, waiting = html + waiting, []
    return Markup("\n".join(html + waiting))


def inline(text, source=None):
    """A text of one paragraph as HTML, without a paragraph around it."""
    return Markup(Docstring(source).inline(text))


def joined(text):
    """Lines as one; one that ends in micro- goes on with batches."""
    return re.sub(r"(?<=\w-)\n(?=\w)", "", text).replace("\n", " ")
