"""The pages of pages/ as HTML."""

import re

import pytest

from lab.page import figures, markdown, reading
from tests.lab.page.test_page import Page

pytest.importorskip("markdown_it")
TEXT = """# A page: of two parts

Read [it](class.md#a-part), [the chapter](../../04_tensor_parallel.py),
[a figure](../../figures/fp8.png), [the rules](../../CONTRIBUTING.md),
[outside](https://github.com/x) and <b>this</b>.

![a picture](../../figures/fp8.png)

![another one](../../figures/none.png)

## A part, `told`

| a | b |
| --- | --- |
| 1 | `x \\| y` |

```python
a < b
```
"""
SITE = {"teacher-class.html", "04_tensor_parallel.html", "figures/fp8.webp"}


@pytest.fixture
def page(tmp_path):
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher/new.md").write_text(TEXT)
    (tmp_path / "first.md").write_text("# First\n")
    first, found = markdown.pages(tmp_path).values()
    assert (first.address, first.for_teachers) == ("first.html", False)
    return found


def test_a_page_in_sections(page):
    assert (page.address, page.short, page.for_teachers) == ("teacher-new.html", "A page", True)
    above, part = markdown.sections(page, SITE)
    assert (above.anchor, above.title, part.anchor, part.title) == (
        "", "", "a-part-told", "A part, `told`")
    assert part.text.startswith("## A part")
    seen = Page(f"<main>{part.html}</main>")
    assert seen.ids == ["a-part-told"] and seen.of("td") == ["1", "x | y"]
    assert seen.of("pre") == ["a < b\n"] and 'class="wide"' in part.html
    assert "A page" not in above.html


def test_links_lead_to_pages_of_the_site_or_nowhere(page):
    above, _ = markdown.sections(page, SITE)
    assert Page(above.html).links == [
        "teacher-class.html#a-part", "04_tensor_parallel.html", "figures/fp8.webp",
        "https://github.com/x", "figures/fp8.webp"]
    assert "the rules" in above.html and "&lt;b&gt;this" in above.html
    assert markdown.linked_files(page.text) == [
        "04_tensor_parallel.py", "figures/fp8.png", "CONTRIBUTING.md", "figures/fp8.png",
        "figures/none.png"]


def test_a_picture_is_a_figure_or_nothing(page):
    above, _ = markdown.sections(page, SITE)
    seen = figures.figure("fp8", "")
    assert (f'<img src="figures/fp8.webp" width="{seen.width}" height="{seen.height}" '
            'alt="a picture" loading="lazy">') in above.html
    assert Page(above.html).of("figcaption") == ["a picture"] and "another" not in above.html


@pytest.mark.parametrize(("target", "path", "found"), [
    ("course.md", "points.md", "course.html"),
    ("../course.md#a", "teacher/class.md", "course.html#a"),
    ("teacher/class.md", "course.md", "teacher-class.html"),
    ("#b", "x.md", "#b"), ("no.md", "course.md", ""),
    ("../kernels/elu.py", "course.md", "kernels-elu.html"),
    ("kernels/elu.py", "../README.md", "kernels-elu.html"),
    ("pages/course.md", "../README.md", "course.html"),
    ("../README.md#a", "course.md", "README.html#a"),
    ("figures/fp8.png", "../README.md", "figures/fp8.webp"),
    ("../figures/a.svg", "course.md", "figures/a.svg"),
    ("LICENSE", "../README.md", "LICENSE"), ("../slurm/a.sbatch", "course.md", "")])
def test_addresses(target, path, found):
    site = {"course.html", "kernels-elu.html", "teacher-class.html", "README.html",
            "figures/fp8.webp", "figures/a.svg", "LICENSE"}
    assert markdown.address(target, path, site) == found


def test_no_link_of_the_readme_is_lost_on_the_site():
    site, [readme] = reading.Course(computes=False).site(), [
        page for page in markdown.pages().values() if page.path == "../README.md"]
    made = "".join(part.html for part in markdown.sections(readme, site))
    lost = {target for target in re.findall(r"\]\(([^)]+)\)", readme.text)
            if markdown.address(target, readme.path, site) == ""}
    assert not lost and 'href="fivefold.ipynb"' in made and 'href="CONTRIBUTING.html"' in made


def test_anchors_are_those_of_github():
    assert markdown.anchor_of("Week 2: One GPU") == "week-2-one-gpu"
    assert markdown.anchor_of("1. A ring, counted (5 points)") == "1-a-ring-counted-5-points"


def test_no_anchor_begins_with_a_figure():
    """Which no selector of CSS takes."""
    for page in markdown.pages().values():
        titles = re.findall(r"^##+ (.+)$", page.text, re.MULTILINE)
        assert all(markdown.anchor_of(title)[0].isalpha() for title in titles), page.path
        assert len(set(titles)) == len(titles), page.path


def test_without_the_library_a_page_stands_as_it_is_written(page, monkeypatch):
    monkeypatch.setattr(markdown, "MarkdownIt", None)
    _, part = markdown.sections(page, SITE)
    assert Page(part.html).of("pre") == [part.text] and "a &lt; b" in part.html


def test_the_site_has_every_page_and_search_finds_it():
    course = reading.Course(folder=reading.ROOT / "runs/none")
    site = course.site()
    found = course.search()
    for page in markdown.pages().values():
        assert f'"{page.short}' in found
        assert Page(site[page.address][1]()).of("h1") == [page.title]   # none has its address
    seen = Page(course.written(markdown.pages()["points.md"], site))
    assert seen.of("h1") == ["Levels and points"]
    assert "midterm.html" in seen.links and "For teachers" in seen.of("p")


def test_the_contents_have_every_page_once():
    groups = markdown.grouped()
    assert [*groups] == ["Guides", "The course", "For teachers"]
    listed = [page.path for those in groups.values() for page in those]
    assert sorted(listed) == sorted(markdown.pages()) and len({*listed}) == len(listed)
    front = Page(reading.Course(folder=reading.ROOT / "runs/none").front())
    assert {page.address for page in markdown.pages().values()} <= {*front.links}


def test_the_contents_have_no_group_without_pages(monkeypatch):
    only = {path: one for path, one in markdown.pages().items() if path.startswith("teacher")}
    monkeypatch.setattr(markdown, "pages", lambda: only)
    assert [*markdown.grouped()] == ["For teachers"]
