"""The planner in a browser, on its page and in lesson 10."""

import pytest

from tests.lab.site.in_browser.seen import asked, broken, settled, shoot

pytestmark = pytest.mark.full
QUESTION = "model=70b&cluster=h100&gpus=512&batch=2048&software=megatron-2024"
FAILS = {"status": 400, "content_type": "application/json",
         "body": '{"error": "the search took more"}'}


def widths(page, bar):
    """{cause: width} of a bar's parts."""
    return dict(page.eval_on_selector_all(
        f"{bar} rect[data-cause]",
        "all => all.map(one => [one.dataset.cause, Number(one.getAttribute('width'))])"))


def press(page, name, key):
    page.press(f"input[name={name}]", key)
    settled(page)


def test_sliders_change_the_bars_to_what_the_planner_answers(open_page, address):
    page = open_page("planner.html#model=70b&cluster=h100&gpus=512")
    settled(page)
    assert not broken(page)
    best = asked(address, f"best?{QUESTION}")
    assert best["plans"][0]["words"] in page.inner_text(".verdict")
    rows = page.locator(".plans tr").all_inner_texts()
    for plan, row in zip(best["plans"], rows[1:], strict=True):
        assert row.startswith(plan["words"])
    press(page, "tp", "ArrowRight")
    press(page, "zero", "ArrowLeft")
    layout = dict(pair.split("=") for pair in page.url.split("#")[1].split("&"))
    assert layout["tp"] == "8" and layout["zero"] == "1"
    layout.pop("seq")
    plan = asked(address, "plan?" + "&".join(f"{key}={value}" for key, value in layout.items()))
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
    page.locator(".plans button").nth(3).click()
    settled(page)
    assert best["plans"][3]["words"] in page.inner_text(".verdict")
    page.locator(".take-best").click()
    settled(page)
    assert best["plans"][0]["words"] in page.inner_text(".verdict")


def test_degrees_of_a_link_are_kept_and_the_others_are_searched(open_page, address):
    page = open_page("planner.html#model=70b&gpus=512&tp=8")
    settled(page)
    best = asked(address, f"best?{QUESTION}&tp=8")["plans"][0]
    assert best["words"] in page.inner_text(".verdict") and best["layout"]["tp"] == 8
    assert page.url.endswith("&tp=8")  # what is given, and no more


def test_an_abandoned_search_ends(open_page):
    from lab.site import plans

    page = open_page("planner.html")
    settled(page)
    with page.expect_request("**/best?**qwen3**"):
        page.select_option("select[name=model]", "qwen3-235b")
    page.select_option("select[name=model]", "1b")
    settled(page)
    assert plans.SEARCHES.acquire(timeout=60) and plans.SEARCHES.acquire(timeout=60)
    plans.SEARCHES.release(2)


def test_a_change_that_works_is_offered_if_nothing_fits(open_page):
    page = open_page("planner.html#model=405b&gpus=8")
    settled(page)
    assert "✗" in page.inner_text(".verdict") and page.locator(".problem").is_visible()
    page.get_by_role("button", name="128").click()
    settled(page)
    assert "✓" in page.inner_text(".verdict") and "gpus=128" in page.url
    assert page.locator(".problem").is_hidden()


@pytest.mark.parametrize(("link", "shown"), [
    ("gpus=20000000", "gpus=512"), ("model=foo", "model=70b"), ("colour=red", "gpus=512")])
def test_a_bad_link_is_told_in_a_line(open_page, link, shown):
    page = open_page(f"planner.html#{link}")
    settled(page)
    problem = page.inner_text(".problem")
    assert link.split("=")[0] in problem and "--" not in problem
    assert "✓" in page.inner_text(".verdict") and shown in page.url and link not in page.url


def test_a_search_that_fails_and_a_server_that_is_gone_are_told(open_page):
    page = open_page("planner.html", height=600)
    settled(page)
    page.route("**/best?**", lambda route: route.fulfill(**FAILS))
    press(page, "gpus", "ArrowLeft")
    assert "the search took more" in page.inner_text(".problem")
    assert not page.locator(".tool.waits").count()
    page.unroute("**/best?**")
    page.evaluate("() => { fetch = () => Promise.reject(new TypeError('Failed to fetch')); }")
    press(page, "gpus", "ArrowLeft")
    assert "make page" in page.inner_text(".problem")


def test_a_map_of_layouts_is_filled_when_it_is_seen(open_page):
    page = open_page("planner.html", height=600)
    settled(page)
    assert page.locator(".map button", has_text="…").count() == 20
    page.locator(".map").scroll_into_view_if_needed()
    page.locator(".map button", has_text="%").first.click()
    page.wait_for_url("**model=1b**")
