"""What readers read first: every link leads somewhere, every page is one click away, and each
figure is shown."""

import functools
import re
import subprocess
from urllib.parse import urlsplit

from lab.site import markdown
from tests.conftest import ROOT

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


@functools.cache
def documents():
    """Their names; lab/ has templates of others."""
    found = (path.relative_to(ROOT) for path in tracked() if path.suffix == ".md")
    return sorted(path.as_posix() for path in found if path.parts[0] != "lab")


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


def leads(name, target):
    """Whether a link leads somewhere; what is outside is only checked for its form."""
    parts = urlsplit(target)
    if parts.scheme:
        return parts.scheme == "https" and re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.netloc)
    path = (ROOT / name).parent.joinpath(parts.path).resolve() if parts.path else ROOT / name
    return path in tracked() and (not parts.fragment or parts.fragment in anchors(path))


def test_links_lead_somewhere():
    assert {"README.md", "CONTRIBUTING.md", "pages/course.md", "pages/teacher/class.md",
            "benchmarks/RESULTS.md"} <= {*documents()}
    wrong = [(name, target) for name in documents() for _, target in links(name)
             if not leads(name, target)]
    assert not wrong
    for target in "no-such.md", "course.md#no-such-anchor", "http://example.org", "https://nowhere":
        assert not leads("pages/today.md", target), target


def test_every_page_is_one_click_from_the_readme():
    pages = {path.resolve() for path in (ROOT / "pages").rglob("*.md")}
    assert len(pages) > 15 and pages <= files_linked("README.md")


def test_the_page_of_files_names_each():
    at_the_top = {path.name for path in tracked() if path.parent == ROOT} - {".gitignore"}
    named = re.findall(r"`([\w.*/-]+)`", text_of("pages/files.md"))
    assert at_the_top <= {path.name for name in named for path in ROOT.glob(name)}


def test_each_figure_is_shown():
    shown = set().union(*(files_linked(name, images=True) for name in documents()))
    figures = {path for path in tracked() if path.parent == ROOT / "figures"}
    assert len(figures) > 20 and figures <= shown, figures - shown
