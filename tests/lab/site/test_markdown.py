"""The pages of pages/ as HTML."""

import re

import pytest

from lab.site import markdown, pages
from tests.lab.site.test_pages import Page

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
SITE = {"teacher-class.html", "04_tensor_parallel.html", "figures/fp8.png"}


@pytest.fixture
def page(tmp_path):
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher/new.md").write_text(TEXT)
    return markdown.read_page("teacher/new.md", tmp_path)


def test_a_page_in_sections(page):
    assert (page.address, page.short, page.is_for_teachers) == ("teacher-new.html", "A page", True)
    above, part = markdown.sections(page, SITE)
    assert (above.anchor, part.anchor, part.title) == ("", "a-part-told", "A part, `told`")
    assert part.text.startswith("## A part") and "A page" not in above.html
    seen = Page(f"<main>{part.html}</main>")
    assert seen.ids == ["a-part-told"] and seen.of("td") == ["1", "x | y"]
    assert seen.of("pre") == ["a < b\n"]


def test_links_lead_to_pages_of_the_site_or_nowhere(page):
    above, _ = markdown.sections(page, SITE)
    assert Page(above.html).links == [
        "teacher-class.html#a-part", "04_tensor_parallel.html", "figures/fp8.png",
        "https://github.com/x", "figures/fp8.png"]
    assert "the rules" in above.html and "&lt;b&gt;this" in above.html
    assert Page(above.html).of("figcaption") == ["a picture"] and "another" not in above.html


def test_anchors_are_those_of_github_and_begin_with_a_letter():
    """CSS has no selector for an id that begins with a digit."""
    assert markdown.anchor_of("A ring, counted (5 points)") == "a-ring-counted-5-points"
    for page in markdown.pages().values():
        titles = re.findall(r"^##+ (.+)$", page.text, re.MULTILINE)
        assert all(markdown.anchor_of(title)[0].isalpha() for title in titles), page.path
        assert len(set(titles)) == len(titles), page.path


def test_every_page_is_on_the_site_in_search_and_in_the_contents():
    there = {path.relative_to(pages.ROOT / "pages").as_posix()
             for path in pages.ROOT.glob("pages/**/*.md")}
    assert there <= markdown.pages().keys()
    site = pages.Site()
    files, index, front = site.files(), site.search(), Page(site.front())
    for page in markdown.pages().values():
        assert f'"{page.short}' in index and page.address in front.links
        assert Page(files[page.address]()).of("h1") == [page.title]
    readme = markdown.pages()["../README.md"]
    lost = {target for target in re.findall(r"\]\(([^)]+)\)", readme.text)
            if markdown.address(target, readme.path, files) == ""}
    assert not lost
