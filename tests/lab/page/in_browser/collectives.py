"""The tool of collectives, on its own page and in lesson 00."""

import pytest

from tests.lab.page.in_browser.seen import asked, shoot, verdict


def drawn(page, place="[data-tool]"):
    """{(rank, row, place in it): what the cell holds}."""
    return {tuple(one[:3]): one[3] for one in page.eval_on_selector_all(
        f"{place} .stage .cell", """all => all.map(({ dataset: { rank, row, at, cell } }) => [
            Number(rank), Number(row), Number(at), cell])""")}


def expected(state):
    return {(rank, row, at): cell for rank, rows in enumerate(state)
            for row, cells in enumerate(rows) for at, cell in enumerate(cells)}


def messages(page):
    return page.eval_on_selector_all(
        ".message", "all => all.map(({ dataset: { from, to } }) => [Number(from), Number(to)])")


def test_every_round_is_drawn_as_it_was_played(open_page, address):
    page = open_page("collectives.html")
    names = page.eval_on_selector_all("select[name=collective] option",
                                      "all => all.map(one => one.value)")
    for name in names:
        page.select_option("select[name=collective]", name)
        page.locator(".says a", has_text=name).wait_for()
        told = asked(address, f"collective?collective={name}&ranks=4")
        assert drawn(page) == expected(told["states"][0]) and messages(page) == []
        for passed, state in zip(told["rounds"], told["states"][1:]):
            page.press("input[name=round]", "ArrowRight")
            assert drawn(page) == expected(state)
            assert messages(page) == [message[:2] for message in passed]
            assert page.locator(".changed, .given").count() > 0
        verdict(page, f"Round {len(told['rounds'])} of {len(told['rounds'])}")
        rows = page.locator(".costs tbody tr").all_inner_texts()
        for row, (what, _, formula, value) in zip(rows, told["costs"], strict=True):
            assert what in row and f"{formula} = {round(value, 3):g}" in row
        given = sum(end - begin for _, begin, end in told["gives"])
        assert page.locator(".given").count() == given
    shoot(page, "collectives")


def test_every_control_moves_something(open_page):
    page = open_page("collectives.html#collective=reduce_scatter&ranks=8&round=7")
    verdict(page, "Round 7 of 7")
    assert page.get_attribute(".stage svg", "aria-label").startswith(
        "reduce_scatter on 8 ranks, after round 7 of 7: rank 0 has a0+b0+c0+d0+e0+f0+g0+h0")
    page.press("input[name=ranks]", "ArrowLeft")
    verdict(page, "Before")
    assert page.locator(".stage .cell").count() == 49 and "ranks=7&round=0" in page.url
    page.click(".previous")                             # from the first, to the last
    verdict(page, "Round 6 of 6")
    page.click(".next")
    verdict(page, "Before")
    page.select_option("select[name=collective]", "all_reduce_doubling")
    verdict(page, "in 4 parts")
    assert "P: 4, the largest power of 2" in page.inner_text(".key")
    assert page.is_hidden(".problem")


def test_parts_travel_and_arrive(open_page):
    page = open_page("collectives.html#ranks=3")
    verdict(page, "Before")
    page.click(".run")
    page.locator(".travels").first.wait_for()
    assert page.locator(".travels").count() == 3 == page.locator(".message").count()
    shoot(page, "collectives-playing")
    verdict(page, "Round 4 of 4")
    page.locator(".run", has_text="play").wait_for()
    assert page.locator(".given").count() == 9 and page.locator(".travels").count() == 0


def test_each_quick_click_is_a_round(open_page):
    page = open_page("collectives.html#ranks=4")
    verdict(page, "Before")
    page.evaluate("() => [1, 2, 3].forEach(() => document.querySelector('.next').click())")
    verdict(page, "Round 3 of 6")
    page.click(".next")
    page.click(".previous")                             # what was on its way arrives, and goes back
    verdict(page, "Round 3 of 6")
    page.evaluate("() => [1, 2, 3, 4].forEach(() => document.querySelector('.next').click())")
    verdict(page, "Round 6 of 6")


def test_another_collective_begins_before_its_first_round(open_page):
    """Also where it is chosen while messages travel, and answered when they would be there."""
    page = open_page("collectives.html#ranks=4")
    verdict(page, "Before")
    page.evaluate("""() => {
        const now = fetch;
        window.fetch = async (...asked) => {
            await new Promise(resolve => { setTimeout(resolve, 1200); });
            return now(...asked);
        };
    }""")
    page.click(".next")
    page.select_option("select[name=collective]", "broadcast")
    page.locator(".says a", has_text="broadcast").wait_for()
    assert page.inner_text(".verdict").startswith("Before") and "round=0" in page.url
    page.wait_for_timeout(800)
    assert page.inner_text(".verdict").startswith("Before")


def test_where_motion_is_not_wanted_nothing_travels(open_page):
    page = open_page("collectives.html", reduced_motion="reduce")
    verdict(page, "Before")
    page.evaluate("""() => { window.travelled = 0; new MutationObserver(() => {
        travelled += document.querySelectorAll(".travels").length;
    }).observe(document.querySelector(".stage"), { childList: true, subtree: true }); }""")
    page.click(".next")
    verdict(page, "Round 1 of 6")
    page.click(".run")
    verdict(page, "Round 3 of 6")
    page.click(".run")
    assert page.evaluate("travelled") == 0 and page.locator(".message").count() == 4


def test_it_plays_in_the_lesson(open_page, address):
    page = open_page("00_collectives.html")
    tool = page.locator("#play-collectives")
    assert "S bytes, in 3 parts" in tool.locator(".verdict").inner_text()     # it came along
    tool.locator("input[name=round]").press("End")
    told = asked(address, "collective?collective=all_reduce_ring&ranks=3")
    assert drawn(page, "#play-collectives") == expected(told["states"][-1])
    assert tool.locator(".more a").get_attribute("href").endswith(
        "#collective=all_reduce_ring&ranks=3&round=4")
    assert "#" not in page.url
    before = page.locator("#play-collectives").evaluate(
        "one => one.previousElementSibling.innerText")
    assert "reduce_scatter" in before                   # the table of them


@pytest.mark.parametrize(("link", "line", "shown"), [
    ("ranks=0", "ranks = '0' is no whole number", "in 4 parts"),
    ("collective=sort", "collective = 'sort' is none of", "in 4 parts"),
    ("round=-1", "There is no round -1 of 6: this is 0", "Before"),
    ("round=99", "There is no round 99 of 6: this is 6", "Round 6 of 6"),
    ("round=x", "There is no round x of 6: this is 0", "Before")])
def test_a_bad_link_is_told_in_a_line(open_page, link, line, shown):
    page = open_page(f"collectives.html#{link}")
    page.locator(".problem", has_text=line).wait_for()
    verdict(page, shown)
    page.click(".next")
    page.locator(".problem").wait_for(state="hidden")
