"""The pages of pages/, and the few files beside it that are Markdown, as HTML."""

import posixpath
import re
from functools import cache
from typing import NamedTuple

from markdown_it import MarkdownIt
from markupsafe import Markup

from lab import ROOT
from lab.site import figures

FOLDER = ROOT / "pages"
GROUPS = {              # the contents: a page by its path from pages/
    "Guides": ("../README.md", "reading.md", "map.md", "files.md", "browser.md", "gpus.md",
               "today.md", "formats.md", "checkpoints.md", "planning.md", "museum.md",
               "sources.md", "results.md", "../benchmarks/RESULTS.md", "../CONTRIBUTING.md"),
    "The course": ("course.md", "classroom.md", "midterm.md", "notation.md"),
    "For teachers": ("teacher/class.md", "teacher/grading.md", "teacher/answers.md")}
TITLES = {"../README.md": "Start here"}         # else its first headline
IMAGE = re.compile(r'<p><img src="([^"]*)" alt="([^"]*)" /></p>')


class Section(NamedTuple):
    anchor: str             # "": what is above the first headline
    title: str
    html: str
    text: str               # as it is written


class Written(NamedTuple):
    """A page, by its path from pages/, "teacher/class.md"."""

    path: str
    title: str
    text: str

    @property
    def name(self):
        return self.path.removeprefix("../").removesuffix(".md").replace("/", "-")

    @property
    def address(self):
        return f"{self.name}.html"

    @property
    def short(self):
        """Its title in the contents."""
        return self.title.split(":")[0]

    @property
    def is_for_teachers(self):
        return self.path.startswith("teacher/")


def read_page(path, folder=FOLDER):
    text = (folder / path).read_text(encoding="utf-8")
    headline = re.search(r"^# (.+)$", text, re.MULTILINE)
    return Written(path, TITLES.get(path) or headline[1], text)


@cache
def grouped():
    """{group of the contents: its pages}."""
    return {group: [read_page(path) for path in paths if (FOLDER / path).exists()]
            for group, paths in GROUPS.items()}


def pages():
    """{path: Written}, in the order of the contents."""
    return {page.path: page for group in grouped().values() for page in group}


@cache
def captions():
    """{figure: what the page that shows it says of it}."""
    image = re.compile(r"!\[([^\]]*)\]\((?:\.\./)*figures/(\w+)\.png\)")
    found = {}
    for page in pages().values():
        found |= {file: caption for caption, file in image.findall(page.text)}
    return found


def anchor_of(title):
    """The anchor that GitHub gives a headline: "1. A ring, counted" has 1-a-ring-counted."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def sections(page, site):
    """[Section] of a Written. site: the addresses that a link may lead to."""
    body = page.text.partition("\n")[2] if page.text.startswith("# ") else page.text
    found = []
    for text in re.split(r"^(?=## )", body, flags=re.MULTILINE):
        headline = re.match(r"## (.+)", text)
        title = headline[1] if headline else ""
        if text.strip():
            found.append(Section(anchor_of(title), title, html(text, page.path, site), text))
    return found


def html(text, path, site):
    """Markdown as HTML: tables and code that scroll, links to the site's pages."""
    parser = make_parser()
    tokens = parser.parse(text)
    for token, inside in zip(tokens, [*tokens[1:], None]):
        if token.type == "heading_open":
            token.attrSet("id", anchor_of(inside.content))
        for child in token.children or ():
            for name in {"href", "src"} & child.attrs.keys():
                child.attrSet(name, address(child.attrGet(name), path, site))
    written = parser.renderer.render(tokens, parser.options, {})
    without_dead_links = re.sub(r'<a href="">(.*?)</a>', r"\1", written)
    return Markup(IMAGE.sub(as_figure, without_dead_links))


def as_figure(image):
    """A paragraph that is an image, as a figure with a caption; nothing, if the site has none."""
    file, alt = image.groups()
    if not file:
        return ""
    width, height = figures.size(ROOT / file)
    return (f'<figure><div><a href="{file}"><img src="{file}" width="{width}" height="{height}" '
            f'alt="{alt}" loading="lazy"></a></div><figcaption>{alt}</figcaption></figure>')


@cache
def make_parser():
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    parser.add_render_rule("table_open", lambda *_: '<div class="wide"><table class="aligned">\n')
    parser.add_render_rule("table_close", lambda *_: "</table></div>\n")
    return parser


def address(target, path, site):
    """Where a link of a page leads on the site; "": the site has no such page."""
    where, _, place = target.partition("#")
    if not where or re.match(r"https?:", where):
        return target
    file = posixpath.normpath(posixpath.join("pages", posixpath.dirname(path), where))
    page = posixpath.splitext(file.removeprefix("pages/"))[0].replace("/", "-") + ".html"
    found = page if file.endswith((".md", ".py")) else file
    if found not in site:
        return ""
    return f"{found}#{place}" if place else found
