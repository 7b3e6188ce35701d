"""The tool of roofline."""

from tests.lab.page.in_browser import rules
from tests.lab.page.in_browser.seen import asked, shoot, verdict


def test_a_roofline_says_which_line_is_above(open_page, address):
    page = open_page("roofline.html#cluster=h100&chips=512&strategy=zero-3&tokens=1024")
    told = asked(address, "roofline?cluster=h100&chips=512&strategy=zero-3")
    verdict(page, told["says"])
    assert "messages are above" in page.inner_text(".now")
    assert page.locator(".lines polyline").count() == 4     # no tp
    for _ in range(4):
        page.locator("input[name=tokens]").press("ArrowRight")
    assert "compute is above" in page.inner_text(".now") and "tokens=4096" in page.url
    page.locator("select[name=cluster]").select_option("tpu-v5p")
    page.locator("select[name=strategy]").select_option("both")
    verdict(page, "with ZeRO-3 over 64 and tp over 8")
    assert "zero_axes=2" in page.url and page.locator(".lines polyline").count() == 5
    shoot(page, "roofline-both")


def test_its_chart_has_a_name_and_its_room(open_page):
    page = open_page("roofline.html")
    verdict(page, "On 4,096 chips")
    name = page.locator(".lines svg").get_attribute("aria-label")
    assert "65,536 tokens of a chip: compute is above from 159 on" in name
    assert sum(one["value"] for one in rules.shifts(page)) <= 0.05


def test_a_wrong_link_is_told_and_back_goes_back(open_page):
    page = open_page("roofline.html#cluster=foo&chips=0&strategy=both")
    verdict(page, "cluster = foo is none of a100,", ".problem")
    verdict(page, "On 4,096 chips")
    assert "chips = 0" in page.inner_text(".problem") and "foo" not in page.url
    page.wait_for_timeout(800)                          # it is stayed at
    first = page.url
    for _ in range(3):
        page.locator("input[name=chips]").press("ArrowLeft")
    verdict(page, "On 512 chips")
    assert not page.locator(".problem").is_visible()
    page.go_back()
    verdict(page, "On 4,096 chips")
    assert page.url == first
