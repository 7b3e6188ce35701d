"""The one test in a browser that `make test` runs: a tool is shown, and computes."""

from tests.lab.site.in_browser.seen import asked, move, settled


def test_a_tool_is_shown_and_computes(open_page, address):
    page = open_page("rings.html")
    settled(page)
    assert page.locator("h1").count() == 1
    move(page, "ranks")
    told = asked(address, "ring?ranks=5")
    for variant in ("ring", "zigzag"):
        shapes = sum(len(shape) for ranks in told[variant]["shapes"] for shape in ranks)
        assert page.locator(f".{variant}-matrix .block").count() == shapes
    assert page.locator(".problem").is_hidden()
