"""The pages of pages/, which are Markdown, as HTML. Where markdown-it-py is not installed, they
stand as they are written."""

import posixpath
import re
from functools import lru_cache
from html import escape
from typing import NamedTuple

from markupsafe import Markup

from lab import ROOT

try:
    from markdown_it import MarkdownIt
except ImportError:
    MarkdownIt = None

FOLDER = ROOT / "pages"


class Section(NamedTuple):
    anchor: str             # "": what stands above the first headline
    title: str
    html: str
    text: str               # as it is written


class Written(NamedTuple):
    """A page of pages/, by its path there, "teacher/class.md"."""

    path: str
    title: str
    for_teachers: bool
    text: str

    @property
    def name(self):
        return self.path.removesuffix(".md").replace("/", "-")

    @property
    def address(self):
        return f"{self.name}.html"

    @property
    def short(self):
        """Its title in the contents."""
        return self.title.split(":")[0]


def pages(folder=FOLDER):
    """{path: Written} of all, those for teachers last."""
    found = {}
    for path in sorted(folder.rglob("*.md"), key=lambda path: (len(path.parts), path.name)):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(folder).as_posix()
        title = re.search(r"^# (.+)$", text, re.MULTILINE)[1]
        found[name] = Written(name, title, name.startswith("teacher/"), text)
    return found


def grouped():
    """{group of the contents: its pages}."""
    groups = {"The course": [], "For teachers": []}
    for page in pages().values():
        groups["For teachers" if page.for_teachers else "The course"].append(page)
    return {group: those for group, those in groups.items() if those}


def anchor_of(title):
    """Of a headline, as GitHub makes it: "1. A ring, counted" to 1-a-ring-counted."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def linked_files(text):
    """The files of the course that a page links to, from its root: "figures/fp8.png"."""
    return [re.sub(r"^(\.\./)+", "", target) for target in re.findall(r"\]\(([^)#]+)", text)
            if target.startswith("../")]


def sections(page, site):
    """[Section] of a Written. site: the addresses that a link may lead to."""
    body = page.text.partition("\n")[2] if page.text.startswith("# ") else page.text
    found = []
    for part in re.split(r"^(?=## )", body, flags=re.MULTILINE):
        title = re.match(r"## (.+)", part)
        title = title[1] if title else ""
        if part.strip():
            found.append(Section(anchor_of(title), title, html(part, page.path, site), part))
    return found


def html(text, path, site):
    """Markdown as HTML: no HTML of its own, no style, tables that scroll."""
    if MarkdownIt is None:
        return Markup(f"<pre tabindex=0>{escape(text, quote=False)}</pre>")
    made = maker()
    tokens = made.parse(text)
    for token, inside in zip(tokens, [*tokens[1:], None]):
        if token.type == "heading_open":
            token.attrSet("id", anchor_of(inside.content))
        for child in token.children or ():
            if child.type == "link_open":
                child.attrSet("href", address(child.attrGet("href"), path, site))
    return Markup(without_dead(made.renderer.render(tokens, made.options, {})))


@lru_cache
def maker():
    made = MarkdownIt("commonmark", {"html": False}).enable("table")
    code = made.renderer.rules["fence"]
    fixed = {
        "table_open": '<div class="wide"><table class="aligned">\n',
        "table_close": "</table></div>\n"}
    for name, words in fixed.items():
        made.add_render_rule(name, lambda self, *rest, words=words: words)
    made.add_render_rule("fence", lambda self, *rest: code(*rest).replace(
        "<pre>", "<pre tabindex=0>"))
    return made


def address(target, path, site):
    """Where a link leads, from a page of Markdown: to a page of the site; "": the site has none."""
    where, _, place = target.partition("#")
    behind = f"#{place}" if place else ""
    if not where or re.match(r"https?:", where):
        return target
    file = posixpath.normpath(posixpath.join("pages", posixpath.dirname(path), where))
    file = file.removeprefix("pages/")
    page, suffix = posixpath.splitext(file)
    found = f"{page}.webp" if suffix == ".png" else f"{page.replace('/', '-')}.html"
    return found + behind if found in site else ""


def without_dead(html):
    """Without links that lead nowhere on the site: to the README, say."""
    return re.sub(r'<a href="">(.*?)</a>', r"\1", html)
