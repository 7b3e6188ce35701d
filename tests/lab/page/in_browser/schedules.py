"""The tool of schedules, on its own page and in lesson 07."""

import pytest

from tests.lab.page.in_browser import rules
from tests.lab.page.in_browser.seen import asked, shoot, verdict

CHANGED = "old => document.querySelector('.time').innerHTML !== old"
BEGUN = "all => all.filter(one => !one.classList.contains('later')).length"


def begun(page):
    return page.eval_on_selector_all(".time .action", BEGUN)


def ends_of_alive(page):
    """Where what is drawn of each rank's micro-batches ends."""
    return page.eval_on_selector_all(".living", "all => all.map(one => one.getBBox().width)")


def test_a_schedule_plays_and_what_is_alive_with_it(open_page, address):
    page = open_page("schedules.html#schedule=zb-h1&ranks=4&micro_batches=8")
    verdict(page, "bubble")
    told = asked(address, "schedule?schedule=zb-h1&ranks=4&micro_batches=8")
    for words in (page.inner_text(".verdict"), page.get_attribute(".time svg[role]", "aria-label")):
        assert f"bubble {100 * told['bubble']:.1f}%" in words
    every = sum(map(len, told["actions"]))
    assert page.locator(".alive .count").all_text_contents() == [
        f"up to {max(alive)}" for alive in told["alive"]]
    assert begun(page) == page.locator(".time .action").count() == every
    page.click(".run")
    page.wait_for_timeout(1500)
    now, ends = float(page.get_attribute(".time .now", "x1")), ends_of_alive(page)
    assert 0 < begun(page) < every                      # it is on its way
    assert max(ends) <= float(page.get_attribute(".alive .now", "x1")) + 0.01
    shoot(page, "schedules-playing")
    page.locator(".run", has_text="play").wait_for(timeout=30_000)         # it has ended
    assert begun(page) == every and min(ends_of_alive(page)) > now
    page.locator(".time .action[data-micro='5']").first.click()     # one, through all ranks
    assert page.locator(".time .action:not(.other)").count() == 4 * 3
    assert page.inner_text(".lists").splitlines()[0].split()[2:5] == told["lists"][0].split()[:3]


def test_what_is_drawn_is_what_was_told(open_page, address):
    """Each action as long as it takes, and what is alive after each step."""
    page = open_page("schedules.html#schedule=interleaved&ranks=4&micro_batches=8&B=1.5&W=0.5")
    verdict(page, "bubble")
    told = asked(address, "schedule?schedule=interleaved&ranks=4&micro_batches=8&B=1.5&W=0.5")
    drawn = page.eval_on_selector_all(".time .action", """all => all.map(one => [one.dataset.kind,
        Number(one.dataset.micro), Number(one.firstChild.getAttribute("x")),
        Number(one.firstChild.getAttribute("width"))])""")
    scale = max(left + wide for *_, left, wide in drawn) / told["end"]
    for one, (kind, _, micro, start, end) in zip(drawn, sum(told["actions"], []), strict=True):
        assert one[:2] == [kind, micro]
        assert one[2:] == pytest.approx([start * scale, (end - start) * scale], abs=0.01)
    for _ in range(6):                                  # from the end: six starts back
        page.click(".previous")
    now = float(page.input_value("input[name=until]"))
    times = sorted({round(action[3], 2) for action in sum(told["actions"], [])} | {told["end"]})
    now = times[int(now)]
    alive = []
    for actions, after in zip(told["actions"], told["alive"]):
        so_far = [count for (kind, *_, start, end), count in zip(actions, after)
                  if (start if kind == "F" else end) <= now]
        alive.append(so_far[-1])
    assert page.eval_on_selector_all(".alive .count", "all => all.map(one => one.textContent)") == [
        f"{count} of {most}" for count, most in zip(alive, told["most_alive"])]


@pytest.mark.parametrize(("width", "scheme"), [(1300, "light"), (390, "dark")])
@pytest.mark.parametrize("link", [
    "ranks=8&micro_batches=16", "schedule=interleaved&chunks=4&ranks=8&micro_batches=16",
    "schedule=dualpipe&ranks=4&micro_batches=16"])
def test_every_number_is_there_and_can_be_read(open_page, link, width, scheme):
    page = open_page(f"schedules.html#{link}", width, color_scheme=scheme)
    verdict(page, "bubble")
    actions = page.locator(".time .action").count()
    assert page.locator(".time .action text").count() == actions
    assert page.inner_text(".hint") == ""
    assert not rules.pale(page) and not rules.overlaps(page)
    page.locator(".time .action").first.click()         # the others are put off
    assert not rules.pale(page)


def test_where_a_number_has_no_room_that_is_said(open_page):
    page = open_page("schedules.html#ranks=16&micro_batches=64&F=0.1&B=3&W=3")
    verdict(page, "bubble")
    assert page.locator(".time .action text").count() < page.locator(".time .action").count()
    assert "has no room" in page.inner_text(".hint")
    assert page.locator(".time title").first.text_content().startswith("F of micro-batch 0")


def test_every_control_moves_something(open_page):
    page = open_page("schedules.html#schedule=interleaved")
    verdict(page, "bubble")
    for name in ("ranks", "micro_batches", "chunks", "F", "B", "W"):
        before = page.inner_html(".time")
        page.locator(f"input[name={name}]").press("ArrowRight")
        page.wait_for_function(CHANGED, arg=before)
        assert not page.is_visible(".refused")
    before = page.inner_html(".time")
    page.select_option("select[name=breadth_first]", "true")
    page.wait_for_function(CHANGED, arg=before)
    page.locator("input[name=follow]").press("ArrowRight")
    assert page.locator(".time .other").count()
    page.locator("input[name=until]").press("Home")
    assert begun(page) == 0 and set(ends_of_alive(page)) == {0}


def test_numbers_that_a_schedule_does_not_take_are_changed_and_that_is_told(open_page):
    page = open_page("schedules.html#ranks=7")
    verdict(page, "bubble")
    page.select_option("select[name=schedule]", "dualpipe")
    page.locator(".problem", has_text="7 is an odd number: there are 8 now; dualpipe on 8 ranks "
                 "does not take 8 micro-batches: there are 16 now").wait_for()
    assert "ranks=8&micro_batches=16" in page.url and not page.locator(".refused").count()
    page.locator("input[name=ranks]").press("ArrowLeft")        # of even ones alone
    page.wait_for_function("() => location.hash.includes('ranks=6')")
    assert page.is_hidden(".problem")


def test_who_wants_no_motion_sees_it_jump(open_page):
    page = open_page("schedules.html#micro_batches=2", reduced_motion="reduce")
    verdict(page, "bubble")
    page.click(".run")
    seen = set()
    while page.inner_text(".run") == "stop":
        seen.add(page.get_attribute(".now >> nth=0", "x1"))
        page.wait_for_timeout(20)
    most = int(page.get_attribute("input[name=until]", "max")) + 1
    assert most / 3 < len(seen) <= most


def test_the_lesson_plays_it_at_once(open_page):
    page = open_page("07_pipeline_parallel.html")
    tool = page.locator("#play-schedules")
    assert "bubble 37.5%" in tool.locator(".verdict").inner_text()
    assert [one.get_attribute("name") for one in tool.locator(".question [name]").all()] == [
        "schedule", "ranks", "micro_batches"]
    tool.locator("select").select_option("zb-h2")
    verdict(page, "bubble 0.0%", "#play-schedules .verdict")
    tool.locator(".next").click()
    assert tool.locator(".more a").get_attribute("href").startswith("schedules.html#schedule=zb-h2")
    assert tool.locator(".lists").is_hidden()


@pytest.mark.parametrize(("link", "line"), [
    ("schedule=foo", "schedule = 'foo' is none of"), ("ranks=0", "ranks = '0' is no whole number"),
    ("F=-1", "F = '-1' is no number"), ("micro_batches=x", "micro_batches = 'x' is no whole")])
def test_a_bad_link_is_told_in_a_line_above_what_the_page_begins_with(open_page, link, line):
    page = open_page(f"schedules.html#{link}")
    page.locator(".problem", has_text=line).wait_for()
    assert "bubble 37.5%" in page.inner_text(".verdict") and not page.locator(".refused").count()


def test_one_rank_is_one(open_page):
    page = open_page("schedules.html#ranks=1&micro_batches=1")
    verdict(page, "A rank has up to 1 micro-batch alive")
    assert page.get_attribute(".time svg[role]", "aria-label") == (
        "1f1b on 1 rank, 1 micro-batch: bubble 0.0%")
