"""Every page in a browser, and what belongs to no tool: keys, search, hints, paper."""

import pytest

from lab.site import pages
from tests.lab.site.in_browser.seen import broken, settled, shoot

pytestmark = pytest.mark.full
PAPER = "getComputedStyle(document.body).backgroundColor"


@pytest.mark.parametrize(("width", "scheme"), [(1300, "light"), (390, "dark")])
def test_every_page_keeps_to_the_rules(open_page, width, scheme):
    found = []
    for name in (name for name in pages.Site().files() if name.endswith(".html")):
        page = open_page(name, width, color_scheme=scheme)
        settled(page)
        lines = broken(page)
        if page.locator("h1").count() != 1:
            lines.append("it has no headline, or several")
        if page.evaluate("document.documentElement.scrollWidth") > width:
            lines.append("it is too wide")
        if page.locator(".problem:visible").count():
            lines.append(page.inner_text(".problem"))
        shoot(page, f"{name.removesuffix('.html')}-{width}-{scheme}")
        found += [f"{name}: {line}" for line in lines]
        page.close()
    assert not found, "\n".join(found)


def test_it_works_without_a_mouse(open_page):
    page = open_page("06_context_parallel.html")
    for _ in range(4):
        page.keyboard.press("j")
    here = "all => all.findIndex(one => one.matches('.here'))"
    assert page.eval_on_selector_all("[data-part]", here) == 3
    page.keyboard.press("k")
    page.keyboard.press("/")
    page.locator("#page-search input").wait_for()
    page.keyboard.type("meeting queries", delay=20)
    page.locator("#page-search li a", has_text="06 · meeting").wait_for()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url("**/*#*")
    assert not page.locator("#page-search").is_visible()
    page.keyboard.press("]")
    page.wait_for_url("**/07_pipeline_parallel.html")
    page.keyboard.press("?")
    assert page.locator("#page-keys").is_visible()
    page.keyboard.press("Escape")
    before = page.evaluate(PAPER)
    page.keyboard.press("t")
    assert page.evaluate(PAPER) != before
    page.keyboard.press("]")
    page.wait_for_url("**/08_expert_parallel.html")
    assert page.evaluate(PAPER) != before  # it stays dark
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    for _ in range(100):
        page.keyboard.press("Tab")
        assert not page.evaluate("Boolean(document.activeElement.closest('.code pre'))")


def test_the_contents_mark_the_part_that_is_read(open_page):
    page = open_page("06_context_parallel.html")
    for place in ("section-3", "play-rings", "exercises"):
        page.evaluate(f"document.getElementById('{place}').scrollIntoView()")
        page.locator(f"#contents a[href='#{place}'][aria-current=true]").wait_for()
    page = open_page("06_context_parallel.html", width=390)
    assert not page.locator("#contents").is_visible()
    page.click("#open-contents")
    page.click("#contents a[href='#exercises']")
    page.locator("#contents").wait_for(state="hidden")


def test_code_is_copied_without_its_numbers(open_page):
    page = open_page("06_context_parallel.html", permissions=["clipboard-read", "clipboard-write"])
    source = pages.Site().sources["06_context_parallel"]
    piece = next(one for one in source.pieces if one.name == "meeting")
    lines = [line for number, line in enumerate(source.lines, start=1)
             if piece.first <= number <= piece.last and number not in piece.silent]
    page.hover("#meeting .code")
    page.click("#meeting .copy")
    page.locator("#meeting .copy", has_text="copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "\n".join(lines) + "\n"
