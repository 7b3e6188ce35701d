"""The tool of roofline."""

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
