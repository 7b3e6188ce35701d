"""What readers read first: the README is short, every link leads somewhere, every page is one click
away, and each figure is shown."""

import functools
import re
import subprocess
from urllib.parse import urlsplit

import pytest

from lab.page import markdown
from tests.conftest import ROOT

WORDS = 1000
LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"(`+)[^`].*?\1(?!`)", re.DOTALL)


@functools.cache
def tracked():
    """The files and folders of the repository; without git, those that are there."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT,
                            capture_output=True, text=True).stdout.split("\n")
    files = {ROOT / name for name in listed if name} or {*ROOT.rglob("*")}
    return {path for path in files if path.exists()} | {
        folder for path in files for folder in path.parents}


FOUND = (path.relative_to(ROOT) for path in tracked() if path.suffix == ".md")
DOCUMENTS = sorted(path.as_posix() for path in FOUND if path.parts[0] != "lab")   # has templates
EVERY = pytest.mark.parametrize("name", DOCUMENTS)


@functools.cache
def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def links(name):
    """[(whether it is an image, where it leads)]; code has none."""
    prose = CODE.sub("code", BLOCK.sub("", text_of(name)))
    return [(bool(mark), target) for mark, target in LINK.findall(prose)]


def files_linked(name, images=False):
    """The files that a document links to, or shows."""
    return {(ROOT / name).parent.joinpath(target.partition("#")[0]).resolve()
            for is_image, target in links(name)
            if is_image == images and not urlsplit(target).scheme and target[0] != "#"}


def anchors(path):
    """Of its headlines, as GitHub makes them."""
    text = BLOCK.sub("", path.read_text(encoding="utf-8"))
    return {markdown.anchor_of(title) for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


def test_the_documents_are_found():
    assert {"README.md", "CONTRIBUTING.md", "pages/course.md", "pages/teacher/class.md",
            "container/README.md", "benchmarks/RESULTS.md"} <= {*DOCUMENTS}


def test_the_readme_is_short():
    """By `wc -w README.md`."""
    assert len(text_of("README.md").split()) <= WORDS


@EVERY
def test_a_link_leads_somewhere(name):
    """What is outside is held to its form alone."""
    for _, target in links(name):
        parts = urlsplit(target)
        if parts.scheme:
            assert parts.scheme == "https" and re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.netloc), \
                target
            continue
        path = (ROOT / name).parent.joinpath(parts.path).resolve() if parts.path else ROOT / name
        assert path in tracked(), target
        assert not parts.fragment or parts.fragment in anchors(path), target


def test_every_page_is_one_click_from_the_readme():
    pages = {path.resolve() for path in (ROOT / "pages").rglob("*.md")}
    assert len(pages) > 15 and pages <= files_linked("README.md")


def test_the_page_of_files_names_each():
    at_the_top = {path.name for path in tracked() if path.parent == ROOT} - {".gitignore"}
    named = re.findall(r"`([\w.*/]+)`", text_of("pages/files.md"))
    assert at_the_top <= {path.name for name in named for path in ROOT.glob(name)}


def test_each_figure_is_shown():
    shown = set().union(*(files_linked(name, images=True) for name in DOCUMENTS))
    figures = {path for path in tracked() if path.parent == ROOT / "figures"}
    assert len(figures) > 20 and figures <= shown, figures - shown


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name.startswith("pages/")])
def test_a_page_begins_with_what_it_is_for(name):
    """Below its title stands a paragraph of prose."""
    title, _, below = text_of(name).partition("\n")
    assert title.startswith("# ") and re.match(r"\n?[A-Z\[`][^\n]{20,}", below), below[:80]
