"""The planner in a browser: from stored answers, and where Python answers."""

import pytest

from lab.site import answers, build, plans, tools
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


@pytest.mark.parametrize(("link", "shown"), [
    ("gpus=20000000", "gpus=512"), ("model=foo", "model=70b"), ("colour=red", "gpus=512")])
def test_a_bad_link_is_told_in_a_line(open_page, link, shown):
    page = open_page(f"planner.html#{link}")
    settled(page)
    problem = page.inner_text(".problem")
    assert link.split("=")[0] in problem and "--" not in problem
    assert "✓" in page.inner_text(".verdict") and shown in page.url and link not in page.url


def test_a_map_of_layouts_is_filled_when_it_is_seen(open_page):
    page = open_page("planner.html", height=600)
    settled(page)
    assert page.locator(".map button", has_text="…").count() == 20
    page.locator(".map").scroll_into_view_if_needed()
    page.locator(".map button", has_text="%").first.click()
    page.wait_for_url("**model=1b**")


# ----------------------------------------------------------------------------------------- answers


def alike(one, other):
    """From Python 3.12 on, sum() rounds differently: the last digits differ."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == (pytest.approx(other, rel=1e-12) if isinstance(other, float) else other)


def answer(page, query):
    return page.evaluate("""async query => {
        try { return await ask(query, null, () => null); } catch (error) { return error.message; }
    }""", query)


@PYTHON
def test_python_in_the_browser_answers_as_it_does_here(open_page):
    page = open_page("schedules.html")
    for name, asked in (
            ("plan", {"model": "qwen3-235b", "gpus": 512, "ep": 32}),
            ("best", {"model": "8b", "gpus": 24, "batch": 96, "cluster": "a100"}),
            ("schedule", {"schedule": "dualpipe", "ranks": 5, "micro_batches": 20, "chunks": 2,
                          "breadth_first": "false", "F": 1.3, "B": 1, "W": 1}),
            ("roofline", {"cluster": "h200", "model": "70b", "chips": 48, "strategy": "both",
                          "zero_axes": 1, "tp_axes": 1})):
        found = answer(page, tools.written(name, asked))
        assert alike(found, answers.answer(name, asked)), asked
    assert "none" in answer(page, "plan?model=70b&gpus=none")
