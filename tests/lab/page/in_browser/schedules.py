"""The tool of schedules."""

from tests.lab.page.in_browser.seen import asked, shoot, verdict


def test_a_schedule_plays(open_page, address):
    page = open_page("schedules.html#schedule=zb-h1&ranks=4&micro_batches=8")
    verdict(page, "bubble")
    told = asked(address, "schedule?schedule=zb-h1&ranks=4&micro_batches=8")
    assert f"bubble {100 * told['bubble']:.1f}%" in page.inner_text(".verdict")
    actions = page.locator(".time .action")
    assert actions.count() == sum(map(len, told["actions"]))
    seen = "all => all.filter(one => one.getAttribute('opacity') === '1').length"
    page.click(".run")
    page.wait_for_timeout(1500)
    some = page.eval_on_selector_all(".time .action", seen)
    assert 0 < some < actions.count()                   # it is on its way
    shoot(page, "schedules-playing")
    page.locator(".run", has_text="play").wait_for(timeout=30_000)         # it has ended
    assert page.eval_on_selector_all(".time .action", seen) == actions.count()
    page.click(".next")                                 # one micro-batch, through all ranks
    assert page.eval_on_selector_all(".time .action", seen) == 4 * 3
    assert page.inner_text(".lists").splitlines()[0].split()[2:5] == told["lists"][0].split()[:3]
