"""The planner in a browser: from stored answers, and where Python answers."""

import pytest

from lab.site import build, plans
from tests.lab.site.in_browser.seen import broken, settled, shoot

PYTHON = pytest.mark.skipif(not build.ARCHIVE.exists(), reason="make site has fetched no Pyodide")
pytestmark = pytest.mark.full
QUESTION = {"model": "70b", "cluster": "h100", "gpus": 512, "batch": 2048,
            "software": "megatron-2024"}


def widths(page, bar):
    """{cause: width} of a bar's parts."""
    return dict(page.eval_on_selector_all(
        f"{bar} rect[data-cause]",
        "all => all.map(one => [one.dataset.cause, Number(one.getAttribute('width'))])"))


def press(page, name, key):
    page.press(f"input[name={name}]", key)
    settled(page)


@PYTHON
def test_sliders_change_the_bars_to_what_the_planner_answers(open_page):
    page = open_page("planner.html#model=70b&cluster=h100&gpus=512")
    settled(page)
    assert not broken(page)
    best = plans.best(**QUESTION)
    assert best["plans"][0]["words"] in page.inner_text(".verdict")
    rows = page.locator(".plans tr").all_inner_texts()
    for plan, row in zip(best["plans"], rows[1:], strict=True):
        assert row.startswith(plan["words"])
    press(page, "tp", "ArrowRight")
    press(page, "zero", "ArrowLeft")
    layout = dict(pair.split("=") for pair in page.url.split("#")[1].split("&"))
    assert layout["tp"] == "8" and layout["zero"] == "1"
    layout.pop("seq")
    plan = plans.plan(**layout)
    assert f"{plan['seconds']:.1f} s a step" in page.inner_text(".verdict")
    across = max(plan["capacity"] * 1.02, plan["bytes"])
    for bar, parts, most in ((".memory", plan["memory"], across),
                             (".seconds", plan["time"], plan["seconds"])):
        drawn = widths(page, bar)
        for cause, value in parts.items():
            assert drawn[cause] == pytest.approx(900 * value / most, abs=1e-6)
    shoot(page, "planner-changed")

    again = open_page("planner.html" + "#" + page.url.split("#")[1])  # a link holds all of it
    settled(again)
    assert widths(again, ".seconds") == widths(page, ".seconds")
    page.locator(".take-best").click()
    settled(page)
    assert best["plans"][0]["words"] in page.inner_text(".verdict")


@PYTHON
def test_a_change_that_works_is_offered_if_nothing_fits(open_page):
    page = open_page("planner.html#model=405b&gpus=8")
    settled(page)
    assert "✗" in page.inner_text(".verdict") and page.locator(".problem").is_visible()
    page.get_by_role("button", name="128").click()
    settled(page)
    assert "✓" in page.inner_text(".verdict") and "gpus=128" in page.url
    assert page.locator(".problem").is_hidden()


def test_a_map_of_layouts_is_filled_when_it_is_seen(open_page):
    page = open_page("planner.html", height=600)
    settled(page)
    assert page.locator(".map button", has_text="…").count() == 20
    page.locator(".map").scroll_into_view_if_needed()
    page.locator(".map button", has_text="%").first.click()
    page.wait_for_url("**model=1b**")
