"""The pages of pages/ and the few files beside it that are Markdown, as HTML."""

import posixpath
import re
from functools import lru_cache
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
BESIDE = [path for those in GROUPS.values() for path in those if path.startswith("../")]
TITLES = {"../README.md": "Start here"}         # else its first headline
IMAGE = re.compile(r'<p><img src="([^"]*)" alt="([^"]*)" /></p>')


class Section(NamedTuple):
    anchor: str             # "": what stands above the first headline
    title: str
    html: str
    text: str               # as it is written


class Written(NamedTuple):
    """A page, by its path from pages/, "teacher/class.md"."""

    path: str
    title: str
    for_teachers: bool
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


def pages(folder=FOLDER):
    """{path: Written} of all, in the order of the contents; what is not in them comes last."""
    there = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.md"))}
    there |= {name: folder / name for name in BESIDE if (folder / name).exists()}
    order = [path for those in GROUPS.values() for path in those]
    found = {}
    for name in sorted(there, key=lambda name: order.index(name) if name in order else len(order)):
        text = there[name].read_text(encoding="utf-8")
        title = TITLES.get(name) or re.search(r"^# (.+)$", text, re.MULTILINE)[1]
        found[name] = Written(name, title, name.startswith("teacher/"), text)
    return found


def grouped():
    """{group of the contents: its pages}."""
    there = pages()
    groups = {group: [there[path] for path in those if path in there]
              for group, those in GROUPS.items()}
    return {group: those for group, those in groups.items() if those}


def anchor_of(title):
    """Of a headline, as GitHub makes it: "1. A ring, counted" to 1-a-ring-counted."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def linked_files(text):
    """The files beside pages/ that a page links to or shows, from the root: "figures/fp8.png"."""
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
    made = maker()
    tokens = made.parse(text)
    for token, inside in zip(tokens, [*tokens[1:], None]):
        if token.type == "heading_open":
            token.attrSet("id", anchor_of(inside.content))
        for child in token.children or ():
            for kind, attribute in (("link_open", "href"), ("image", "src")):
                if child.type == kind:
                    child.attrSet(attribute, address(child.attrGet(attribute), path, site))
    written = made.renderer.render(tokens, made.options, {})
    return Markup(IMAGE.sub(as_figure, without_dead(written)))


def as_figure(image):
    """A paragraph that is an image, as a figure with a caption; nothing, if the site has none."""
    file, alt = image.groups()
    if not file:
        return ""
    width, height = figures.sides(file)
    return (f'<figure><div><a href="{file}"><img src="{file}" width="{width}" height="{height}" '
            f'alt="{alt}" loading="lazy"></a></div><figcaption>{alt}</figcaption></figure>')


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
    page, suffix = posixpath.splitext(file.removeprefix("pages/"))
    others = {".png": f"{page}.webp", ".md": f"{page.replace('/', '-')}.html",
              ".py": f"{page.replace('/', '-')}.html"}
    found = others.get(suffix, file)
    return found + behind if found in site else ""


def without_dead(html):
    """Without links that lead nowhere on the site: to lab/site/markdown.py, say."""
    return re.sub(r'<a href="">(.*?)</a>', r"\1", html)
