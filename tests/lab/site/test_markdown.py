"""The pages of pages/ as HTML."""

import re

import pytest

from lab.site import markdown, reading
from tests.lab.site.test_page import Page

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
    assert (above.anchor, part.anchor, part.title) == ("", "a-part-told", "A part, `told`")
    assert part.text.startswith("## A part") and "A page" not in above.html
    seen = Page(f"<main>{part.html}</main>")
    assert seen.ids == ["a-part-told"] and seen.of("td") == ["1", "x | y"]
    assert seen.of("pre") == ["a < b\n"]


def test_links_lead_to_pages_of_the_site_or_nowhere(page):
    above, _ = markdown.sections(page, SITE)
    assert Page(above.html).links == [
        "teacher-class.html#a-part", "04_tensor_parallel.html", "figures/fp8.webp",
        "https://github.com/x", "figures/fp8.webp"]
    assert "the rules" in above.html and "&lt;b&gt;this" in above.html
    assert Page(above.html).of("figcaption") == ["a picture"] and "another" not in above.html


def test_anchors_are_those_of_github_and_begin_with_a_letter():
    """CSS has no selector for an id that begins with a digit."""
    assert markdown.anchor_of("A ring, counted (5 points)") == "a-ring-counted-5-points"
    for page in markdown.pages().values():
        titles = re.findall(r"^##+ (.+)$", page.text, re.MULTILINE)
        assert all(markdown.anchor_of(title)[0].isalpha() for title in titles), page.path
        assert len(set(titles)) == len(titles), page.path


def test_every_page_is_on_the_site_in_search_and_once_in_the_contents():
    course = reading.Course(folder=reading.ROOT / "runs/none")
    site, found = course.site(), course.search()
    for page in markdown.pages().values():
        assert f'"{page.short}' in found
        assert Page(site[page.address][1]()).of("h1") == [page.title]
    listed = [page.path for those in markdown.grouped().values() for page in those]
    assert sorted(listed) == sorted(markdown.pages()) and len({*listed}) == len(listed)
    front = Page(course.front())
    assert {page.address for page in markdown.pages().values()} <= {*front.links}
    readme = markdown.pages()["../README.md"]
    lost = {target for target in re.findall(r"\]\(([^)]+)\)", readme.text)
            if markdown.address(target, readme.path, site) == ""}
    assert not lost
