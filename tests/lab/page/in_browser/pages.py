"""Every page in a browser, and what belongs to no tool: keys, search, hints, paper, files."""

import pytest

from lab.page import reading
from tests.lab.page.in_browser.seen import SHOTS, shoot

PAGES = [name for name in reading.Course().site() if name.endswith(".html")]


@pytest.mark.parametrize("name", PAGES)
def test_every_page_opens(open_page, name):
    for width, scheme in ((1300, "light"), (390, "dark")):
        page = open_page(name, width=width, color_scheme=scheme)
        page.wait_for_load_state("networkidle")
        assert page.locator("h1").count() == 1
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "it is too wide"
        assert not page.locator(".problem").is_visible()
        shoot(page, f"{name.removesuffix('.html')}-{width}-{scheme}")


def test_it_works_without_a_mouse(open_page, address):
    page = open_page("06_context_parallel.html")
    for _ in range(4):
        page.keyboard.press("j")
    here = "all => all.findIndex(one => one.matches('.here'))"
    assert page.eval_on_selector_all("[data-part]", here) == 3
    page.keyboard.press("k")
    page.keyboard.press("/")
    page.locator("#page-search input").wait_for()
    page.keyboard.type("meeting queries", delay=20)
    page.locator("#page-search li a").first.wait_for()
    assert "06 · meeting" in page.inner_text("#page-search ol")
    shoot(page, "search")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url("**/*#*")
    assert not page.locator("#page-search").is_visible()
    page.keyboard.press("]")
    page.wait_for_url("**/07_pipeline_parallel.html")
    page.keyboard.press("?")
    assert page.locator("#page-keys").is_visible()
    page.keyboard.press("Escape")
    paper = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(paper)
    page.keyboard.press("t"), page.keyboard.press("t")
    assert page.evaluate(paper) != before               # dark; and it stays so
    page.keyboard.press("]")
    page.wait_for_url("**/08_expert_parallel.html")
    assert page.evaluate(paper) != before
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"


def test_hints_and_versions_unfold(open_page):
    page = open_page("05_sequence_parallel.html")
    hint = page.locator(".exercise details").first
    assert not hint.locator("p").is_visible()
    hint.locator("summary").click()
    assert hint.locator("p").is_visible()
    before = page.locator("#train_step details.before")
    before.locator("summary").click(position={"x": 5, "y": 5})
    assert before.locator("tr.differs").first.is_visible()
    shoot(page, "before-and-now")


def test_it_prints(open_page, tmp_path):
    page = open_page("04_tensor_parallel.html")
    page.pdf(path=SHOTS / "04.pdf")
    assert (SHOTS / "04.pdf").stat().st_size > 50_000
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible()
