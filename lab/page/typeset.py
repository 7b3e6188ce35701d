"""What a docstring says, as HTML."""

import re
from html import escape

from markupsafe import Markup

from lab import chapters

RUN_IN = re.compile(r"([A-Z][^.:?!\n]*[.:?])(?=\s)")     # "Heads.", at the beginning of a paragraph


def typeset(text, source=None, beside=None):
    """A docstring as HTML: paragraphs, and as they stand whatever is indented: its tables, drawings
    and commands. source: where names in backticks may lead. beside: {how a paragraph begins: HTML
    that follows it}."""
    html = []
    for indented, lines in blocks(text.splitlines()):
        if indented:
            edge = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
            drawn = escape("\n".join(line[edge:] for line in lines), quote=False)
            html.append(f"<pre tabindex=0>{with_links(drawn)}</pre>")
        else:
            text = " ".join(lines)
            html.append(f"<p>{paragraph(text, source)}</p>")
            html += [more for begin, more in (beside or {}).items() if text.startswith(begin)]
    return Markup("\n".join(html))


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


def without_ends(lines):
    while lines and not lines[-1]:
        lines = lines[:-1]
    return lines


def paragraph(text, source):
    """With what it begins with in bold, if that is a title, as in "Heads. t must divide them."."""
    title = RUN_IN.match(text)
    if title and len(title[1].split()) <= (4 if title[1].endswith((":", "?")) else 2):
        return f"<b>{inline(title[1], source)}</b>" + inline(text[title.end():], source)
    return inline(text, source)


def inline(text, source=None):
    """Escaped, with `code`, *emphasis*, and links to chapters."""
    def code(found):
        place = source and source.place(found[1])
        return f'<code><a href="{place}">{found[1]}</a></code>' if place else (
            f"<code>{found[1]}</code>")

    text = re.sub(r"`([^`]+)`", code, escape(text, quote=False))
    return with_links(re.sub(r"(?<![\w*])\*(\w[\w ]*)\*(?![\w*])", r"<em>\1</em>", text))


def with_links(html):
    """The number behind the word chapter leads there."""
    def chapter(found):
        name = next((name for name in chapters.NAMES if name[:2] == found[2]), None)
        return f'{found[1]}<a href="{name}.html">{found[2]}</a>' if name else found[0]

    return re.sub(r"(\b[Cc]hapters? )(\d\d)\b", chapter, html)
