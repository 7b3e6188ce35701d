"""Every page in a browser, and what belongs to no tool: keys, search, hints, paper, files."""

import pytest

from lab.page import reading
from tests.lab.page.in_browser.gate import STOPS
from tests.lab.page.in_browser.seen import SHOTS, shoot

PAGES = [name for name in reading.Course().site() if name.endswith(".html")]
PAPER = "getComputedStyle(document.body).backgroundColor"


@pytest.mark.parametrize("name", PAGES)
def test_every_page_opens(open_page, name):
    for width, scheme in ((1300, "light"), (390, "dark")):
        page = open_page(name, width=width, color_scheme=scheme)
        page.wait_for_load_state("networkidle")
        assert page.locator("h1").count() == 1
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "it is too wide"
        assert not page.locator(".problem:visible").count()
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
    before = page.evaluate(PAPER)
    page.keyboard.press("t")
    assert page.evaluate(PAPER) != before               # dark; and it stays so
    page.keyboard.press("]")
    page.wait_for_url("**/08_expert_parallel.html")
    assert page.evaluate(PAPER) != before
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_click_on_the_theme_changes_it(open_page, scheme):
    page = open_page("glossary.html", color_scheme=scheme)
    seen = [page.evaluate(PAPER)]
    for _ in range(3):
        page.click("#theme")
        seen.append(page.evaluate(PAPER))
    assert seen[0] == seen[2] != seen[1] == seen[3]
    page.click("#theme")                                # as the system has it, again
    page.emulate_media(color_scheme={"light": "dark", "dark": "light"}[scheme])
    assert page.evaluate(PAPER) == seen[1]


def test_the_point_comes_early(open_page):
    page = open_page("06_context_parallel.html")
    image = page.locator("#figure img")
    page.wait_for_function("() => document.querySelector('#figure img').complete")
    box = image.bounding_box()
    assert box["y"] + box["height"] < 1000 and box["width"] > 900
    upper = box["height"]
    page.click(".whole")
    page.wait_for_function("() => document.querySelector('#figure img').naturalHeight > 2000")
    assert image.bounding_box()["height"] > 3 * upper
    shoot(page, "whole-figure")


def test_the_contents_mark_where_one_is(open_page):
    page = open_page("06_context_parallel.html")
    here = page.locator("#contents a[aria-current=page]")
    assert here.inner_text() == "06 Context parallelism"
    now = page.locator("#contents a[aria-current=true]")
    for place in ("section-3", "play-rings", "section-6", "exercises"):
        page.evaluate(f"document.getElementById('{place}').scrollIntoView()")
        page.locator(f"#contents a[href='#{place}'][aria-current=true]").wait_for()
        assert now.count() == 1
        assert 0 < now.bounding_box()["y"] < 880, "it is out of sight"
    shoot(page, "contents")


def test_the_contents_open_on_a_narrow_screen(open_page):
    page = open_page("06_context_parallel.html", width=390)
    assert not page.locator("#contents").is_visible()
    page.click("#open-contents")
    assert page.get_attribute("#open-contents", "aria-expanded") == "true"
    shoot(page, "contents-390")
    page.click("#contents a[href='#exercises']")
    assert page.locator("#exercises h2").evaluate("one => one.getBoundingClientRect().top") < 800
    assert not page.locator("#contents").is_visible()


def test_what_is_read_has_a_tick(open_page):
    page = open_page("kernels-grouped_matmul.html")
    name, tick = "kernels/grouped_matmul", "li[data-file='kernels/grouped_matmul'][data-read]"
    assert not page.locator(tick).count() and not page.is_checked("#is-read")
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    page.locator(tick).wait_for()
    assert page.is_checked("#is-read")
    page.uncheck("#is-read")                            # and it stays so, though the end is seen
    page.reload()
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    page.wait_for_timeout(300)
    assert not page.locator(tick).count()
    page.check("#is-read")
    page.goto(page.url.replace("kernels-grouped_matmul", "index"))
    assert page.locator(f".cards li[data-file='{name}'][data-read]").count() == 1
    assert page.locator("li[data-read]").count() == 2   # of the contents, and of the cards


def test_a_link_into_the_imports_opens_them(open_page):
    page = open_page("06_context_parallel.html")
    imports = page.locator("details.imports")
    assert imports.locator("summary").inner_text() == "imports: lines 106 to 116"
    assert not page.locator("#L110").is_visible()
    page.goto(page.url + "#L110")
    page.locator("#L110").wait_for()
    assert 0 <= page.locator("#L110").bounding_box()["y"] < 900


def test_code_is_copied_without_its_numbers(open_page):
    page = open_page("06_context_parallel.html", permissions=["clipboard-read", "clipboard-write"])
    source = reading.Course().sources["06_context_parallel"]
    piece = next(one for one in source.pieces if one.name == "meeting")
    lines = [line for number, line in enumerate(source.lines, start=1)
             if piece.first <= number <= piece.last and number not in piece.silent]
    page.hover("#meeting .code")
    page.click("#meeting .copy")
    page.locator("#meeting .copy", has_text="copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "\n".join(lines) + "\n"
    commands = page.locator(".lesson .copies", has_text="torchrun").first
    commands.hover()
    commands.locator(".copy").click()
    page.wait_for_timeout(100)
    assert page.evaluate("navigator.clipboard.readText()").startswith("torchrun")
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.hover("#meeting .code")
    page.click("#meeting .copy")                        # the old way: what is selected
    page.wait_for_timeout(100)
    assert "def meeting" in page.evaluate("getSelection().toString()")


def test_code_is_no_stop_of_tab(open_page):
    """A reader can still click on each number of a line, and each name."""
    page = open_page("09_5d.html")
    assert page.locator(".code pre a[href]").count() > 700
    stops = []
    page.click("h1")
    for _ in range(STOPS + 1):
        page.keyboard.press("Tab")
        stops.append(page.evaluate("document.activeElement.closest('.code pre')?.tagName"))
    assert "PRE" not in stops


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
    page.wait_for_load_state("networkidle")
    page.pdf(path=SHOTS / "04.pdf")
    assert b"/Subtype /Image" in (SHOTS / "04.pdf").read_bytes()
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible()
